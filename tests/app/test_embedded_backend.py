"""The embedded engine as a backend: what it passes on, and what it turns into an error."""

from collections.abc import AsyncIterator

import pytest
from factories_app import ByteEncoder, make_model_info

from app.backends.base import BackendRequest
from app.backends.embedded import EmbeddedBackend
from app.workers import WorkerPool
from engine.config import EngineConfig
from engine.errors import AdmissionError, PromptTooLongError
from engine.outputs import GenerateRequest, ModelInfo, RequestOutput
from engine.sampling_params import SamplingParams


class FakeClient:
    """Answers every request with the given outputs."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        self.info: ModelInfo = make_model_info()
        self.requests: list[GenerateRequest] = []
        self._outputs = outputs

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        for output in self._outputs:
            yield output


def make_backend(client: FakeClient) -> EmbeddedBackend:
    backend = EmbeddedBackend(EngineConfig(), WorkerPool(1, 8))
    backend._client = client  # type: ignore[assignment]
    backend._encoder = ByteEncoder()  # type: ignore[assignment]
    return backend


def make_output(**fields: object) -> RequestOutput:
    defaults = {
        "request_id": "r",
        "text": "",
        "new_token_ids": [],
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        "num_output_tokens": 0,
    }
    return RequestOutput(**(defaults | fields))  # type: ignore[arg-type]


def make_backend_request(content: str = "hi", **fields: object) -> BackendRequest:
    messages = [{"role": "user", "content": content}]
    return BackendRequest("r", messages, (), SamplingParams(), "salt", **fields)  # type: ignore[arg-type]


async def test_priority_and_deadline_reach_the_engine() -> None:
    client = FakeClient([make_output(finish_reason="stop")])
    request = make_backend_request(priority=2, deadline_ms=300.0)
    outputs = [output async for output in make_backend(client).generate(request)]
    assert [output.finish_reason for output in outputs] == ["stop"]
    (sent,) = client.requests
    assert (sent.priority, sent.deadline_ms, sent.cache_salt) == (2, 300.0, "salt")


async def test_request_that_expired_in_the_queue_may_come_again() -> None:
    client = FakeClient([make_output(finish_reason="error", is_expired=True, error="the deadline passed")])
    with pytest.raises(AdmissionError, match="the deadline passed; retry in 1 s") as raised:
        async for _ in make_backend(client).generate(make_backend_request()):
            pass
    assert (raised.value.reason, raised.value.retry_after_s) == ("deadline", 1.0)


async def test_prompt_that_does_not_fit_never_reaches_the_engine() -> None:
    client = FakeClient([])
    with pytest.raises(PromptTooLongError):
        async for _ in make_backend(client).generate(make_backend_request("x" * client.info.max_model_len)):
            pass
    assert client.requests == []
