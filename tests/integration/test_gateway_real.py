"""The whole path: official client, gateway, reducer with its encoder, engine in its own process, real model."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from factories_app import bearer, wait_until
from factories_gateway import RunningGateway, missing_models, running_gateway
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

pytestmark = pytest.mark.skipif(missing_models() is not None, reason=str(missing_models()))

MODEL = "default"
CAPITAL: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of Greece?"}]
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": f"get_{name}",
            "description": f"Looks the {name} up.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "population", "mayor", "timezone", "altitude")
]

STRICT_TOOLS: Any = [
    {
        **tool,
        "function": {
            **tool["function"],
            "parameters": {**tool["function"]["parameters"], "additionalProperties": False},
        },
    }
    for tool in TOOLS
]


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with running_gateway("[engine.cache]\nmemory_gib = 0.5\n") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client


@pytest.fixture
def http(gateway: RunningGateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, headers=bearer(), timeout=120) as http:
        yield http


def make_documents(num_noise: int = 12) -> list[dict[str, Any]]:
    """One passage with the answer among passages about other things."""
    topics = ["tide tables", "sourdough", "lighthouses", "beekeeping", "glaciers", "railways", "violins", "volcanoes"]
    noise = [
        {
            "id": f"n{i}",
            "title": topics[i % 8].title(),
            "text": f"Chapter {i} of the handbook deals with {topics[i % 8]}. "
            f"It lists {i + 3} rules that every beginner should learn, and {i + 11} that experts still break.",
        }
        for i in range(num_noise)
    ]
    answer = {
        "id": "gold",
        "title": "Quorvik",
        "text": "The Quorvik bridge was opened in 1937 by the engineer Ansa Liemann.",
    }
    return [*noise[: num_noise // 2], answer, *noise[num_noise // 2 :]]


QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer from the documents, in one short sentence."},
    {"role": "user", "content": "In which year was the Quorvik bridge opened?"},
]


def usage_of(completion: Any) -> Any:
    assert completion.usage is not None
    return completion.usage


def kv_is_free(http: httpx.Client) -> bool:
    lines = http.get("/metrics").text.splitlines()
    values = {line.split("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(values[f"firsttoken_{name}"] == 0 for name in names)


def test_the_ready_line_says_what_is_served(gateway: RunningGateway) -> None:
    for part in (gateway.url, "smollm2-135m-instruct", "window 8192 tokens", "encoder loaded", "acme, globex"):
        assert part in gateway.ready_line


def test_ready_and_health_once_the_line_is_printed(http: httpx.Client) -> None:
    assert http.get("/ready").json() == {"status": "ready", "engine": "alive", "encoder": "loaded"}
    assert http.get("/health").status_code == 200


def test_a_question_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=16)
    assert "Athens" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_is_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=16)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5
    assert usage_of(chunks[-1]).completion_tokens == usage_of(whole).completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_function_is_called_with_arguments_of_its_schema(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "tools": STRICT_TOOLS,
    }
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=64, stream=stream, **fields
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        calls = [call for choice in chunks for call in choice.delta.tool_calls or ()]
        reason, content = chunks[-1].finish_reason, "".join(choice.delta.content or "" for choice in chunks) or None
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        calls, content = message.tool_calls, message.content
    assert [call.function.name for call in calls] == ["get_weather"]
    assert list(json.loads(calls[0].function.arguments)) == ["city"]
    assert (reason, content) == ("tool_calls", None)


def test_at_least_one_call_is_demanded_of_any_function(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "How high does Bern lie?"}],
        temperature=0,
        max_tokens=64,
        tools=STRICT_TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert len(calls) == 1
    assert calls[0].function.name in {tool["function"]["name"] for tool in STRICT_TOOLS}
    assert isinstance(json.loads(calls[0].function.arguments)["city"], str)
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_the_models_own_call_follows_those_before(client: openai.OpenAI, stream: bool) -> None:
    messages: list[Any] = []
    for place, (city, mayor) in enumerate((("Bern", "Alec von Graffenried"), ("Basel", "Conradin Cramer"))):
        function = {"name": "get_mayor", "arguments": json.dumps({"city": city})}
        call = {"id": f"c{place}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": f"Who is the mayor of {city}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{place}", "content": mayor},
            {"role": "assistant", "content": f"{mayor}."},
        ]
    messages.append({"role": "user", "content": "Who is the mayor of Thun?"})
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=messages, tools=STRICT_TOOLS[2:3], temperature=0, max_tokens=48, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    parts = [choice.delta if stream else choice.message for choice in choices]
    calls = [call.function for part in parts for call in part.tool_calls or ()]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_mayor", {"city": "Thun"})]
    assert choices[-1].finish_reason == "tool_calls"
    assert not any(part.content for part in parts)


def test_documents_are_reduced_within_the_budget_and_the_answer_is_found(client: openai.OpenAI) -> None:
    extra = {"documents": make_documents(30), "firsttoken": {"max_input_tokens": 300}}
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=24, extra_body=extra
    )
    assert answer.model_extra is not None
    extension = answer.model_extra["firsttoken"]
    assert usage_of(answer).prompt_tokens == extension["prompt_tokens"] <= 300
    assert extension["original_prompt_tokens"] > 1000
    assert all(stage["degraded"] is None for stage in extension["stages"])
    assert "1937" in (answer.choices[0].message.content or "")


def test_a_prefix_is_cached_for_the_own_tenant_only(gateway: RunningGateway, client: openai.OpenAI) -> None:
    marker = f"Ticket {time.time_ns()}. "
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": marker + "Answer politely and briefly. " * 20},
        *CAPITAL,
    ]

    def cached(of: openai.OpenAI, **extra: Any) -> int:
        answer = of.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=2, extra_body=extra
        )
        details = usage_of(answer).prompt_tokens_details
        assert details.cached_tokens <= usage_of(answer).prompt_tokens - 1
        return int(details.cached_tokens)

    first, second = cached(client), cached(client)
    with gateway.client("sk-globex-demo") as other:
        foreign = cached(other, cache_salt="acme")
    assert first == 0
    assert second > 64
    assert foreign == 0


@pytest.mark.parametrize("documents", [[], make_documents(8)])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_the_gateway_counts_exactly_what_the_engine_computes(
    client: openai.OpenAI, http: httpx.Client, documents: list[dict[str, Any]], tools: list[Any]
) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Sei knapp. <|im_end|> 你好, 👋🏽"},
        {"role": "user", "content": [{"type": "text", "text": "Hallo"}, {"type": "text", "text": "Welt"}]},
        {"role": "assistant", "content": "Guten Tag"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    extra = {"documents": documents, "tools": tools}
    shown = http.post("/v1/compact", json={"model": MODEL, "messages": messages, **extra}).json()
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=1, extra_body=extra
    )
    tokenized = http.post("/tokenize", json={"messages": shown["messages"], "tools": tools}).json()
    assert shown["prompt_tokens"] == usage_of(answer).prompt_tokens == tokenized["count"]


def test_the_window_is_full_to_the_last_token(client: openai.OpenAI, http: httpx.Client) -> None:
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    template = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()["count"] - 1
    over = " a" * (limit - template)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": over}], max_tokens=1, stream=True
        )
    assert caught.value.code == "context_length_exceeded"
    assert f"maximum context length is {limit} tokens" in str(caught.value)


BAD_REQUESTS: dict[str, tuple[bytes | dict[str, Any], int]] = {
    "not json": (b"{", 400),
    "no object": (b"[1]", 400),
    "not utf-8": (b'{"model":"\xff"}', 400),
    "empty": (b"", 400),
    "unknown role": ({"model": MODEL, "messages": [{"role": "robot", "content": "x"}]}, 400),
    "no messages": ({"model": MODEL, "messages": []}, 400),
    "no user": ({"model": MODEL, "messages": [{"role": "system", "content": "x"}]}, 400),
    "document without text": ({"model": MODEL, "messages": CAPITAL, "documents": [{"id": "a"}]}, 400),
    "documents no list": ({"model": MODEL, "messages": CAPITAL, "documents": {"id": "a"}}, 400),
    "two documents with one id": (
        {"model": MODEL, "messages": CAPITAL, "documents": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]},
        400,
    ),
    "unknown model": ({"model": "gpt-9", "messages": CAPITAL}, 404),
    "too many choices": ({"model": MODEL, "messages": CAPITAL, "n": 17}, 400),
    "no tokens": ({"model": MODEL, "messages": CAPITAL, "max_tokens": 0}, 400),
    "too hot": ({"model": MODEL, "messages": CAPITAL, "temperature": 3}, 400),
    "image": (
        {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
    ),
    "5 MB": ({"model": MODEL, "messages": [{"role": "user", "content": "wörd " * 1_000_000}]}, 400),
    "17 MB": (b"x" * 17_000_000, 413),
    "over the window": ({"model": MODEL, "messages": [{"role": "user", "content": "x y " * 9000}]}, 400),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_input_is_refused_and_the_next_request_is_answered(http: httpx.Client, name: str) -> None:
    body, status = BAD_REQUESTS[name]
    for stream in (False, True):
        if isinstance(body, bytes):
            response = http.post("/v1/chat/completions", content=body)
        else:
            response = http.post("/v1/chat/completions", json=body | {"stream": stream})
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    after = http.post("/v1/chat/completions", json={"model": MODEL, "messages": CAPITAL, "max_tokens": 1})
    assert after.status_code == 200


def test_a_wrong_key_is_refused(gateway: RunningGateway) -> None:
    with gateway.client("sk-wrong") as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model=MODEL, messages=CAPITAL)


def test_a_large_prompt_is_counted_while_small_requests_are_answered(http: httpx.Client) -> None:
    history = [{"role": "user", "content": "Note: " + "word " * 400_000}, {"role": "assistant", "content": "Noted."}]
    done: list[httpx.Response] = []
    large_body = {"model": MODEL, "messages": [*history, *CAPITAL], "firsttoken": {"bypass": True}}
    large = threading.Thread(target=lambda: done.append(http.post("/v1/compact", json=large_body)))
    large_started = time.perf_counter()
    large.start()
    times_s: list[float] = []
    while large.is_alive():
        started = time.perf_counter()
        assert http.post("/v1/compact", json={"model": MODEL, "messages": CAPITAL}).status_code == 200
        times_s.append(time.perf_counter() - started)
    large.join()
    assert done[0].json()["error"]["code"] == "context_length_exceeded"
    assert len(times_s) > 5
    # A gateway that waits for the large prompt answers the small one as late as the large one.
    assert max(times_s) < (time.perf_counter() - large_started) / 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_sequence(gateway: RunningGateway, http: httpx.Client, stream: bool) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a very long story about a lighthouse."}],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 4000,
        "stream": stream,
    }
    assert wait_until(lambda: kv_is_free(http), timeout_s=10)
    timeout = httpx.Timeout(60, read=1.0 if not stream else 60)
    with httpx.Client(base_url=gateway.url, headers=bearer(), timeout=timeout) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/chat/completions", json=body)
    assert wait_until(lambda: kv_is_free(http), timeout_s=3.0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_the_prefill_frees_its_sequence(
    gateway: RunningGateway, http: httpx.Client, stream: bool
) -> None:
    words = " ".join(f"lamp{place}" for place in range(1300)) + f" {time.monotonic_ns()}"
    body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": 64, "stream": stream}
    assert wait_until(lambda: kv_is_free(http), timeout_s=10)
    with httpx.Client(base_url=gateway.url, headers=bearer(), timeout=httpx.Timeout(60, read=0.02)) as leaving:
        bypass = {**body, "firsttoken": {"bypass": True}}
        with pytest.raises(httpx.ReadTimeout):
            leaving.post("/v1/chat/completions", json=bypass)
    # Either it has not reached the engine yet and never will, or it leaves it with the step that runs.
    time.sleep(1.0)
    assert wait_until(lambda: kv_is_free(http), timeout_s=5.0)


def test_a_client_that_leaves_the_queue_is_never_computed(gateway: RunningGateway, http: httpx.Client) -> None:
    def prompt_tokens() -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith("firsttoken_prompt_tokens_total")
        )

    def send(read_s: float) -> int:
        words = f"{time.monotonic_ns()} " + " ".join(f"lamp{place}" for place in range(1300))
        body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": 1}
        url, timeout = f"{gateway.url}/v1/chat/completions", httpx.Timeout(60, read=read_s)
        try:
            answer = httpx.post(url, json={**body, "firsttoken": {"bypass": True}}, headers=bearer(), timeout=timeout)
        except httpx.ReadTimeout:
            return 0
        return int(answer.json()["usage"]["prompt_tokens"])

    assert wait_until(lambda: kv_is_free(http), timeout_s=10)
    before = prompt_tokens()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(send, 60.0)
        time.sleep(0.5)
        leaving = [pool.submit(send, 0.2) for _ in range(3)]
    assert [job.result() for job in leaving] == [0, 0, 0]
    assert wait_until(lambda: kv_is_free(http), timeout_s=5.0)
    assert prompt_tokens() - before < 2 * first.result()


def test_requests_at_the_same_time_get_their_own_answers(client: openai.OpenAI) -> None:
    countries = {"Russia": "Moscow", "Germany": "Berlin", "Greece": "Athens", "Japan": "Tokyo"}

    def ask(country: str) -> str:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
            temperature=0,
            max_tokens=12,
        )
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(countries, pool.map(ask, countries), strict=True))
    for country, capital in countries.items():
        assert capital in answers[country]
