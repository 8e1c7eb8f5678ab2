"""The official client, unchanged, over a real socket."""

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest
from factories_app import (
    ACME_KEY,
    EchoBackend,
    bearer,
    make_app,
    make_body,
    make_documents,
    make_settings,
    served,
    wait_until,
)
from openai.types.chat import ChatCompletionMessageParam

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is a widget?"}]


def make_client(url: str, key: str = ACME_KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(make_app(make_settings(acme={"requests_per_minute": 1000}))) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with make_client(url) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=64)
    assert answer.choices[0].message.content == "Hello, wörld! 你好 😀"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="default", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "Hello, wörld! 你好 😀"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


def test_several_choices_have_one_prompt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=QUESTION, n=3, seed=5, max_tokens=64)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"Hello, wörld! 你好 😀"}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (34, 12, 46)


def test_several_choices_as_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="default", messages=QUESTION, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts, reasons, roles = {0: "", 1: ""}, {}, []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
        if choice.finish_reason is not None:
            assert choice.index not in reasons
            reasons[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys((0, 1), "Hello, wörld! 你好 😀")
    assert reasons == {0: "stop", 1: "stop"}
    assert roles == [0, 1]
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (34, 8)


def test_one_choice_that_fails_fails_the_answer() -> None:
    with (
        served(make_app(backend=EchoBackend(fail_after=2))) as url,
        make_client(url) as client,
        pytest.raises(openai.InternalServerError, match="allocation failed"),
    ):
        client.chat.completions.create(model="default", messages=QUESTION, n=2)


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default", messages=QUESTION, logprobs=True, top_logprobs=2, max_tokens=3
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert "".join(token.token for token in told.content) == answer.choices[0].message.content == "Hello, wörld! 你好"
    assert bytes(told.content[2].bytes or []).decode() == " 你好"
    assert [(top.token, top.logprob, top.bytes) for top in told.content[1].top_logprobs] == [
        (" wörld!", -0.5, list(" wörld!".encode())),
        ("\N{REPLACEMENT CHARACTER}", -1.5, [0xE4]),
    ]
    without = client.chat.completions.create(model="default", messages=QUESTION)
    assert without.choices[0].logprobs is None


def test_log_probabilities_of_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="default", messages=QUESTION, logprobs=True, stream=True)
    text, tokens = "", ""
    for choice in (choice for chunk in stream for choice in chunk.choices):
        text += choice.delta.content or ""
        if choice.logprobs is not None:
            assert choice.logprobs.content is not None
            tokens += "".join(token.token for token in choice.logprobs.content)
            assert all(token.top_logprobs == [] for token in choice.logprobs.content)
    assert tokens == text == "Hello, wörld! 你好 😀"


def test_documents_and_overrides_go_in_the_extra_body(client: openai.OpenAI) -> None:
    extra = {"documents": make_documents(20), "firsttoken": {"max_input_tokens": 500}}
    raw = client.chat.completions.with_raw_response.create(model="default", messages=QUESTION, extra_body=extra)
    answer = raw.parse()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens <= 500
    assert raw.headers["x-firsttoken-tokens-after"] == str(answer.usage.prompt_tokens)
    assert answer.model_extra is not None
    assert answer.model_extra["firsttoken"]["saved_tokens"] > 5000


def test_tools_and_tool_results(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        *QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    answer = client.chat.completions.create(
        model="default",
        messages=messages,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    )
    assert answer.choices[0].message.content


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["default", "smollm2-135m-instruct"]
    assert client.models.retrieve("default").owned_by == "firsttoken"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_window(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as caught:
        client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "x" * 9000}], stream=stream
        )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert caught.value.type == "invalid_request_error"


def test_a_wrong_key(url: str) -> None:
    with make_client(url, "sk-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert caught.value.code == "model_not_found"


def test_a_bad_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=QUESTION, n=17)
    assert caught.value.param == "n"


def test_a_rate_limit() -> None:
    with served(make_app(make_settings(acme={"requests_per_minute": 1}))) as url, make_client(url) as client:
        client.chat.completions.create(model="default", messages=QUESTION)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="default", messages=QUESTION)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_an_engine_that_is_down() -> None:
    backend = EchoBackend()
    with served(make_app(backend=backend)) as url, make_client(url) as client:
        backend.is_alive = False
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="default", messages=QUESTION)
    assert caught.value.status_code == 503


def test_a_stream_that_breaks_off_raises() -> None:
    texts: list[str] = []
    with served(make_app(backend=EchoBackend(fail_after=2))) as url, make_client(url) as client:
        stream = client.chat.completions.create(model="default", messages=QUESTION, stream=True)
        with pytest.raises(openai.APIError, match="allocation failed"):
            texts.extend(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


def test_a_body_over_the_limit_is_answered_not_cut_off(url: str) -> None:
    with httpx.Client(base_url=url, headers=bearer(), timeout=20) as http:
        response = http.post("/v1/chat/completions", content=b"x" * (17 * 1024 * 1024))
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert http.post("/v1/chat/completions", json=make_body()).status_code == 200


def test_a_large_body_without_a_key_is_answered_not_cut_off(url: str) -> None:
    with httpx.Client(base_url=url, timeout=20) as http:
        assert http.post("/v1/chat/completions", content=b"x" * (8 * 1024 * 1024)).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_engine_within_a_second(stream: bool) -> None:
    backend = EchoBackend(reply="word " * 1000, step_s=0.02)
    app = make_app(make_settings(acme={"tokens_per_day": 100_000}), backend)
    with served(app) as url:
        timeout = httpx.Timeout(20, read=20 if stream else 0.3)
        with httpx.Client(base_url=url, headers=bearer(), timeout=timeout) as http:
            if stream:
                with http.stream("POST", "/v1/chat/completions", json=make_body(stream=True)) as response:
                    next(response.iter_bytes())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post("/v1/chat/completions", json=make_body())
        assert wait_until(lambda: backend.aborted, timeout_s=5.0)
        assert backend.num_running == 0
        remaining = app.state.gateway.admission.remaining
        principal = app.state.gateway.authenticator.authenticate(f"Bearer {ACME_KEY}")
        left = asyncio.run(remaining(principal)).tokens
        assert 100_000 - 34 - 400 < left < 100_000 - 34  # the prompt and the words so far


def test_a_client_that_leaves_before_the_first_token_stops_the_engine() -> None:
    backend = EchoBackend(step_s=30.0)
    with served(make_app(make_settings(acme={"tokens_per_day": 1000}), backend)) as url:
        with (
            httpx.Client(base_url=url, headers=bearer(), timeout=httpx.Timeout(20, read=0.3)) as http,
            pytest.raises(httpx.ReadTimeout),
        ):
            http.post("/v1/chat/completions", json=make_body(stream=True))
        assert wait_until(lambda: backend.aborted, timeout_s=5.0)
        assert backend.num_running == 0


def test_a_large_message_does_not_hold_up_small_requests(url: str) -> None:
    large = make_body("word " * 1_000_000)
    with httpx.Client(base_url=url, headers=bearer(), timeout=30) as http:
        assert http.post("/v1/chat/completions", json=large).status_code == 400
        assert http.post("/v1/chat/completions", json=make_body()).status_code == 200
