"""Prefill and decode engines behind one client: equal answers, no doubled counts, retries, cancelling both sides."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import msgspec
import pytest
from factories_disaggregation import NUM_OUTPUT, NUM_TRANSFERRED, PROMPT, InProcessClient, config, engine, tokens_of
from factories_engine import fake_generate

from engine.config import EngineConfig, KVTransferConfig, TransferFailurePolicy
from engine.disaggregated_client import DisaggregatedClient
from engine.disaggregated_stats import sum_steps
from engine.errors import EngineDeadError, EngineError
from engine.outputs import GenerateRequest, RequestOutput
from engine.sampling_params import SamplingParams
from engine.stats import StepTokens


class Cluster:
    """Engines and the client in front of them."""

    def __init__(
        self, prefill: list[InProcessClient], decode: list[InProcessClient], policy: TransferFailurePolicy
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.client = DisaggregatedClient(prefill, decode, on_transfer_failure=policy, min_prefill_tokens=16)

    async def expect_nothing_held(self) -> None:
        clients = [*self.prefill, *self.decode]
        await until(lambda: not any(client.engine.has_unfinished for client in clients))
        for client in clients:
            client.engine.scheduler.check_integrity()
            assert client.engine.num_free_blocks == client.engine.info.num_blocks
            assert len(client.engine.scheduler.kv_cache_manager.received_blocks) == 0


@asynccontextmanager
async def cluster(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    policy: TransferFailurePolicy = "fail",
    prefill: dict[str, object] | None = None,
) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:

        async def start(settings: KVTransferConfig) -> InProcessClient:
            client = InProcessClient(stack.enter_context(engine(settings)))
            stack.push_async_callback(client.close)
            return client

        yield Cluster(
            [await start(config("prefill", **(prefill or {}))) for _ in range(num_prefill)],
            [await start(config("decode", on_transfer_failure=policy)) for _ in range(num_decode)],
            policy,
        )


def make_request(prompt: list[int] = PROMPT, *, request_id: str = "r", **fields: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True),
        cache_salt="tenant",
        **fields,  # type: ignore[arg-type]
    )


async def collect(client: DisaggregatedClient, request: GenerateRequest) -> list[RequestOutput]:
    return [output async for output in client.generate(request)]


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"nothing happened within {timeout_s:g} s"
        await asyncio.sleep(0.002)


async def test_answer_is_that_of_a_single_engine() -> None:
    async with cluster() as one:
        outputs = await collect(one.client, make_request())
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
        assert {output.request_id for output in outputs} == {"r"}
        assert [output.finish_reason for output in outputs] == [None] * (NUM_OUTPUT - 1) + ["length"]
        assert outputs[-1].num_output_tokens == NUM_OUTPUT
        assert outputs[0].num_transferred_tokens == NUM_TRANSFERRED
        await one.expect_nothing_held()


async def test_cached_tokens_are_those_that_nobody_computed_and_never_doubled() -> None:
    async with cluster() as one:
        first = await collect(one.client, make_request(request_id="r1"))
        second = await collect(one.client, make_request(request_id="r2"))
        assert [first[-1].num_cached_tokens, second[-1].num_cached_tokens] == [0, NUM_TRANSFERRED]
        assert second[-1].timings is not None
        assert second[-1].timings.cached_tokens == NUM_TRANSFERRED
        stats = one.client.stats
        assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (2 * len(PROMPT), NUM_TRANSFERRED)
        assert stats.generation_tokens == 2 * NUM_OUTPUT
        assert stats.transferred_prompt_tokens == 0


async def test_transfers_of_all_engines_are_told_as_one() -> None:
    async with cluster(num_prefill=2, num_decode=2) as one:
        requests = [make_request([i, *PROMPT], request_id=f"r{i}") for i in range(4)]
        await asyncio.gather(*(collect(one.client, request) for request in requests))
        await one.expect_nothing_held()
        transfers = one.client.stats.kv_transfer
        assert transfers is not None
        assert (transfers.num_started, transfers.num_completed, transfers.num_offers) == (4, 4, 4)
        assert transfers.num_leases_ended == {"fetched": 4}
        assert transfers.transferred_tokens == 4 * NUM_TRANSFERRED
        assert transfers.num_bytes == 4 * NUM_TRANSFERRED * 8
        assert transfers.wait is not None
        assert sum(transfers.wait.counts) == 4


async def test_times_of_both_engines_are_in_the_parts() -> None:
    async with cluster() as one:
        one.prefill[0].engine.clock.tick = 1.0
        timings = (await collect(one.client, make_request()))[-1].timings
        assert timings is not None
        assert timings.queue_ms > 0
        assert timings.prefill_ms > 0
        assert timings.num_chunks == 2
        assert timings.input_tokens == len(PROMPT)


async def test_short_prompt_goes_to_the_decode_engine_alone() -> None:
    async with cluster() as one:
        outputs = await collect(one.client, make_request(PROMPT[:15]))
        assert tokens_of(outputs) == fake_generate(PROMPT[:15], NUM_OUTPUT)
        assert one.prefill[0].requests == []
        assert one.client.num_local_prefills == {"short": 1}


async def test_load_is_spread_over_the_engines() -> None:
    async with cluster(num_prefill=2, num_decode=2) as one:
        requests = [make_request([i, *PROMPT], request_id=f"r{i}") for i in range(4)]
        answers = await asyncio.gather(*(collect(one.client, request) for request in requests))
        for request, outputs in zip(requests, answers, strict=True):
            assert tokens_of(outputs) == fake_generate(request.prompt_token_ids, NUM_OUTPUT)
        assert [len(client.requests) for client in one.prefill] == [2, 2]
        assert min(len(client.requests) for client in one.decode) >= 1
        await one.expect_nothing_held()


async def test_transfer_that_fails_is_tried_again_with_another_prefill() -> None:
    async with cluster(num_prefill=2) as one:
        forget_offers_of(one.prefill[0])
        assert tokens_of(await collect(one.client, make_request())) == fake_generate(PROMPT, NUM_OUTPUT)
        assert one.client.num_retries == 1
        transfers = one.decode[0].engine.transfers
        assert (transfers.num_failed, transfers.num_completed) == ({"not_offered": 1}, 1)
        await one.expect_nothing_held()


async def test_transfer_that_fails_every_time_ends_with_the_policy() -> None:
    async with cluster() as one:
        forget_offers_of(one.prefill[0], num_times=2)
        last = (await collect(one.client, make_request()))[-1]
        assert (last.finish_reason, last.transfer_failure) == ("error", "not_offered")
        await one.expect_nothing_held()
    async with cluster(policy="recompute") as one:
        forget_offers_of(one.prefill[0], num_times=2)
        assert tokens_of(await collect(one.client, make_request())) == fake_generate(PROMPT, NUM_OUTPUT)
        assert one.client.num_retries == 0
        assert one.decode[0].engine.transfers.recomputed_tokens == NUM_TRANSFERRED


async def test_another_prefill_engine_takes_over_for_a_dead_one() -> None:
    async with cluster(num_prefill=2) as one:
        one.prefill[0].is_paused = True
        task = asyncio.create_task(collect(one.client, make_request()))
        await until(lambda: bool(one.prefill[0].requests))
        one.prefill[0].die()
        assert tokens_of(await task) == fake_generate(PROMPT, NUM_OUTPUT)
        assert len(one.prefill[1].requests) == 1


async def test_another_decode_engine_takes_over_before_the_first_token() -> None:
    async with cluster(num_decode=2) as one:
        one.decode[0].is_paused = True
        task = asyncio.create_task(collect(one.client, make_request()))
        await until(lambda: bool(one.decode[0].requests))
        one.decode[0].die()
        assert tokens_of(await task) == fake_generate(PROMPT, NUM_OUTPUT)
        await until(lambda: not one.prefill[0].engine.has_unfinished)


async def test_without_a_prefill_engine_the_policy_decides() -> None:
    async with cluster() as one:
        one.prefill[0].is_alive = False
        assert not one.client.is_alive
        with pytest.raises(EngineDeadError):
            await collect(one.client, make_request())
    async with cluster(policy="recompute") as one:
        one.prefill[0].is_alive = False
        assert one.client.is_alive
        assert tokens_of(await collect(one.client, make_request())) == fake_generate(PROMPT, NUM_OUTPUT)
        assert one.client.num_local_prefills == {"no_prefill_engine": 1}


async def test_prompt_whose_blocks_cannot_be_kept_ends_with_the_policy() -> None:
    async with cluster(prefill={"max_leased_share": 0.01}) as one:
        last = (await collect(one.client, make_request()))[-1]
        assert last.error == "the prefill engine has no room to keep the prompt's KV blocks"
    async with cluster(prefill={"max_leased_share": 0.01}, policy="recompute") as one:
        assert tokens_of(await collect(one.client, make_request())) == fake_generate(PROMPT, NUM_OUTPUT)
        assert one.client.num_local_prefills == {"no_offer": 1}


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_client_that_leaves_cancels_both_sides(stage: str) -> None:
    async with cluster() as one:
        side = one.prefill[0] if stage == "prefill" else one.decode[0]
        side.is_paused = True
        task = asyncio.create_task(collect(one.client, make_request()))
        await until(lambda: bool(side.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        side.is_paused = False
        await one.expect_nothing_held()
        assert one.decode[0].engine.stats().generation_tokens == 0


async def test_client_that_leaves_in_the_middle_of_the_answer_cancels_the_rest() -> None:
    async with cluster() as one:
        async with aclosing(one.client.generate(make_request())) as outputs:
            await anext(outputs)
        await one.expect_nothing_held()
        assert one.decode[0].engine.stats().generation_tokens < NUM_OUTPUT


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_abort_from_outside_ends_the_request_wherever_it_is(stage: str) -> None:
    async with cluster() as one:
        side = one.prefill[0] if stage == "prefill" else one.decode[0]
        side.is_paused = True
        task = asyncio.create_task(collect(one.client, make_request()))
        await until(lambda: bool(side.requests))
        await one.client.abort("r")
        outputs = await task
        assert [(output.request_id, output.finish_reason) for output in outputs] == [("r", "abort")]
        side.is_paused = False
        await one.expect_nothing_held()


async def test_deadline_counts_from_the_first_engine() -> None:
    async with cluster() as one:
        await collect(one.client, make_request(deadline_ms=60_000.0))
        first, second = one.prefill[0].requests[0].deadline_ms, one.decode[0].requests[0].deadline_ms
        assert first is not None
        assert second is not None
        assert second < first == 60_000.0


async def test_engines_of_different_models_are_not_joined() -> None:
    async with cluster() as one:
        other = one.decode[0]
        other.engine.info = msgspec.structs.replace(other.engine.info, weights_digest="other")
        with pytest.raises(EngineError, match="different models"):
            DisaggregatedClient(one.prefill, one.decode)
        with pytest.raises(ValueError, match="at least 1 engine of each role is needed, got 1 and 0"):
            DisaggregatedClient(one.prefill, [])


async def test_processes_of_another_role_are_not_started() -> None:
    with pytest.raises(ValueError, match=r"kv_transfer\.role must be 'prefill', got 'both'"):
        await DisaggregatedClient.start([EngineConfig()], [])


async def test_request_id_that_is_in_use_is_refused() -> None:
    async with cluster() as one:
        one.prefill[0].is_paused = True
        task = asyncio.create_task(collect(one.client, make_request()))
        await until(lambda: bool(one.prefill[0].requests))
        with pytest.raises(ValueError, match="'r' is in use"):
            await collect(one.client, make_request())
        one.prefill[0].is_paused = False
        await task


def forget_offers_of(client: InProcessClient, num_times: int = 1) -> None:
    """The next offers of an engine are lost as soon as they are made, as by a restart."""
    step: Callable[[], list[RequestOutput]] = client.engine.checked_step
    left = num_times

    def step_and_forget() -> list[RequestOutput]:
        nonlocal left
        outputs = step()
        for output in outputs:
            if output.kv_offer is not None and left:
                left -= 1
                client.engine.abort(output.request_id)
        return outputs

    client.engine.checked_step = step_and_forget  # type: ignore[method-assign]


def test_steps_of_all_engines_that_have_reported_count_together() -> None:
    prefill, decode = StepTokens(), StepTokens()
    prefill.add(2048)
    decode.add(1)
    decode.add(2)
    steps = sum_steps([prefill.snapshot(), None, decode.snapshot()])
    assert steps is not None
    assert (steps.sum, sum(steps.counts), steps.counts[0]) == (2051, 3, 1)
    assert sum_steps([None, None]) is None
