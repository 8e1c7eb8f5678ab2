"""Messages, responses, completions and embeddings: official clients, whole and streamed, on both backends."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from factories_app import ACME_KEY, bearer, make_app, make_documents, served, wait_until
from factories_upstream import Upstream, gateway_on, running_upstream

TOOL: Any = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {"city": {}}}}
CALLS = {"tool_calls": [["weather", '{"city": "Z', 'ürich"}'], ["weather", "{}"]]}


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with running_upstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def urls(upstream: Upstream) -> Iterator[dict[str, str]]:
    with gateway_on(upstream) as relayed, served(make_app()) as embedded:
        yield {"upstream": relayed, "embedded": embedded}


@pytest.fixture(params=["upstream", "embedded"])
def url(request: pytest.FixtureRequest, urls: dict[str, str]) -> str:
    return urls[request.param]


@pytest.fixture
def relayed(urls: dict[str, str]) -> str:
    return urls["upstream"]


def claude(url: str, key: str = ACME_KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=20)


def gpt(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=ACME_KEY, max_retries=0, timeout=20)


def ask(url: str, **fields: Any) -> anthropic.types.Message:
    arguments: dict[str, Any] = {"model": "default", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]}
    with claude(url) as client:
        return client.messages.create(**arguments | fields)


def test_message(url: str) -> None:
    message = ask(url, system="Be brief.", stop_sequences=["END"])
    assert [block.text for block in message.content if block.type == "text"] == ["Hello, wörld! 你好 😀"]
    assert (message.stop_reason, message.role, message.type, message.model) == (
        "end_turn",
        "assistant",
        "message",
        "default",
    )
    assert message.usage.output_tokens == 4
    assert message.usage.input_tokens > 0
    assert (message.model_extra or {})["firsttoken"]["saved_tokens"] == 0


def test_streamed_message(url: str) -> None:
    with (
        claude(url) as client,
        client.messages.stream(model="default", max_tokens=64, messages=[{"role": "user", "content": "Hi"}]) as stream,
    ):
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "Hello, wörld! 你好 😀"
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 4


def test_message_that_reaches_its_limit(url: str) -> None:
    assert ask(url, max_tokens=2).stop_reason == "max_tokens"


def test_tool_use_and_its_result(relayed: str, upstream: Upstream) -> None:
    message = ask(relayed, tools=[TOOL], tool_choice={"type": "any"}, extra_body={"x_behaviour": CALLS})
    uses = [block for block in message.content if block.type == "tool_use"]
    assert [(use.name, use.input) for use in uses] == [("weather", {"city": "Zürich"}), ("weather", {})]
    assert message.stop_reason == "tool_use"
    sent = upstream.last_request()
    assert sent["tool_choice"] == "required"
    assert sent["tools"][0]["function"]["parameters"] == TOOL["input_schema"]

    results = [{"type": "tool_result", "tool_use_id": use.id, "content": f"r{n}"} for n, use in enumerate(uses)]
    answer = [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
    ]
    ask(relayed, tools=[TOOL], messages=[{"role": "user", "content": "Hi"}, *answer])
    roles = [message["role"] for message in upstream.last_request()["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "user"]
    calls = upstream.last_request()["messages"][1]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Zürich"}, {}]
    assert upstream.last_request()["messages"][2] == {"role": "tool", "tool_call_id": calls[0]["id"], "content": "r0"}


def test_streamed_tool_use_has_the_same_input(relayed: str) -> None:
    with (
        claude(relayed) as client,
        client.messages.stream(
            model="default",
            max_tokens=64,
            tools=[TOOL],
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"x_behaviour": {**CALLS, "reasoning": "Hmm."}},
        ) as stream,
    ):
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert parts == ['{"city": "Z', 'ürich"}', "{}"]
    assert [block.type for block in message.content] == ["thinking", "tool_use", "tool_use"]
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"city": "Zürich"}, {}]


def test_text_documents_of_a_message_are_reduced(relayed: str, upstream: Upstream) -> None:
    blocks = [
        {
            "type": "document",
            "title": document["id"],
            "source": {"type": "text", "media_type": "text/plain", "data": document["text"]},
        }
        for document in make_documents(20)
    ]
    content = [*blocks, {"type": "text", "text": "What is a widget?"}]
    message = ask(
        relayed, messages=[{"role": "user", "content": content}], extra_body={"firsttoken": {"max_input_tokens": 800}}
    )
    assert (message.model_extra or {})["firsttoken"]["saved_tokens"] > 500
    assert "A widget is a small gadget made in Ghent." in upstream.last_request()["messages"][0]["content"]


def test_images_of_a_message_become_image_parts(relayed: str, upstream: Upstream) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    ask(relayed, messages=[{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}])
    parts = upstream.last_request()["messages"][0]["content"]
    assert parts[0] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def test_errors_have_anthropics_shape(url: str) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        claude(url, "sk-wrong").messages.create(
            model="default", max_tokens=5, messages=[{"role": "user", "content": "x"}]
        )
    with pytest.raises(anthropic.NotFoundError):
        ask(url, model="nobody")
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.type"):
        ask(url, messages=[{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude(url).post("/v1/messages", body={"model": "default", "messages": []}, cast_to=object)


def test_a_broken_stream_of_events_is_an_error_event(relayed: str) -> None:
    with (
        claude(relayed) as client,
        pytest.raises(anthropic.APIStatusError, match="CUDA error"),
        client.messages.stream(
            model="default",
            max_tokens=64,
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"x_behaviour": {"error_after": 3}},
        ) as stream,
    ):
        list(stream)


def test_counted_tokens(url: str) -> None:
    with claude(url) as client:
        short = client.messages.count_tokens(model="default", messages=[{"role": "user", "content": "Hi"}])
        long = client.messages.count_tokens(model="default", messages=[{"role": "user", "content": "Hi " * 50}])
    assert 0 < short.input_tokens < long.input_tokens


def test_a_client_that_leaves_a_stream_of_events_cancels_the_upstream(relayed: str, upstream: Upstream) -> None:
    body = {"model": "default", "max_tokens": 64, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    with httpx.stream(
        "POST",
        f"{relayed}/v1/messages",
        json={**body, "x_behaviour": {"hang_after": 2}},
        headers={"x-api-key": ACME_KEY},
    ) as response:
        next(response.iter_raw())
    assert wait_until(lambda: upstream.log()[-1]["cancelled"], 1.5)


def test_response(url: str) -> None:
    with gpt(url) as client:
        response = client.responses.create(model="default", instructions="Be brief.", input="Hi", max_output_tokens=50)
    assert response.output_text == "Hello, wörld! 你好 😀"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens == 4
    assert response.usage.input_tokens_details.cached_tokens >= 0


def test_streamed_response(url: str) -> None:
    with gpt(url) as client, client.responses.stream(model="default", input="Hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == "Hello, wörld! 你好 😀"
    )
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    assert events[0].type == "response.created"
    assert final.output_text == "Hello, wörld! 你好 😀"
    assert final.status == "completed"


def test_response_that_reaches_its_limit_is_incomplete(url: str) -> None:
    with gpt(url) as client:
        response = client.responses.create(model="default", input="Hi", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_function_calls_of_a_response_and_their_outputs(relayed: str, upstream: Upstream) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
    with gpt(relayed) as client:
        whole = client.responses.create(model="default", input="Hi", tools=[tool], extra_body={"x_behaviour": CALLS})
        with client.responses.stream(
            model="default", input="Hi", tools=[tool], extra_body={"x_behaviour": CALLS}
        ) as stream:
            streamed = stream.get_final_response()
        for response in (whole, streamed):
            calls = [item for item in response.output if item.type == "function_call"]
            assert [call.arguments for call in calls] == ['{"city": "Zürich"}', "{}"]
        items: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            *[call.model_dump() for call in whole.output],
            {"type": "function_call_output", "call_id": "call_0", "output": "rain"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        ]
        client.responses.create(
            model="default", input=items, reasoning={"effort": "low"}, text={"format": {"type": "json_object"}}
        )
    sent = upstream.last_request()
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool", "tool"]
    assert len(sent["messages"][1]["tool_calls"]) == 2
    assert sent["reasoning_effort"] == "low"
    assert sent["response_format"] == {"type": "json_object"}


def test_what_would_need_a_memory_is_refused(url: str) -> None:
    with gpt(url) as client, pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="default", input="Hi", previous_response_id="resp_1")


def test_completion(url: str) -> None:
    with gpt(url) as client:
        whole = client.completions.create(model="default", prompt="Hi", max_tokens=50)
        chunks = list(client.completions.create(model="default", prompt="Hi", max_tokens=50, stream=True))
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.completions.create(model="default", prompt=["a", "b"])
    assert whole.choices[0].text == "Hello, wörld! 你好 😀"
    assert whole.object == "text_completion"
    assert whole.usage is not None
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hello, wörld! 你好 😀"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_detokenizing_gives_the_text_back(url: str) -> None:
    text = "Grüße, 你好 😀 <|endoftext|>"
    with httpx.Client(base_url=url, headers=bearer()) as http:
        token_ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": token_ids}).json() == {"prompt": text}
        assert http.post("/detokenize", json={"tokens": [2_000_000_000]}).status_code == 400


def test_embeddings_without_an_encoder_are_refused(url: str) -> None:
    with gpt(url) as client, pytest.raises(openai.BadRequestError, match="encoder"):
        client.embeddings.create(model="default", input="x")
