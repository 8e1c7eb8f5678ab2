"""Chat completions of an upstream through the gateway, over sockets: fields, bytes, usage, errors, leaving."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from factories_app import ACME_KEY, GLOBEX_KEY, bearer, make_body, make_documents, wait_until
from factories_upstream import MODEL, Upstream, frames_of, gateway_on, running_upstream
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is a widget?"}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ARGUMENTS = ["", '{"ci', 'ty": "Z', "\\u00fc", "rich", ' 😀"', ', "d": 1.0', "}"]


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with running_upstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def url(upstream: Upstream) -> Iterator[str]:
    with gateway_on(upstream) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=ACME_KEY, max_retries=0, timeout=20) as client:
        yield client


def post(url: str, body: dict[str, Any], key: str = ACME_KEY) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(key), timeout=20)


def ask(url: str, **behaviour: Any) -> httpx.Response:
    return post(url, make_body(x_behaviour=behaviour))


def stream(url: str, fields: dict[str, Any] | None = None, **behaviour: Any) -> list[Any]:
    response = post(url, make_body(stream=True, x_behaviour=behaviour, **(fields or {})))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return frames_of(response.text)


def content_of(frames: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for frame in frames
        if isinstance(frame, dict)
        for choice in frame.get("choices", ())
    )


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=QUESTION)
    assert answer.choices[0].message.content == "Hello, wörld! 你好 😀"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "default"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    extension = (answer.model_extra or {})["firsttoken"]
    assert extension["prompt_tokens"] >= answer.usage.prompt_tokens
    assert extension["token_count"] == "o200k_base, template estimated (never too few)"


def test_the_answers_own_fields_keep_their_bytes(url: str) -> None:
    text = ask(url).text
    assert '"x_vendor":1.5,' in text
    assert '"content": "Hello, w\\u00f6rld! \\u4f60\\u597d \\ud83d\\ude00", "refusal": null' in text


def test_unknown_fields_and_reasoning_options_reach_the_upstream(client: openai.OpenAI, upstream: Upstream) -> None:
    client.chat.completions.create(
        model="default",
        messages=[{"role": "developer", "content": "Be brief."}, *QUESTION],
        reasoning_effort="low",
        response_format={"type": "json_object"},
        extra_body={"x_custom": {"nested": [1.0, None]}, "chat_template_kwargs": {"enable_thinking": False}},
    )
    sent = upstream.last_request()
    assert sent["model"] == MODEL
    assert sent["messages"][0] == {"role": "developer", "content": "Be brief."}
    assert sent["reasoning_effort"] == "low"
    assert sent["response_format"] == {"type": "json_object"}
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert b'"x_custom":{"nested":[1.0,null]}' in upstream.last_body()


def test_a_conversation_with_calls_refusals_images_and_functions_passes_unchanged(url: str, upstream: Upstream) -> None:
    calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":  "Z\\u00fcrich"}'},
        }
        for n in range(2)
    ]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000, "detail": "low"}}
    messages = [
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "refusal": "I cannot say."},
        {"role": "user", "content": [{"type": "text", "text": "Look"}, image]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_0", "content": [{"type": "text", "text": "sun"}]},
        {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": "{}"}},
        {"role": "function", "name": "old", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}, {"type": "video_url", "video_url": {}}]},
    ]
    functions = [{"name": "old", "parameters": {}}]
    response = post(url, make_body() | {"messages": messages, "functions": functions, "function_call": "auto"})
    assert response.status_code == 200, response.text
    sent = upstream.last_request()
    assert sent["messages"] == messages
    assert sent["functions"] == functions
    # 85 for the small image, 4,096 for the other part; base64 is never counted as text
    assert 85 + 4096 < response.json()["firsttoken"]["prompt_tokens"] < 5200


def test_a_body_of_megabytes_arrives_whole(url: str, upstream: Upstream) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 750_000, "detail": "low"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look"}, image]}]
    response = post(url, make_body() | {"messages": messages})
    assert response.status_code == 200, response.text
    assert upstream.last_request()["messages"] == messages
    assert int(upstream.log()[-1]["headers"]["content-length"]) == len(upstream.last_body())


def test_documents_are_reduced_into_the_last_message(url: str, upstream: Upstream) -> None:
    body = make_body("What is a widget?", documents=make_documents(30), firsttoken={"max_input_tokens": 1000})
    answer = post(url, body).json()
    sent = upstream.last_request()
    assert sent["messages"][0]["content"].startswith("<documents>\n[")
    assert "A widget is a small gadget made in Ghent." in sent["messages"][0]["content"]
    assert answer["usage"]["prompt_tokens"] <= answer["firsttoken"]["prompt_tokens"] <= 1000
    assert answer["firsttoken"]["saved_tokens"] > 1000


def test_tool_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=QUESTION,
        tools=[WEATHER],
        extra_body={"x_behaviour": {"tool_calls": [["weather", *ARGUMENTS], ["weather", '{"city": "Bern"}']]}},
    )
    calls = answer.choices[0].message.tool_calls or []
    assert [call.function.arguments for call in calls if call.type == "function"] == [
        "".join(ARGUMENTS),
        '{"city": "Bern"}',
    ]
    assert answer.choices[0].finish_reason == "tool_calls"


def test_streamed_arguments_arrive_as_the_same_deltas(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="default",
        messages=QUESTION,
        tools=[WEATHER],
        stream=True,
        extra_body={"x_behaviour": {"tool_calls": [["weather", *ARGUMENTS]], "write_size": 1}},
    )
    deltas = [call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [delta.arguments for delta in deltas if delta is not None] == ["", *ARGUMENTS]
    assert deltas[0] is not None
    assert deltas[0].name == "weather"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 3, 4096])
def test_characters_survive_every_split(url: str, size: int, newline: str) -> None:
    pieces = ["你", "好", "👩‍👩‍👧", "e\u0301", "\\u0041", "\n\ndata: x\n", "ﬁ"]
    frames = stream(url, pieces=pieces, write_size=size, newline=newline)
    assert [frame["choices"][0]["delta"].get("content") for frame in frames[1:-2]] == pieces
    assert frames[-1] == "[DONE]"


def test_a_client_that_did_not_ask_sees_no_usage(url: str, upstream: Upstream) -> None:
    frames = stream(url)
    assert all("usage" not in frame for frame in frames if isinstance(frame, dict))
    assert all(frame["choices"] for frame in frames if isinstance(frame, dict))
    assert upstream.last_request()["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("usage", ["own_chunk", "with_finish"])
def test_a_client_that_asked_gets_usage_once_in_a_last_chunk_without_choices(url: str, usage: str) -> None:
    frames = stream(url, {"stream_options": {"include_usage": True}}, usage=usage)
    chunks = [frame for frame in frames if isinstance(frame, dict)]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert chunks[-1]["firsttoken"]["saved_tokens"] == 0
    assert chunks[-1]["model"] == "default"
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_several_choices_stream_side_by_side(url: str) -> None:
    frames = stream(url, {"n": 3}, reply="a b")
    ends = [c["index"] for f in frames if isinstance(f, dict) for c in f["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


def test_reasoning_deltas_pass(url: str) -> None:
    frames = stream(url, reasoning="Hmm.", reply="Yes")
    assert frames[1]["choices"][0]["delta"] == {"reasoning_content": "Hmm."}


@pytest.mark.parametrize(
    "behaviour",
    [{"error_after": 3}, {"die_after": 3}, {"end": "none"}],
    ids=["error frame", "connection lost", "end without a finish reason"],
)
def test_a_stream_that_breaks_off_ends_with_an_error_and_nothing_else(url: str, behaviour: dict[str, Any]) -> None:
    frames = stream(url, **behaviour)
    assert frames[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in frames
    assert all(choice["finish_reason"] is None for frame in frames[:-1] for choice in frame["choices"])
    assert content_of(frames).startswith("Hello, wörld!")


def test_the_official_client_raises_for_a_broken_stream(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="default", messages=QUESTION, stream=True, extra_body={"x_behaviour": {"error_after": 3}}
    )
    with pytest.raises(openai.APIError, match="broke off the answer: CUDA error"):
        list(chunks)


@pytest.mark.parametrize(("code", "status"), [(400, 400), (422, 422), (429, 429), (503, 503), (500, 502), (None, 502)])
def test_an_error_in_place_of_the_first_event_has_its_own_status(url: str, code: int | None, status: int) -> None:
    body = make_body(stream=True, x_behaviour={"error_after": 0, "error_code": code})
    response = post(url, body)
    assert response.status_code == status, response.text
    assert "CUDA error" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] in (None, "rate_limit_exceeded")


@pytest.mark.parametrize("is_stream", [False, True])
def test_refusals_have_openais_shape(url: str, is_stream: bool) -> None:
    error = {"object": "error", "message": "top_k must be positive", "type": "BadRequestError", "code": 400}
    response = post(url, make_body(stream=is_stream, x_behaviour={"status": 400, "body": error}))
    assert response.status_code == 400
    assert response.json() == {
        "error": {"message": "top_k must be positive", "type": "invalid_request_error", "param": None, "code": None}
    }


def test_the_upstreams_window_is_told_as_openai_does(client: openai.OpenAI) -> None:
    text = "This model's maximum context length is 8 tokens. However, you requested 9."
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.chat.completions.create(
            model="default",
            messages=QUESTION,
            extra_body={"x_behaviour": {"status": 400, "body": {"message": text, "code": 400}}},
        )
    assert caught.value.code == "context_length_exceeded"


def test_a_rate_limit_passes_with_its_retry_after(url: str) -> None:
    body = {"error": {"message": "slow down", "type": "tokens", "code": "rate_limit_exceeded", "param": None}}
    response = ask(url, status=429, body=body, headers={"Retry-After": "17"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "17")
    assert response.json()["error"] == body["error"]


def test_the_gateways_own_key_being_refused_is_not_the_clients_fault(url: str) -> None:
    response = ask(url, status=401, body={"error": {"message": "bad key sk-secret", "code": "invalid_api_key"}})
    assert response.status_code == 502
    assert "sk-secret" not in response.text


def test_an_answer_that_is_no_completion_is_an_error(url: str) -> None:
    assert ask(url, status=200, body="<html>").status_code == 502


def test_tenants_have_salts_of_their_own_whatever_they_send(url: str, upstream: Upstream) -> None:
    salts = {}
    for key in (ACME_KEY, GLOBEX_KEY):
        post(url, make_body(cache_salt="mine"), key)
        salts[key] = upstream.last_request()["cache_salt"]
    assert salts[ACME_KEY] != salts[GLOBEX_KEY]
    assert "mine" not in salts.values()
    long = make_body("word " * 200)
    assert [post(url, long, key).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for key in
            (ACME_KEY, ACME_KEY, GLOBEX_KEY, GLOBEX_KEY)] == [0, 192, 0, 192]  # fmt: skip


def test_the_clients_key_stays_here(url: str, upstream: Upstream) -> None:
    post(url, make_body())
    headers = upstream.log()[-1]["headers"]
    assert "authorization" not in headers
    assert headers["x-request-id"].startswith("req_")


def test_max_tokens_is_clamped_to_the_room_and_left_alone_where_it_fits(url: str, upstream: Upstream) -> None:
    assert post(url, make_body(max_tokens=10)).status_code == 200
    assert upstream.last_request()["max_tokens"] == 10
    answer = post(url, make_body(max_tokens=1_000_000)).json()
    assert upstream.last_request()["max_tokens"] == answer["firsttoken"]["max_tokens"] < 32768
    post(url, make_body())
    assert "max_tokens" not in upstream.last_request()


@pytest.mark.parametrize(
    ("is_stream", "behaviour"),
    [
        (False, {"hang_after": -1}),
        (False, {"delay_s": 30}),
        (True, {"hang_after": -1}),
        (True, {"hang_after": 2}),
        (True, {"delay_s": 0.2, "reply": "a " * 200}),
    ],
)
def test_a_client_that_leaves_is_gone_at_the_upstream_within_a_second(
    url: str, upstream: Upstream, is_stream: bool, behaviour: dict[str, Any]
) -> None:
    num_before = len(upstream.log())
    body = make_body(stream=is_stream, x_behaviour=behaviour)
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=bearer(), timeout=0.7) as response,
    ):
        read_for(response, 0.7)
    left_at = time.time()
    assert wait_until(lambda: len(upstream.log()) > num_before and upstream.log()[-1]["cancelled"])
    assert upstream.log()[-1]["cancelled_at"] - left_at < 1.0


def read_for(response: httpx.Response, seconds: float) -> None:
    """Reads a while, then behaves as a client whose time is over."""
    deadline = time.monotonic() + seconds
    for _ in response.iter_raw():
        if time.monotonic() > deadline:
            break
    raise httpx.ReadTimeout("enough")


def test_connections_are_used_again(url: str, upstream: Upstream) -> None:
    post(url, make_body())
    num_before = upstream.num_connections
    for _ in range(5):
        assert json.loads(post(url, make_body()).text)["choices"]
    # Asking for the number is a connection of its own each time.
    assert upstream.num_connections == num_before + 1


def test_connections_of_streams_are_used_again(url: str, upstream: Upstream) -> None:
    # The end of the HTTP answer comes after [DONE], in a packet of its own.
    post(url, make_body())
    num_before = upstream.num_connections
    for _ in range(5):
        assert stream(url)[-1] == "[DONE]"
        time.sleep(0.05)
    assert upstream.num_connections == num_before + 1


def test_a_text_of_millions_of_characters_is_counted_and_passed_on(url: str) -> None:
    # The tokenizer's package takes less than a million at a time.
    answer = post(url, make_body("one two " * 300_000, firsttoken={"bypass": True}))
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_large_request_does_not_hold_up_small_ones(url: str) -> None:
    # Ten megabytes of tokens take a thread seconds to count; meanwhile the event loop answers.
    large = threading.Thread(target=post, args=(url, make_body("word " * 2_000_000, firsttoken={"bypass": True})))
    large.start()
    num_answered_meanwhile = 0
    while large.is_alive() and num_answered_meanwhile < 20:
        assert post(url, make_body()).status_code == 200
        num_answered_meanwhile += large.is_alive()
    large.join()
    assert num_answered_meanwhile >= 1
