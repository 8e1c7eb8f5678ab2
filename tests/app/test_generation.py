"""A generation settles, frees and reports once, however it ends."""

import asyncio
from typing import Any

import msgspec
import pytest
from factories_app import ACME_KEY, EchoBackend, make_body, make_documents, make_settings

from app.auth import Principal
from app.chat_service import Arrival
from app.errors import ConfigError, GenerationError
from app.gateway import Gateway, make_gateway
from app.generation import Generation
from app.settings import EncoderSettings


async def make_started_gateway(backend: EchoBackend) -> Gateway:
    gateway = make_gateway(make_settings(acme={"tokens_per_day": 10_000}), backend)
    await gateway.start()
    return gateway


def principal(gateway: Gateway) -> Principal:
    return gateway.authenticator.authenticate(f"Bearer {ACME_KEY}")


async def start(gateway: Gateway, **fields: Any) -> Generation:
    body = msgspec.json.encode(make_body(**fields))
    return await gateway.chat_service.complete(
        Arrival("req_1", principal(gateway), body, arrived_s=0.0, snapshot=gateway.config.current)
    )


async def used(gateway: Gateway) -> int:
    left = (await gateway.admission.remaining(principal(gateway))).tokens
    assert left is not None
    return 10_000 - left


async def test_reading_to_the_end_charges_prompt_and_output() -> None:
    gateway = await make_started_gateway(EchoBackend())
    generation = await start(gateway)
    assert await used(gateway) == generation.num_prompt_tokens + generation.max_tokens
    assert "".join([delta.text async for delta in generation.deltas()]) == "Hello, wörld! 你好 😀"
    assert (generation.outcome, generation.finish_reason) == ("stop", "stop")
    assert await used(gateway) == generation.num_prompt_tokens + 4
    await generation.aclose()
    assert await used(gateway) == generation.num_prompt_tokens + 4
    await gateway.close()


async def test_closing_early_aborts_in_the_engine_and_charges_what_came() -> None:
    backend = EchoBackend()
    gateway = await make_started_gateway(backend)
    generation = await start(gateway)
    deltas = generation.deltas()
    assert (await anext(deltas)).text == "Hello,"
    await generation.aclose()
    assert (generation.outcome, generation.finish_reason) == ("abort", None)
    assert (len(backend.aborted), backend.num_running) == (1, 0)
    assert await used(gateway) == generation.num_prompt_tokens + 1
    await gateway.close()


async def test_cancelling_the_wait_for_the_first_token_charges_nothing() -> None:
    backend = EchoBackend(step_s=30.0)
    gateway = await make_started_gateway(backend)
    waiting = asyncio.ensure_future(start(gateway))
    while not backend.requests:
        await asyncio.sleep(0.01)
    assert await used(gateway) > 0
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=1)
    assert waiting.cancelled()
    assert (len(backend.aborted), backend.num_running) == (1, 0)
    assert await used(gateway) == 0
    await gateway.close()


async def test_a_failure_in_the_middle_charges_what_came_and_is_raised() -> None:
    gateway = await make_started_gateway(EchoBackend(fail_after=1))
    generation = await start(gateway)
    with pytest.raises(GenerationError, match="allocation failed"):
        _ = [delta async for delta in generation.deltas()]
    assert generation.outcome == "error"
    assert await used(gateway) == generation.num_prompt_tokens + generation.num_output_tokens
    await gateway.close()


async def test_a_prompt_that_the_engine_counts_differently_is_reported_not_hidden() -> None:
    backend = EchoBackend()
    gateway = await make_started_gateway(backend)
    encode = backend.encoder.encode_chat
    backend.encoder.count_prompt = lambda *args, **kwargs: len(encode(*args, **kwargs)) - 1  # type: ignore[method-assign]
    generation = await start(gateway)
    await generation.aclose()
    assert b'firsttoken_prompt_count_mismatch_total{model_name="default"} 1.0' in gateway.metrics.render()
    await gateway.close()


async def test_a_start_that_fails_closes_the_backend() -> None:
    class Broken(EchoBackend):
        async def start(self) -> None:
            self.is_alive = True
            raise RuntimeError("no weights")

    backend = Broken()
    gateway = make_gateway(make_settings(), backend)
    with pytest.raises(RuntimeError, match="no weights"):
        await gateway.start()
    assert not backend.is_alive
    assert not gateway.is_ready
    await gateway.close()


async def test_a_missing_encoder_stops_the_start_with_what_to_do_about_it() -> None:
    backend = EchoBackend()
    gateway = make_gateway(make_settings(encoder=EncoderSettings(model="./nowhere")), backend)
    with pytest.raises(ConfigError, match=r"encoder\.model './nowhere' cannot be loaded.*models pull"):
        await gateway.start()
    assert not gateway.is_ready
    assert not backend.is_alive
    await gateway.close()


async def test_a_missing_encoder_that_is_not_required_leaves_ranking_by_words_and_says_so() -> None:
    settings = make_settings(encoder=EncoderSettings(model="./nowhere", required=False))
    gateway = make_gateway(settings, EchoBackend())
    await gateway.start()
    assert gateway.is_ready
    assert gateway.encoder_state.startswith("failed: encoder.model './nowhere'")
    generation = await start(gateway, documents=make_documents(9))
    degraded = {stage.stage: stage.degraded for stage in generation.compaction.result.stages}
    assert degraded["rank"] is not None
    await generation.aclose()
    await gateway.close()
