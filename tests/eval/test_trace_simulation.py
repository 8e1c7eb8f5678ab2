"""Traces through the scheduler: hit shares that can be counted by hand, and times that follow the cost formula."""

import gzip
from pathlib import Path

import msgspec
import pytest

from engine.config import AdmissionConfig, SchedulerConfig
from engine.cost_model import CostCoefficients
from engine.kv_cache_manager import KVCacheManager
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from eval.benches.trace_simulation import (
    FixedCostModel,
    Trace,
    TraceRequest,
    make_cache_key,
    num_distinct_blocks,
    plain_lru_hit_share,
    read_trace,
    replay,
    replay_prefixes,
    step_seconds,
    unlimited_hit_share,
)
from eval.errors import DataError


def make_trace(*prompts: list[int], rest: int = 10, gap_s: float = 100.0) -> Trace:
    """Prompts of whole blocks of 64 tokens and one partial block of ``rest``, whose id nobody else has."""
    return Trace(
        "trace",
        "",
        [
            TraceRequest(
                t=place * gap_s,
                input_tokens=64 * len(blocks) + rest,
                output_tokens=4,
                prefix_blocks=[*blocks, 1000 + place],
                block_tokens=64,
            )
            for place, blocks in enumerate(prompts)
        ],
    )


def test_unlimited_cache_hits_all_whole_blocks_seen_before() -> None:
    trace = make_trace([1, 2, 3], [1, 2, 4], [5], [1, 2, 3])
    assert unlimited_hit_share(trace) == pytest.approx((2 + 3) * 64 / (10 * 64 + 40))
    assert num_distinct_blocks(trace) == 5 + 4


def test_last_token_of_a_prompt_is_never_a_hit() -> None:
    trace = make_trace([1, 2], [1, 2], rest=0)
    assert unlimited_hit_share(trace) == pytest.approx(1 * 64 / 256)


def test_plain_lru_evicts_the_head_of_a_chain_first() -> None:
    trace = make_trace([1, 2, 3], [9], [1, 2, 3])
    assert plain_lru_hit_share(trace, 3, with_outputs=False) == 0
    assert plain_lru_hit_share(trace, 4, with_outputs=False) == pytest.approx(3 * 64 / (7 * 64 + 30))


def test_scheduler_reaches_the_unlimited_share_where_everything_fits() -> None:
    trace = make_trace([1, 2, 3], [1, 2, 4], [5], [1, 2, 3])
    assert replay_prefixes(trace, 64).hit_share == pytest.approx(unlimited_hit_share(trace))


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    trace = make_trace(*[[1, 2, 3]] * 5, gap_s=0.0)
    result = replay_prefixes(trace, 64)
    assert result.hit_share == pytest.approx(unlimited_hit_share(trace))
    assert result.num_waits_for_prefix > 0


def test_small_pool_keeps_the_head_of_a_chain() -> None:
    # Four blocks hold a prompt of three; plain LRU would throw away its first block for the flood.
    trace = make_trace([1, 2, 3], [9], [1, 2, 3])
    assert replay_prefixes(trace, 4).hit_share > plain_lru_hit_share(trace, 3, with_outputs=False)


def test_clock_follows_the_cost_of_the_steps() -> None:
    coefficients = CostCoefficients(1.0, 0.01, 0.0)
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=64),
        KVCacheManager(num_blocks=64, block_size=16, cache_key=make_cache_key()),
        max_model_len=512,
        admission=AdmissionConfig(max_num_waiting_tokens=None),
    )
    sequence = Sequence(
        request_id="a",
        prompt_token_ids=list(range(100)),
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),
        cache_salt="tenant",
        arrival_s=5.0,
    )
    replay(scheduler, [sequence], lambda output: step_seconds(coefficients, output))
    assert sequence.first_token_s == pytest.approx(5.0 + 1.64 + 1.36)
    assert sequence.finished_s == pytest.approx(8.0 + 1.01)
    assert FixedCostModel(coefficients, 64).predict_s(100, 0) == pytest.approx(3.0)


def test_requests_without_input_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    lines = [{"t": 0.0, "input_tokens": n, "output_tokens": 1, "prefix_blocks": None} for n in (0, 5)]
    path.write_bytes(gzip.compress(b"\n".join(msgspec.json.encode(line) for line in lines)))
    assert [request.input_tokens for request in read_trace(path).requests] == [5]


def test_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"trace\.jsonl\.gz: not a readable trace"):
        read_trace(path)
