"""Chat completions over HTTP with an echo engine: shapes, headers, streams, errors, budgets."""

import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from factories_app import (
    ACME_KEY,
    GLOBEX_KEY,
    EchoBackend,
    bearer,
    make_app,
    make_body,
    make_documents,
    make_settings,
    user,
)
from litestar.testing import AsyncTestClient

from app.settings import LimitSettings, PolicySettings, ServerSettings, Settings
from engine.errors import QueueFullError

URL = "/v1/chat/completions"


def client(settings: Settings | None = None, backend: EchoBackend | None = None) -> AsyncTestClient[Any]:
    return AsyncTestClient(make_app(settings, backend))


@pytest.fixture
async def http() -> AsyncIterator[AsyncTestClient[Any]]:
    async with client() as http:
        yield http


def events(text: str) -> list[Any]:
    """Data of the events of a stream, ``[DONE]`` included."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [entry if entry == "[DONE]" else msgspec.json.decode(entry) for entry in data]


async def test_an_answer_has_openai_shape_extension_and_headers(http: AsyncTestClient[Any]) -> None:
    response = await http.post(URL, json=make_body(documents=make_documents(20)), headers=bearer())
    body = response.json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert (body["object"], body["model"]) == ("chat.completion", "default")
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, wörld! 你好 😀", "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage, extension = body["usage"], body["firsttoken"]
    assert usage["prompt_tokens"] == extension["prompt_tokens"] < extension["original_prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert extension["saved_tokens"] == extension["original_prompt_tokens"] - extension["prompt_tokens"]
    assert set(extension["timings_ms"]) == {"reduce", "queue", "prefill", "first_token", "total"}
    assert extension["stages"][0]["stage"] == "access"
    assert response.headers["x-firsttoken-receipt"] == extension["receipt_id"]
    assert response.headers["x-firsttoken-tokens-before"] == str(extension["original_prompt_tokens"])
    assert response.headers["x-firsttoken-tokens-after"] == str(extension["prompt_tokens"])
    assert response.headers["x-firsttoken-tokens-saved"] == str(extension["saved_tokens"])


async def test_a_stream_starts_with_the_role_and_ends_with_done(http: AsyncTestClient[Any]) -> None:
    response = await http.post(URL, json=make_body(stream=True), headers=bearer())
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-firsttoken-receipt"].startswith("rcpt_")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "Hello, wörld! 你好 😀"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_client_that_did_not_ask_sees_no_usage_in_a_stream(http: AsyncTestClient[Any]) -> None:
    for options in (None, {"include_usage": False}, {}):
        response = await http.post(URL, json=make_body(stream=True, stream_options=options), headers=bearer())
        assert "usage" not in response.text
        assert "firsttoken" not in response.text


async def test_a_client_that_asked_gets_null_usage_and_then_the_totals(http: AsyncTestClient[Any]) -> None:
    body = make_body(stream=True, stream_options={"include_usage": True})
    *chunks, totals, _ = events((await http.post(URL, json=body, headers=bearer())).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert totals["choices"] == []
    assert totals["usage"]["completion_tokens"] == 4
    assert totals["firsttoken"]["prompt_tokens"] == totals["usage"]["prompt_tokens"]


async def test_the_gateway_counts_what_the_engine_counts_with_tools_and_template_variables() -> None:
    backend = EchoBackend()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = make_body(tools=[tool], chat_template_kwargs={"enable_thinking": False}, documents=make_documents(12))
    async with client(backend=backend) as http:
        answer = (await http.post(URL, json=body, headers=bearer())).json()
        metrics = (await http.get("/metrics")).text
    assert answer["usage"]["prompt_tokens"] == answer["firsttoken"]["prompt_tokens"]
    assert backend.requests[0].tools == [tool]
    assert 'firsttoken_prompt_count_mismatch_total{model_name="default"} 0.0' in metrics


async def test_the_reasoning_effort_reaches_the_template_and_unknown_fields_are_named() -> None:
    backend = EchoBackend()
    body = make_body(reasoning_effort="low", x_custom=1, truncate_prompt_tokens=5)
    async with client(backend=backend) as http:
        answer = (await http.post(URL, json=body, headers=bearer())).json()
    assert backend.requests[0].template_kwargs == {"reasoning_effort": "low"}
    assert answer["usage"]["prompt_tokens"] == answer["firsttoken"]["prompt_tokens"]
    assert answer["firsttoken"]["ignored_fields"] == ["x_custom", "truncate_prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "lane"),
    [
        ({"documents": make_documents(40)}, "firsttoken-worker"),
        ({"documents": make_documents(140, num_words=2)}, "firsttoken-large"),
        ({"documents": make_documents(3, num_words=4000)}, "firsttoken-large"),
        ({"messages": [user("hi")] * 40}, "firsttoken-worker"),
        ({"messages": [user("hi")] * 80}, "firsttoken-large"),
    ],
)
async def test_heavy_prompts_are_reduced_in_a_lane_of_their_own(fields: dict[str, Any], lane: str) -> None:
    backend, lanes = EchoBackend(), set()
    encode = backend.encoder.encode_chat

    def encode_and_note(*args: Any, **kwargs: Any) -> list[int]:
        lanes.add(threading.current_thread().name.rpartition("_")[0])
        return encode(*args, **kwargs)

    async with client(backend=backend) as http:
        backend.encoder.encode_chat = encode_and_note  # type: ignore[method-assign]
        response = await http.post("/v1/compact", json=make_body() | fields, headers=bearer())
    assert response.status_code == 200
    assert lanes == {lane}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("key", "fields", "status", "code"),
    [
        (None, {}, 401, "invalid_api_key"),
        ("sk-wrong", {}, 401, "invalid_api_key"),
        (ACME_KEY, {"model": "gpt-9"}, 404, "model_not_found"),
        (ACME_KEY, {"messages": []}, 400, "invalid_value"),
        (ACME_KEY, {"messages": [user("x" * 5000)]}, 400, "context_length_exceeded"),
        (ACME_KEY, {"documents": [{"id": "a"}]}, 400, "invalid_value"),
        (ACME_KEY, {"firsttoken": {"policy": "no"}}, 400, "invalid_value"),
        (ACME_KEY, {"chat_template_kwargs": {"refuse": True}}, 400, "invalid_value"),
        (ACME_KEY, {"chat_template_kwargs": {"messages": []}}, 400, "invalid_value"),
        (ACME_KEY, {"reasoning_effort": 3}, 400, "invalid_type"),
        (ACME_KEY, {"model": None}, 400, "invalid_value"),
        (ACME_KEY, {"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_value"),
        (ACME_KEY, {"firsttoken": {"policy": ""}}, 400, "invalid_value"),
        (ACME_KEY, {"firsttoken": {"max_input_tokens": 5}}, 400, "context_length_exceeded"),
    ],
)
async def test_errors_are_plain_json_with_or_without_stream(
    http: AsyncTestClient[Any], stream: bool, key: str | None, fields: dict[str, Any], status: int, code: str | None
) -> None:
    headers = bearer(key) if key else {}
    response = await http.post(URL, json={**make_body(stream=stream), **fields}, headers=headers)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert (await http.post(URL, json=make_body(), headers=bearer())).status_code == 200


async def test_a_missing_model_is_named(http: AsyncTestClient[Any]) -> None:
    response = await http.post(URL, json={"messages": [user("hi")]}, headers=bearer())
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


async def test_the_models_own_name_is_an_alias(http: AsyncTestClient[Any]) -> None:
    response = await http.post(URL, json=make_body(model="smollm2-135m-instruct"), headers=bearer())
    assert response.json()["model"] == "smollm2-135m-instruct"


async def test_the_advertised_window_is_the_admitted_one(http: AsyncTestClient[Any]) -> None:
    limit = (await http.get("/v1/models", headers=bearer())).json()["data"][0]["max_model_len"]
    largest = limit - 1 - len("<user><assistant>")  # one token is the answer's
    fits = await http.post(URL, json=make_body("x" * largest, max_tokens=1), headers=bearer())
    over = await http.post(URL, json=make_body("x" * (largest + 1), max_tokens=1), headers=bearer())
    assert (fits.status_code, fits.json()["usage"]["total_tokens"]) == (200, limit)
    assert (over.status_code, over.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {limit} tokens" in over.json()["error"]["message"]


async def test_max_tokens_is_clamped_to_the_room_and_the_answer_says_so() -> None:
    backend = EchoBackend()
    async with client(backend=backend) as http:
        response = await http.post(URL, json=make_body(max_tokens=16384), headers=bearer())
    body = response.json()
    assert response.status_code == 200
    assert body["firsttoken"]["max_tokens"] == 4096 - body["usage"]["prompt_tokens"]
    assert backend.requests[0].sampling.max_tokens == body["firsttoken"]["max_tokens"]


async def test_without_max_tokens_the_configured_default_holds() -> None:
    backend = EchoBackend()
    async with client(make_settings(limits=LimitSettings(default_max_tokens=3)), backend) as http:
        body = (await http.post(URL, json=make_body(), headers=bearer())).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


async def test_a_long_question_that_only_the_output_reserve_forbids_is_answered(http: AsyncTestClient[Any]) -> None:
    response = await http.post(URL, json=make_body("x" * 4000, max_tokens=4000), headers=bearer())
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("acme", "fields", "expected"),
    [
        ({}, {}, (3840, "window")),
        ({}, {"max_tokens": 100}, (3996, "window")),
        ({}, {"max_tokens": 4000}, (3072, "window")),
        ({"max_input_tokens": 900}, {}, (900, "tenant")),
        ({"max_input_tokens": 900}, {"firsttoken": {"max_input_tokens": 800}}, (800, "request")),
        ({"max_input_tokens": 900}, {"firsttoken": {"policy": "tight"}}, (700, "policy")),
        ({"policy": "tight"}, {}, (700, "policy")),
    ],
)
async def test_the_smallest_budget_holds_and_says_where_it_comes_from(
    acme: dict[str, Any], fields: dict[str, Any], expected: tuple[int, str]
) -> None:
    settings = make_settings(acme=acme, policies={"tight": PolicySettings(max_input_tokens=700)})
    async with client(settings) as http:
        body = make_body(documents=make_documents(40), **fields)
        answer = (await http.post("/v1/compact", json=body, headers=bearer())).json()
    assert (answer["budget"]["max_input_tokens"], answer["budget"]["source"]) == expected
    assert answer["prompt_tokens"] <= expected[0]


async def test_an_objective_shrinks_the_budget_once_prefills_were_seen() -> None:
    backend = EchoBackend()
    async with client(backend=backend) as http:
        body = make_body(documents=make_documents(40), firsttoken={"ttft_slo_ms": 1})
        first = (await http.post("/v1/compact", json=body, headers=bearer())).json()
        for _ in range(3):
            await http.post(URL, json=make_body("x" * 1000), headers=bearer())
        second = (await http.post("/v1/compact", json=body, headers=bearer())).json()
        unreachable = make_body("x" * 2000, firsttoken={"ttft_slo_ms": 1})
        answered = await http.post(URL, json=unreachable, headers=bearer())
    assert first["budget"]["source"] == "window"
    assert second["budget"]["source"] == "slo"
    assert second["prompt_tokens"] <= second["budget"]["max_input_tokens"] < first["budget"]["max_input_tokens"]
    assert answered.status_code == 200


async def test_a_prompt_over_a_tenants_limit_names_that_limit() -> None:
    async with client(make_settings(acme={"max_input_tokens": 50})) as http:
        error = (await http.post(URL, json=make_body("x" * 100), headers=bearer())).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4096 tokens. However,")
    assert "the limit set by the tenant is 50." in error["message"]


async def test_bypass_sends_the_prompt_unreduced(http: AsyncTestClient[Any]) -> None:
    documents = make_documents(10)
    by_body = make_body(documents=documents, firsttoken={"bypass": True})
    by_header = make_body(documents=documents)
    for body, headers in ((by_body, {}), (by_header, {"x-firsttoken-bypass": "true"})):
        extension = (await http.post(URL, json=body, headers=bearer() | headers)).json()["firsttoken"]
        assert extension["saved_tokens"] == 0
        assert extension["prompt_tokens"] == extension["original_prompt_tokens"] > 3000


async def test_the_cache_salt_comes_from_the_tenant_never_from_the_body() -> None:
    backend = EchoBackend()
    async with client(backend=backend) as http:
        for key in (ACME_KEY, ACME_KEY, GLOBEX_KEY):
            await http.post(URL, json=make_body(cache_salt="victim"), headers=bearer(key))
        by_globex = await http.post(
            URL, json=make_body(cache_salt=backend.requests[0].cache_salt), headers=bearer(GLOBEX_KEY)
        )
    acme, again, globex, forged = (request.cache_salt for request in backend.requests)
    assert acme == again != globex == forged
    assert "victim" not in (acme, globex)
    assert by_globex.status_code == 200


async def test_cached_tokens_are_reported_to_the_own_tenant_only(http: AsyncTestClient[Any]) -> None:
    cached = []
    for key in (ACME_KEY, ACME_KEY, GLOBEX_KEY):
        usage = (await http.post(URL, json=make_body("y" * 200), headers=bearer(key))).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 208, 0]


async def test_requests_per_minute_are_refused_with_retry_after() -> None:
    async with client(make_settings(acme={"requests_per_minute": 2})) as http:
        statuses = [(await http.post(URL, json=make_body(), headers=bearer())) for _ in range(3)]
        other = await http.post(URL, json=make_body(), headers=bearer(GLOBEX_KEY))
    assert [response.status_code for response in statuses] == [200, 200, 429]
    assert statuses[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert statuses[0].headers["x-ratelimit-reset-requests"].endswith("s")
    assert 1 <= int(statuses[2].headers["retry-after"]) <= 60
    assert statuses[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert other.status_code == 200


async def test_tokens_per_day_are_charged_with_the_compacted_prompt_and_the_output() -> None:
    async with client(make_settings(acme={"tokens_per_day": 10_000})) as http:
        body = make_body(documents=make_documents(20), firsttoken={"max_input_tokens": 500})
        answer = await http.post(URL, json=body, headers=bearer())
        after = await http.post(URL, json=make_body(stream=True, max_tokens=4), headers=bearer())
    used = answer.json()["usage"]["total_tokens"]
    assert answer.headers["x-ratelimit-limit-tokens"] == "10000"
    assert answer.json()["firsttoken"]["original_prompt_tokens"] > 5000
    assert int(after.headers["x-ratelimit-remaining-tokens"]) == 10_000 - used - 34 - 4


async def test_the_remaining_tokens_of_an_answer_are_without_its_own() -> None:
    async with client(make_settings(acme={"tokens_per_day": 10_000})) as http:
        first, second = [await http.post(URL, json=make_body(), headers=bearer()) for _ in range(2)]
    used = [response.json()["usage"]["total_tokens"] for response in (first, second)]
    assert first.json()["usage"]["completion_tokens"] == 4
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 10_000 - used[0]
    assert int(second.headers["x-ratelimit-remaining-tokens"]) == 10_000 - sum(used)


async def test_a_prompt_over_the_days_rest_is_refused_and_charges_nothing() -> None:
    async with client(make_settings(acme={"tokens_per_day": 100})) as http:
        refused = await http.post(URL, json=make_body("x" * 200), headers=bearer())
        small = await http.post(URL, json=make_body("x"), headers=bearer())
    assert (refused.status_code, small.status_code) == (429, 200)
    assert refused.json()["error"]["type"] == "tokens"


async def test_a_dead_engine_is_503_with_retry_after_and_charges_nothing() -> None:
    backend = EchoBackend()
    async with client(make_settings(acme={"tokens_per_day": 1000}), backend) as http:
        backend.is_alive = False
        for stream in (False, True):
            response = await http.post(URL, json=make_body(stream=stream), headers=bearer())
            assert (response.status_code, response.headers["retry-after"]) == (503, "3")
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/livez")).status_code == 200
        backend.is_alive = True
        revived = await http.post(URL, json=make_body(), headers=bearer())
    assert revived.headers["x-ratelimit-remaining-tokens"] != "1000"
    assert revived.status_code == 200


async def test_a_full_queue_is_503_with_retry_after() -> None:
    async with client(backend=EchoBackend(start_error=QueueFullError(512, 7.0))) as http:
        response = await http.post(URL, json=make_body(stream=True), headers=bearer())
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")


async def test_a_failure_before_the_first_token_is_500_json() -> None:
    async with client(backend=EchoBackend(fail_after=0)) as http:
        response = await http.post(URL, json=make_body(stream=True), headers=bearer())
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "allocation failed" in response.json()["error"]["message"]


async def test_a_failure_in_a_stream_is_an_error_frame_without_finish_reason_or_done() -> None:
    backend = EchoBackend(fail_after=2)
    async with client(make_settings(acme={"tokens_per_day": 1000}), backend) as http:
        frames = events((await http.post(URL, json=make_body(stream=True), headers=bearer())).text)
        whole = await http.post(URL, json=make_body(), headers=bearer())
    assert frames[-1]["error"]["type"] == "server_error"
    assert all(frame["choices"][0]["finish_reason"] is None for frame in frames[:-1])
    assert [frame["choices"][0]["delta"].get("content") for frame in frames[:-1]] == ["", "Hello,", " wörld!"]
    assert whole.status_code == 500


async def test_a_body_over_the_limit_is_413() -> None:
    async with client(make_settings(server=ServerSettings(max_body_bytes=1000))) as http:
        response = await http.post(URL, json=make_body("x" * 1000), headers=bearer())
        after = await http.post(URL, json=make_body(), headers=bearer())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert after.status_code == 200


async def test_a_policy_may_be_unknown_but_the_known_ones_are_named() -> None:
    async with client(make_settings(policies={"tight": PolicySettings()})) as http:
        response = await http.post(URL, json=make_body(firsttoken={"policy": "loose"}), headers=bearer())
    assert "known policies: default, tight" in response.json()["error"]["message"]
