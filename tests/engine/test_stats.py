"""Timings add up to the whole; counters count each thing once."""

import pytest
from factories_engine import FakeModelRunner, make_scheduler, make_sequence, run_step

from engine.cost_model import CostCoefficients
from engine.outputs import RequestTimings
from engine.stats import EngineCounters, request_timings


def test_parts_of_a_finished_request_are_between_its_moments_and_add_up() -> None:
    sequence = make_sequence(arrival_s=1.0)
    sequence.first_scheduled_s = 1.5
    sequence.append_token(7, now=3.0)
    sequence.append_token(8, now=3.25)
    sequence.finished_s = 3.25
    sequence.num_chunks = 4
    sequence.num_preemptions = 2
    timings = request_timings(sequence)
    assert timings == RequestTimings(
        queue_ms=500,
        prefill_ms=1500,
        decode_ms=250,
        num_chunks=4,
        num_preemptions=2,
        input_tokens=4,
        effective_tokens_per_s=pytest.approx(4 / 1.5),
    )
    assert timings.compute_ms == timings.prefill_ms
    assert timings.queue_ms + timings.prefill_ms + timings.decode_ms == pytest.approx((3.25 - 1.0) * 1e3)


def test_with_the_first_token_there_is_no_decode_time_yet() -> None:
    sequence = make_sequence()
    sequence.first_scheduled_s = 1.0
    sequence.append_token(7, now=3.0)
    timings = request_timings(sequence)
    assert (timings.queue_ms, timings.prefill_ms, timings.decode_ms) == (1000, 2000, 0)


@pytest.mark.parametrize(
    ("scheduled_s", "first_token_s", "expected"),
    [(None, None, (4000, 0, 0)), (1.0, None, (1000, 3000, 0)), (1.0, 2.0, (1000, 1000, 2000))],
)
def test_time_until_an_abort_counts_for_the_part_it_ended(
    scheduled_s: float | None, first_token_s: float | None, expected: tuple[float, float, float]
) -> None:
    sequence = make_sequence()
    sequence.first_scheduled_s = scheduled_s
    if first_token_s is not None:
        sequence.append_token(7, now=first_token_s)
    sequence.finished_s = 4.0
    timings = request_timings(sequence)
    assert (timings.queue_ms, timings.prefill_ms, timings.decode_ms) == expected


def test_prompt_is_counted_with_the_first_token_only() -> None:
    counters = EngineCounters()
    sequence = make_sequence(10)
    sequence.num_cached_tokens = 8
    for token_id in (1, 2, 3):
        sequence.append_token(token_id, now=0.0)
        counters.add_token(sequence)
    assert (counters.prompt_tokens, counters.cached_prompt_tokens, counters.generation_tokens) == (10, 8, 3)


def test_snapshot_shows_queues_and_blocks_of_the_moment() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=1)
    for name in ("a", "b", "c"):
        scheduler.add(make_sequence(8, request_id=name, ignore_eos=True))
    run_step(scheduler, FakeModelRunner(8, 4))
    stats = EngineCounters(num_steps=1).snapshot(scheduler)
    assert (stats.num_running, stats.num_waiting, stats.num_steps, stats.num_preemptions) == (1, 2, 1, 0)
    assert stats.kv_cache_usage == 0.25
    scheduler.abort("a", now=0.0)
    assert EngineCounters().snapshot(scheduler).kv_cache_usage == 0


def test_requests_are_counted_in_the_bucket_of_their_length() -> None:
    counters = EngineCounters()
    for num_tokens, queue_s in ((511, 0.02), (512, 0.3), (2047, 0.3), (8192, 100.0)):
        sequence = make_sequence(num_tokens, request_id=str(num_tokens))
        sequence.first_scheduled_s = queue_s
        sequence.append_token(1, now=queue_s + 0.05)
        counters.add_token(sequence)
    stats = counters.snapshot(make_scheduler()).by_length
    assert {name: bucket.num_requests for name, bucket in stats.items()} == {
        "short": 1,
        "medium": 2,
        "long": 0,
        "very_long": 1,
    }
    assert stats["medium"].input_tokens == 512 + 2047
    queue = stats["medium"].queue
    assert queue.counts[queue.upper_ms.index(500.0)] == 2
    assert stats["very_long"].queue.counts[-1] == 1
    assert stats["medium"].compute.sum_ms == pytest.approx(100)
    assert len(queue.counts) == len(queue.upper_ms) + 1


def test_stats_carry_the_fitted_costs() -> None:
    coefficients = CostCoefficients(0.1, 0.2, 0.3)
    assert EngineCounters().snapshot(make_scheduler(), coefficients).cost_coefficients == (0.1, 0.2, 0.3)
    assert EngineCounters().snapshot(make_scheduler()).cost_coefficients is None
