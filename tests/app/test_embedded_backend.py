"""The embedded engine as a backend: what it passes on, and what it turns into an error."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from factories_app import ByteEncoder, make_model_info
from factories_disaggregation_model import save_tiny_llama

from app.backends.base import BackendRequest
from app.backends.embedded import EmbeddedBackend
from app.settings import DisaggregationSettings
from app.workers import WorkerPool
from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.errors import AdmissionError, EngineDeadError, PromptTooLongError
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


async def test_blocks_that_did_not_come_from_another_engine_make_it_unavailable_for_a_moment() -> None:
    failed = make_output(finish_reason="error", transfer_failure="timeout", error="the KV blocks did not come: timeout")
    with pytest.raises(EngineDeadError, match="the KV blocks did not come: timeout") as raised:
        async for _ in make_backend(FakeClient([failed])).generate(make_backend_request()):
            pass
    assert raised.value.retry_after_s == 1.0


async def test_backend_starts_an_engine_process_of_each_role(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "tiny-llama")
    config = EngineConfig(
        model=ModelConfig(model=str(model), dtype="fp32"), cache=CacheConfig(num_blocks=64), num_threads=1
    )
    settings = DisaggregationSettings(num_prefill_engines=1, num_decode_engines=1)
    backend = EmbeddedBackend(config, WorkerPool(1, 8), settings)
    await backend.start()
    try:
        backend._encoder = ByteEncoder()  # type: ignore[assignment]  # the tiny model has no chat template
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        request = BackendRequest("r", [{"role": "user", "content": "a" * 100}], (), sampling, "salt")
        outputs = [output async for output in backend.generate(request)]
        assert outputs[-1].finish_reason == "length"
        assert outputs[-1].num_transferred_tokens >= 96
        assert backend.stats is not None
        assert backend.stats.prompt_tokens == outputs[-1].num_prompt_tokens
        assert backend.is_alive
    finally:
        await backend.close()


@pytest.mark.parametrize("counts", [(1, 0), (0, 2), (-1, -1)])
def test_engines_of_one_role_alone_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {counts[0]} and {counts[1]}"):
        DisaggregationSettings(num_prefill_engines=counts[0], num_decode_engines=counts[1])
