"""The client against a server that really listens."""

import pytest
from factories_eval import FakeGateway, running

from eval.errors import ContextLengthError, GatewayError
from eval.gateway import GatewayClient, PromptRequest

_QUESTION = PromptRequest(messages=[{"role": "user", "content": "Which bird is it?"}])
_RAG = PromptRequest(
    messages=_QUESTION.messages, documents=[{"id": "a", "text": "a blue heron"}], max_input_tokens=50, max_tokens=9
)


def test_compaction_is_decoded() -> None:
    with running(FakeGateway()) as url, GatewayClient(url=url, api_key="k") as client:
        compaction = client.compact(_RAG)
    assert (compaction.prompt_tokens, compaction.original_prompt_tokens) == (7, 7)
    assert compaction.documents[0].spans == [(0, 12)]
    assert compaction.stages[0].ms == 1.5


def test_request_carries_key_documents_and_only_given_options() -> None:
    gateway = FakeGateway()
    with running(gateway) as url, GatewayClient(url=url, api_key="sk-mine") as client:
        client.compact(_RAG)
        client.compact(_QUESTION)
    path, body, key = gateway.requests[0]
    assert (path, key) == ("/v1/compact", "sk-mine")
    assert body["firsttoken"] == {"max_input_tokens": 50}
    assert "documents" not in gateway.requests[1][1]
    assert "firsttoken" not in gateway.requests[1][1]


def test_chat_is_greedy_and_counts_tokens() -> None:
    gateway = FakeGateway()
    with running(gateway) as url, GatewayClient(url=url, api_key="k") as client:
        generation = client.chat(_RAG)
    assert (generation.text, generation.prompt_tokens, generation.ttft_ms) == ("a blue heron", 7, None)
    assert gateway.requests[0][1]["temperature"] == 0
    assert gateway.requests[0][1]["max_tokens"] == 9


def test_stream_joins_the_pieces_and_times_the_first_token() -> None:
    with running(FakeGateway()) as url, GatewayClient(url=url, api_key="k") as client:
        generation = client.stream(_RAG)
    assert (generation.text, generation.completion_tokens, generation.finish_reason) == ("a blue heron", 3, "stop")
    assert generation.ttft_ms is not None
    assert 0 < generation.ttft_ms <= generation.total_ms


def test_stream_without_content_has_no_ttft() -> None:
    with running(FakeGateway(reply=lambda prompt: "")) as url, GatewayClient(url=url, api_key="k") as client:
        assert client.stream(_QUESTION).ttft_ms is None


def test_a_prompt_over_the_window_is_its_own_error() -> None:
    with (
        running(FakeGateway(window=3)) as url,
        GatewayClient(url=url, api_key="k") as client,
        pytest.raises(ContextLengthError, match="maximum context length is 3") as caught,
    ):
        client.stream(_QUESTION)
    assert caught.value.status == 400


def test_a_busy_gateway_is_asked_again_after_the_time_it_names() -> None:
    waits: list[float] = []
    gateway = FakeGateway(busy_answers=2)
    with running(gateway) as url, GatewayClient(url=url, api_key="k", sleep=waits.append) as client:
        assert client.chat(_QUESTION).text == "no idea"
    assert waits == [7.0, 7.0]


def test_a_gateway_that_stays_busy_is_an_error() -> None:
    gateway = FakeGateway(busy_answers=100)
    with (
        running(gateway) as url,
        GatewayClient(url=url, api_key="k", sleep=lambda wait_s: None) as client,
        pytest.raises(GatewayError, match="HTTP 429: slow down") as caught,
    ):
        client.compact(_QUESTION)
    assert caught.value.code == "rate_limit_exceeded"
    assert len(gateway.requests) == 6


def test_an_unreachable_gateway_names_its_address() -> None:
    with (
        GatewayClient(url="http://127.0.0.1:9", api_key="k") as client,
        pytest.raises(GatewayError, match=r"POST http://127\.0\.0\.1:9/v1/compact: ConnectError"),
    ):
        client.compact(_QUESTION)


def test_an_answer_of_another_shape_is_an_error() -> None:
    gateway = FakeGateway()
    with (
        running(gateway) as url,
        GatewayClient(url=f"{url}/v1/models?", api_key="k") as client,
        pytest.raises(GatewayError, match="unexpected answer"),
    ):
        client.compact(_QUESTION)
