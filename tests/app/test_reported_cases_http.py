"""What users of other gateways reported, as behaviour of ours over HTTP: one small request for each kind."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from factories_app import (
    OUTSIDER_KEY,
    EchoBackend,
    bearer,
    make_app,
    make_body,
    make_documents,
    make_settings,
    served,
    user,
)
from litestar.testing import AsyncTestClient

from app.settings import PolicySettings

URL = "/v1/chat/completions"
ORIGINAL_TEXT = "Widgets are made in Ghent, in hall seven, by people who know how."
NOISE: list[dict[str, Any]] = [
    {"id": f"n{n}", "text": f"House {n} has a canteen that serves soup on day {n} of the week."} for n in range(30)
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "title": "T",
                "properties": {
                    "description": {"type": "string"},
                    "title": {"type": "string"},
                    "default": {"default": 1},
                },
                "required": ["title", "description"],
            },
        },
    }
    for name in ("find", "open", "read", "send", "stop", "wait")
]


@pytest.fixture
async def http() -> AsyncIterator[AsyncTestClient[Any]]:
    async with AsyncTestClient(make_app()) as http:
        yield http


async def compact(http: AsyncTestClient[Any], key: str | None = None, **body: Any) -> Any:
    response = await http.post("/v1/compact", json=make_body() | body, headers=bearer(key) if key else bearer())
    assert response.status_code == 200, response.text
    return response.json()


async def receipt(http: AsyncTestClient[Any], answer: Any) -> Any:
    return (await http.get(f"/v1/receipts/{answer['receipt_id']}", headers=bearer())).json()


# Compaction fidelity


async def test_what_the_engine_reads_ends_with_the_rules_and_the_question_as_sent() -> None:
    backend = EchoBackend()
    system = "Be brief. Be kind. Use the documents. Cite labels. Write English. If unsure answer UNKNOWN."
    question = " Which house\tserves soup?\n\nName it. "
    async with AsyncTestClient(make_app(backend=backend)) as http:
        body = make_body(
            messages=[{"role": "system", "content": system}, user(question)],
            documents=NOISE,
            firsttoken={"max_input_tokens": 400},
        )
        answer = (await http.post(URL, json=body, headers=bearer())).json()
    (request,) = backend.requests
    assert request.messages[0] == {"role": "system", "content": system}
    assert request.messages[1]["content"].endswith("</documents>\n\n" + question)
    assert 0 < answer["usage"]["prompt_tokens"] <= 400


async def test_prompt_that_can_gain_nothing_is_sent_as_it_is_and_the_receipt_says_why(
    http: AsyncTestClient[Any],
) -> None:
    answer = await compact(http)
    kept = await receipt(http, answer)
    assert kept["pass_through"] == f"prompt of {answer['prompt_tokens']} tokens is not above min_prompt_tokens 100"
    assert answer["messages"] == [user("What is a widget?")]
    assert answer["prompt_tokens"] == answer["original_prompt_tokens"]
    assert [stage["stage"] for stage in answer["stages"]] == ["access"]


async def test_no_marker_reaches_model_or_client_where_no_tool_could_resolve_it() -> None:
    backend = EchoBackend()
    async with AsyncTestClient(make_app(backend=backend)) as http:
        body = make_body("Which house serves soup on day 7?", documents=NOISE, firsttoken={"max_input_tokens": 400})
        answer = (await http.post(URL, json=body, headers=bearer())).json()
    texts = ["Which house serves soup on day 7?", *(document["text"] for document in NOISE)]
    words = {word for text in texts for word in text.split()}
    words |= {f"[{n}]" for n in range(1, 31)} | {"<documents>", "</documents>"}
    assert set(backend.requests[0].messages[0]["content"].split()) <= words
    assert backend.requests[0].tools == []
    assert answer["choices"][0]["message"]["content"] == backend.reply


async def test_text_that_looks_like_a_placeholder_reaches_the_engine_unchanged() -> None:
    backend = EchoBackend()
    text = "Widgets keep {{KEEP_0}} and <<REF:1>> and __PLACEHOLDER_3__ in Ghent."
    async with AsyncTestClient(make_app(backend=backend)) as http:
        body = make_body("What do widgets keep in {{KEEP_1}} Ghent?", documents=[{"text": text}, *NOISE])
        await http.post(URL, json=body, headers=bearer())
    content = backend.requests[0].messages[0]["content"]
    assert text in content
    assert content.endswith("What do widgets keep in {{KEEP_1}} Ghent?")


async def test_arguments_of_calls_reach_the_engine_byte_for_byte() -> None:
    backend = EchoBackend()
    arguments = '{"title":  "caf\\u00e9 \\ud83d\\ude00 你", "description": null, "default": {"a": [1, 2.50]}}'
    messages = [
        user("What is a widget?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "\n".join(f"src/m{n}.py" for n in range(40))},
    ]
    async with AsyncTestClient(make_app(backend=backend)) as http:
        body = make_body(messages=messages, tools=TOOLS, documents=NOISE)
        assert (await http.post(URL, json=body, headers=bearer())).status_code == 200
    assert backend.requests[0].messages[1:] == messages[1:]
    assert backend.requests[0].tools == TOOLS


# Citations and provenance


async def test_metadata_is_intact_and_beside_the_text(http: AsyncTestClient[Any]) -> None:
    metadata = {"tenant": "t1", "nested": {"list": [1, {"深": None}], "description": "x"}, "id": 7}
    documents: list[dict[str, Any]] = [
        {
            "id": f"a{n}",
            "text": f"<p>Widgets {n} are made in <b>Ghent</b>.</p>",
            "source": "s",
            "metadata": metadata | {"n": n},
        }
        for n in range(3)
    ]
    answer = await compact(http, documents=[*documents, *NOISE], firsttoken={"max_input_tokens": 300})
    originals = (await receipt(http, answer))["originals"]["documents"]
    assert [document["metadata"] for document in originals[:3]] == [metadata | {"n": n} for n in range(3)]
    assert [document["id"] for document in originals] == [document["id"] for document in [*documents, *NOISE]]
    assert "tenant" not in str(answer["messages"])


async def test_nothing_relevant_leaves_the_question_alone(http: AsyncTestClient[Any]) -> None:
    for documents in (NOISE[:5], [{"text": ""}, {"text": " \n"}], []):
        answer = await compact(
            http, messages=[user("Zebra?")], documents=documents, firsttoken={"max_input_tokens": 30}
        )
        assert answer["messages"] == [user("Zebra?")]
        assert {decision["action"] for decision in answer["documents"]} <= {"dropped"}
        assert all(decision["reason"] for decision in answer["documents"])


async def test_readers_of_a_text_are_checked_on_every_turn_whatever_cleaning_did_to_it() -> None:
    page = f"<html><body><nav>Home | News</nav><p>{ORIGINAL_TEXT}</p><footer>© Acme</footer></body></html>"
    documents = [{"id": "staff", "text": page, "acl": ["staff"], "metadata": {"user": "ann"}}, *NOISE]
    async with AsyncTestClient(make_app()) as http:
        first = await compact(http, documents=documents)
        assert ORIGINAL_TEXT in first["messages"][-1]["content"]
        history = [user("What is a widget?"), {"role": "assistant", "content": "A gadget."}, user("Where is it made?")]
        again = await compact(http, documents=documents, messages=history)
        outsider = await compact(http, OUTSIDER_KEY, documents=documents, messages=history)
        stored = await receipt(http, again)
    assert ORIGINAL_TEXT in again["messages"][-1]["content"]
    assert (outsider["denied_documents"], "Ghent" in str(outsider)) == (1, False)
    original = stored["originals"]["documents"][0]
    assert (original["id"], original["acl"], original["metadata"]) == ("staff", ["staff"], {"user": "ann"})


# Budget, counting, selection


@pytest.mark.parametrize(
    "text", ["海" * 1000, "😀" * 200 + "𠮷" * 200, "한국어" * 300, "ا" * 900], ids=["zh", "emoji", "ko", "ar"]
)
async def test_every_script_is_counted_as_the_engine_counts_it(http: AsyncTestClient[Any], text: str) -> None:
    num_bytes = len(text.encode())
    answer = (await http.post(URL, json=make_body(text), headers=bearer())).json()
    assert answer["usage"]["prompt_tokens"] == num_bytes + len("<user><assistant>")
    within = await http.post(
        "/v1/compact", json=make_body(text, firsttoken={"max_input_tokens": num_bytes + 17}), headers=bearer()
    )
    over = await http.post(
        "/v1/compact", json=make_body(text, firsttoken={"max_input_tokens": num_bytes + 16}), headers=bearer()
    )
    assert (within.status_code, over.status_code) == (200, 400)
    assert over.json()["error"]["code"] == "context_length_exceeded"
    cut = await compact(
        http, documents=[{"text": f"A widget is 1. {text}"}, *NOISE], firsttoken={"max_input_tokens": 300}
    )
    assert cut["prompt_tokens"] <= 300


@pytest.mark.parametrize("field", [{"stream": True}, {}])
async def test_an_image_is_refused_by_name_and_never_counted_as_text(field: dict[str, Any]) -> None:
    backend = EchoBackend()
    url = "data:image/png;base64," + "A" * 500_000
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    async with AsyncTestClient(make_app(backend=backend)) as http:
        body = make_body(messages=[{"role": "user", "content": content}], **field)
        response = await http.post(URL, json=body, headers=bearer())
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_value", "messages[0].content[1]")
    assert len(response.content) < 1000
    assert backend.requests == []


async def test_all_text_parts_are_counted_once_and_in_order() -> None:
    backend = EchoBackend()
    parts = [{"type": "text", "text": text} for text in ("What is", "a widget", "made of?")]
    async with AsyncTestClient(make_app(backend=backend)) as http:
        body = make_body(messages=[{"role": "user", "content": parts}])
        plain = (await http.post(URL, json=body, headers=bearer())).json()
        reduced = (await http.post(URL, json={**body, "documents": make_documents(12)}, headers=bearer())).json()
    assert plain["usage"]["prompt_tokens"] == len("<user>What is\na widget\nmade of?<assistant>")
    assert backend.requests[0].messages[0]["content"] == parts
    assert backend.requests[1].messages[0]["content"][1:] == parts
    assert reduced["usage"]["prompt_tokens"] == reduced["firsttoken"]["prompt_tokens"]


async def test_template_tools_and_turns_are_counted_as_the_engine_counts_them(http: AsyncTestClient[Any]) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        user("Hello."),
        {"role": "assistant", "content": "Hi.", "refusal": None},
        user("What is a widget?"),
    ]
    for fields in ({}, {"tools": TOOLS[:5]}, {"tools": TOOLS[:5], "documents": make_documents(9)}):
        answer = (await http.post(URL, json=make_body(messages=messages, **fields), headers=bearer())).json()
        assert answer["usage"]["prompt_tokens"] == answer["firsttoken"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens"] > len(msgspec.json.encode(fields.get("tools", [])))
    metrics = (await http.get("/metrics")).text
    assert 'firsttoken_prompt_count_mismatch_total{model_name="default"} 0.0' in metrics


async def test_starting_and_serving_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tried.append(args[1:] or args)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    async with AsyncTestClient(make_app()) as http:
        body = make_body(documents=make_documents(20), firsttoken={"max_input_tokens": 400})
        assert (await http.post(URL, json=body, headers=bearer())).status_code == 200
    assert tried == []


async def test_small_requests_are_answered_while_megabytes_are_counted() -> None:
    backend = EchoBackend()
    app = make_app(backend=backend)
    has_begun, may_end = threading.Event(), threading.Event()
    count = backend.encoder.count_text

    def count_slowly(text: str) -> int:
        if len(text) > 1_000_000:
            has_begun.set()
            assert may_end.wait(60), "nobody let the large request go on"
        return count(text)

    backend.encoder.count_text = count_slowly  # type: ignore[method-assign]
    large = make_body(documents=[{"id": "blob", "text": "word " * 1_000_000}])
    with served(app) as url:
        async with httpx.AsyncClient(base_url=url, headers=bearer(), timeout=90) as http:
            waiting = asyncio.create_task(http.post("/v1/compact", json=large))
            try:
                assert await asyncio.to_thread(has_begun.wait, 60)
                small = [http.post(URL, json=make_body(documents=make_documents(3))) for _ in range(20)]
                answers = await asyncio.gather(*small)
                assert not waiting.done()
            finally:
                may_end.set()
            assert [answer.status_code for answer in answers] == [200] * 20
            assert (await waiting).status_code == 200


# Message protocol


async def test_turns_with_refusal_null_content_or_only_calls_are_accepted_and_passed_on() -> None:
    backend = EchoBackend()
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages = [
        user("How do I pick a lock?"),
        {"role": "assistant", "content": None, "refusal": "I cannot help with that."},
        user("Then find widgets."),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "None found."}],
        },
        user("What is a widget?"),
    ]
    backend.encoder._content = lambda message: str(message.get("content"))  # type: ignore[method-assign]
    async with AsyncTestClient(make_app(backend=backend)) as http:
        response = await http.post(URL, json=make_body(messages=messages, documents=NOISE[:3]), headers=bearer())
    assert response.status_code == 200
    assert backend.requests[0].messages[:-1] == messages[:-1]


async def test_unknown_fields_are_named_at_every_depth_that_is_ours_and_kept_at_every_other() -> None:
    backend = EchoBackend()
    messages = [user("What is a widget?") | {"x_custom": {"a": [1]}, "name": "ann"}]
    async with AsyncTestClient(make_app(backend=backend)) as http:
        body = make_body(messages=messages, x_custom=1, extra_body={"nested": {"y": 2}})
        answer = (await http.post(URL, json=body, headers=bearer())).json()
        ours = await http.post(URL, json=make_body(firsttoken={"x_custom": 1}), headers=bearer())
    assert backend.requests[0].messages == messages
    assert answer["firsttoken"]["ignored_fields"] == ["x_custom", "extra_body"]
    assert (ours.status_code, ours.json()["error"]["param"]) == (400, "firsttoken.x_custom")


async def test_switches_of_the_template_reach_the_engine() -> None:
    backend = EchoBackend()
    switches = {"enable_thinking": False, "nested": {"budget": 5}}
    async with AsyncTestClient(make_app(backend=backend)) as http:
        body = make_body(reasoning_effort="low", chat_template_kwargs=switches, documents=make_documents(9))
        answer = (await http.post(URL, json=body, headers=bearer())).json()
    assert backend.requests[0].template_kwargs == {"reasoning_effort": "low", **switches}
    assert answer["firsttoken"]["ignored_fields"] == []


# Prefix stability


def cached_tokens(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_clock_in_the_system_text_costs_no_cached_prefix_where_it_may_move() -> None:
    rules = "Answer from the documents, in one sentence, and cite their labels. If unsure answer UNKNOWN."
    policies = {"stable": PolicySettings(reducer={"template": {"volatile_fields": "move"}})}
    async with AsyncTestClient(make_app(make_settings(policies=policies))) as http:
        for policy, cached in (("default", "little"), ("stable", "all")):
            answers = []
            for minute in (33, 34):
                system = f"Current time: 2026-11-30 10:{minute}:05\n{rules}"
                body = make_body(
                    messages=[{"role": "system", "content": system}, user(f"What is widget {minute}?")],
                    firsttoken={"policy": policy},
                )
                answers.append((await http.post(URL, json=body, headers=bearer())).json())
            prefix = len(f"<system>{rules}<user>") // 16 * 16
            assert (cached_tokens(answers[1]) >= prefix) == (cached == "all"), policy


async def test_tools_in_any_order_share_one_prefix() -> None:
    async with AsyncTestClient(make_app()) as http:
        answers = []
        for order in (TOOLS, TOOLS[::-1], TOOLS[3:] + TOOLS[:3], [dict(reversed(tool.items())) for tool in TOOLS]):
            body = make_body("Which widget?", tools=order)
            answers.append((await http.post(URL, json=body, headers=bearer())).json())
    num_tokens = {answer["usage"]["prompt_tokens"] for answer in answers}
    assert len(num_tokens) == 1
    assert [cached_tokens(answer) for answer in answers[1:]] == [(num_tokens.pop() - 1) // 16 * 16] * 3


async def test_documents_in_another_order_share_one_prefix_under_the_cache_order() -> None:
    policies = {"cache": PolicySettings(reducer={"template": {"document_order": "cache"}})}
    documents = [{"id": f"w{n}", "text": f"Widget {n} is a gadget made in hall {n} of Ghent."} for n in range(5)]
    async with AsyncTestClient(make_app(make_settings(policies=policies))) as http:
        cached = {}
        for policy in ("default", "cache"):
            for order in (documents, [documents[n] for n in (3, 0, 4, 2, 1)]):
                body = make_body("What is a widget?", documents=order, firsttoken={"policy": policy})
                answer = (await http.post(URL, json=body, headers=bearer())).json()
                cached[policy] = (cached_tokens(answer), answer["usage"]["prompt_tokens"])
    assert cached["default"][0] < 64
    assert cached["cache"][0] == (cached["cache"][1] - 1) // 16 * 16
