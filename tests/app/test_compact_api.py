"""Compaction and receipts over HTTP: every decision is told, and only to those who may know."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from factories_app import (
    ACME_KEY,
    GLOBEX_KEY,
    OUTSIDER_KEY,
    EchoBackend,
    bearer,
    make_app,
    make_body,
    make_documents,
    make_settings,
    user,
)
from litestar.testing import AsyncTestClient


@pytest.fixture
async def http() -> AsyncIterator[AsyncTestClient[Any]]:
    async with AsyncTestClient(make_app()) as http:
        yield http


async def compact(http: AsyncTestClient[Any], key: str = ACME_KEY, **fields: Any) -> Any:
    response = await http.post("/v1/compact", json=make_body(**fields), headers=bearer(key))
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_answer_has_every_field_of_the_contract(http: AsyncTestClient[Any]) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("hi"), {"role": "assistant", "content": "hello"}]
    answer = await compact(
        http,
        messages=[*messages, user("What is a widget?")],
        documents=make_documents(10),
        firsttoken={"max_input_tokens": 400},
    )
    assert set(answer) == {
        *("receipt_id", "messages", "prompt_tokens", "original_prompt_tokens", "budget", "documents"),
        *("denied_documents", "turns", "stages"),
    }
    assert set(answer["documents"][0]) == {
        *(
            "id",
            "action",
            "reason",
            "score",
            "label",
            "tokens_before",
            "tokens_after",
            "spans",
            "merged_into",
            "sources",
        )
    }
    assert set(answer["turns"][0]) == {"index", "action", "reason", "tokens_before", "tokens_after"}
    assert set(answer["stages"][0]) == {"stage", "tokens_before", "tokens_after", "ms", "degraded"}
    assert answer["budget"] == {"max_input_tokens": 400, "source": "request"}
    assert answer["prompt_tokens"] <= 400 < answer["original_prompt_tokens"]


async def test_nothing_is_generated_and_no_tokens_are_charged() -> None:
    backend = EchoBackend()
    async with AsyncTestClient(make_app(make_settings(acme={"tokens_per_day": 50}), backend)) as http:
        await compact(http, documents=make_documents(20))
        assert (await http.post("/v1/chat/completions", json=make_body(), headers=bearer())).status_code == 200
    assert len(backend.requests) == 1


async def test_spans_are_exactly_the_kept_text(http: AsyncTestClient[Any]) -> None:
    documents = make_documents(10)
    answer = await compact(http, documents=documents, firsttoken={"max_input_tokens": 800})
    texts = {document["id"]: document["text"] for document in documents}
    prompt = answer["messages"][-1]["content"]
    kept = [entry for entry in answer["documents"] if entry["spans"]]
    assert kept
    for entry in kept:
        for start, end in entry["spans"]:
            assert texts[entry["id"]][start:end] in prompt


async def test_a_completion_sends_what_compact_shows() -> None:
    backend = EchoBackend()
    async with AsyncTestClient(make_app(backend=backend)) as http:
        shown = await compact(http, documents=make_documents(20))
        await http.post("/v1/chat/completions", json=make_body(documents=make_documents(20)), headers=bearer())
    assert list(backend.requests[0].messages) == shown["messages"]


async def test_documents_of_other_groups_are_only_counted(http: AsyncTestClient[Any]) -> None:
    documents = [
        {"id": "open", "text": "Widgets are made in Ghent."},
        {"id": "staff", "text": "Widgets cost 7.", "acl": ["staff"]},
        {"id": "board", "text": "Classified merger.", "acl": ["board"]},
        {"id": "nobody", "text": "Sealed file.", "acl": []},
    ]
    answer = await compact(http, documents=documents)
    assert answer["denied_documents"] == 2
    assert [entry["id"] for entry in answer["documents"]] == ["open", "staff"]
    receipt = await http.get(f"/v1/receipts/{answer['receipt_id']}", headers=bearer())
    for told in (str(answer), receipt.text):
        assert "Classified" not in told
        assert "board" not in told
        assert "Sealed" not in told


async def test_groups_in_the_body_give_no_rights(http: AsyncTestClient[Any]) -> None:
    documents = [{"id": "staff", "text": "Widgets cost 7.", "acl": ["staff"]}]
    answer = await compact(http, OUTSIDER_KEY, documents=documents, groups=["staff"], user="staff")
    assert answer["denied_documents"] == 1


async def test_a_tenant_may_deny_unlabelled_documents() -> None:
    async with AsyncTestClient(make_app(make_settings(acme={"deny_unlabelled": True}))) as http:
        answer = await compact(http, documents=[{"id": "a", "text": "Widgets are made in Ghent."}])
        other = await compact(http, GLOBEX_KEY, documents=[{"id": "a", "text": "Widgets are made in Ghent."}])
    assert (answer["denied_documents"], other["denied_documents"]) == (1, 0)


async def test_receipts_are_read_by_the_own_tenant_only(http: AsyncTestClient[Any]) -> None:
    answer = await compact(http, documents=make_documents(5), firsttoken={"max_input_tokens": 200})
    url = f"/v1/receipts/{answer['receipt_id']}"
    own = await http.get(url, headers=bearer())
    assert own.json()["documents"] == answer["documents"]
    assert own.json()["originals"]["documents"][0]["text"] == make_documents(5)[0]["text"]
    assert (await http.get(url)).status_code == 401
    foreign = await http.get(url, headers=bearer(GLOBEX_KEY))
    missing = await http.get("/v1/receipts/rcpt_0", headers=bearer(GLOBEX_KEY))
    assert (foreign.status_code, missing.status_code) == (404, 404)
    assert foreign.json()["error"]["code"] == "receipt_not_found"


async def test_the_model_may_be_left_out_but_not_be_wrong(http: AsyncTestClient[Any]) -> None:
    without = await http.post("/v1/compact", json={"messages": [user("hi")]}, headers=bearer())
    wrong = await http.post("/v1/compact", json=make_body(model="gpt-9"), headers=bearer())
    assert (without.status_code, wrong.status_code) == (200, 404)


async def test_a_message_of_megabytes_is_refused_by_its_size_without_being_tokenized() -> None:
    backend = EchoBackend()
    counted: list[int] = []
    encode = backend.encoder.encode_chat

    def encode_chat(messages: Any, tools: Any = (), **kwargs: Any) -> list[int]:
        counted.append(len(messages))
        return encode(messages, tools, **kwargs)

    backend.encoder.encode_chat = encode_chat  # type: ignore[method-assign]
    async with AsyncTestClient(make_app(backend=backend)) as http:
        counted.clear()  # of the start
        body = make_body("wörd " * 1_000_000)
        response = await http.post("/v1/chat/completions", json=body, headers=bearer())
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "at least" in response.json()["error"]["message"]
    assert counted == []


async def test_request_states_how_long_the_reduction_may_take(http: AsyncTestClient[Any]) -> None:
    hurried = await compact(
        http, documents=make_documents(20), firsttoken={"max_input_tokens": 400, "reduce_deadline_ms": 0}
    )
    assert hurried["prompt_tokens"] <= 400
    late = [stage for stage in hurried["stages"] if stage["stage"] != "access"]
    assert all("deadline of 0 ms" in (stage["degraded"] or "") for stage in late)
    at_ease = await compact(
        http, documents=make_documents(20), firsttoken={"max_input_tokens": 400, "reduce_deadline_ms": 600_000}
    )
    assert not any("deadline" in (stage["degraded"] or "") for stage in at_ease["stages"])


async def test_negative_deadline_is_refused(http: AsyncTestClient[Any]) -> None:
    body = make_body(firsttoken={"reduce_deadline_ms": -1})
    response = await http.post("/v1/compact", json=body, headers=bearer(ACME_KEY))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "firsttoken.reduce_deadline_ms"
