"""The planner's formulas against values computed by hand, against a simulated queue, and in their limits."""

import math
import random

import pytest
from factories_engine import make_model_info

from engine.cost_model import CostCoefficients
from engine.planner import (
    EngineSpeed,
    Link,
    Objectives,
    Workload,
    break_even_bytes_per_s,
    colocated,
    disaggregated,
    fewest_engines,
    load_ratio,
    pipeline_parallel_prefill_s,
    plan,
    queue_wait_s,
    tensor_parallel_prefill_s,
    tpot_s,
)

INFO = make_model_info(dtype="bf16")
"""23,040 bytes of KV per token."""
FAST = Link(bytes_per_s=1.25e9, latency_s=0.0)
OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.05)


def make_speed(
    *,
    step_s: float = 0.0,
    token_s: float = 0.001,
    pair_s: float = 0.0,
    chunk: int = 500,
    d0: float = 0.01,
    d1: float = 0.001,
) -> EngineSpeed:
    return EngineSpeed(
        prefill=CostCoefficients(step_s, token_s, pair_s), chunk_tokens=chunk, decode_step_s=d0, decode_sequence_s=d1
    )


def make_workload(
    prompt_tokens: tuple[int, ...] = (1000,), *, output_tokens: float = 100.0, rate: float = 0.5
) -> Workload:
    return Workload(prompt_tokens=prompt_tokens, output_tokens=output_tokens, request_rate=rate)


def test_prefill_time_counts_steps_tokens_and_pairs() -> None:
    speed = make_speed(step_s=1.0, token_s=0.1, pair_s=0.01, chunk=4)
    assert speed.prefill_s(10) == pytest.approx(3 * 1.0 + 10 * 0.1 + 55 * 0.01)


def test_queue_of_equal_services_waits_as_m_d_1() -> None:
    assert queue_wait_s(0.5, [1.0]) == pytest.approx(0.5 / (2 * (1 - 0.5)))


def test_queue_that_is_overloaded_waits_for_ever() -> None:
    assert queue_wait_s(1.0, [1.0]) == math.inf


def test_queue_formula_agrees_with_a_simulated_queue() -> None:
    rng = random.Random(3)
    service_s = [0.2, 0.5, 2.0]
    rate = 0.7 / (sum(service_s) / len(service_s))
    wait = total = 0.0
    num_arrivals = 200_000
    for _ in range(num_arrivals):
        total += wait
        wait = max(0.0, wait + rng.choice(service_s) - rng.expovariate(rate))
    assert total / num_arrivals == pytest.approx(queue_wait_s(rate, service_s), rel=0.05)


def test_time_per_token_is_consistent_with_the_batch_it_implies() -> None:
    speed = make_speed()
    per_token_s = tpot_s(speed, 500.0)
    batch = 500.0 * per_token_s
    assert per_token_s == pytest.approx(speed.decode_step_s + speed.decode_sequence_s * batch)
    assert batch > 1


def test_time_per_token_is_never_below_that_of_a_single_stream() -> None:
    assert tpot_s(make_speed(), 1.0) == pytest.approx(0.011)


def test_engine_that_has_no_time_left_never_gives_a_token() -> None:
    assert tpot_s(make_speed(), 1000.0) == math.inf
    assert colocated(make_workload(rate=1.0), make_speed(), 1).ttft_s == math.inf


def test_gap_of_a_stream_beside_prefills_is_a_chunk_and_a_step() -> None:
    layout = colocated(make_workload(rate=0.1), make_speed(), 1)
    per_token_s = 0.011 / (1 - 0.1)
    batch = 0.1 * 100 * per_token_s
    assert layout.tpot_s == pytest.approx(per_token_s)
    assert layout.gap_s == pytest.approx(0.5 + 0.01 + 0.001 * batch)


def test_first_token_after_a_transfer_has_all_its_parts() -> None:
    layout = disaggregated(make_workload(rate=0.5), make_speed(), FAST, INFO, 1, 1)
    sent_s = 23_040 * 1000 / 1.25e9
    transfer_s = sent_s + queue_wait_s(0.5, [sent_s])
    assert layout.transfer_s == pytest.approx(transfer_s)
    assert layout.ttft_s == pytest.approx(queue_wait_s(0.5, [1.0]) + 1.0 + transfer_s + layout.tpot_s)


def test_link_that_is_slower_than_the_load_makes_the_first_token_never_come() -> None:
    slow = Link(bytes_per_s=1e7)
    assert disaggregated(make_workload(rate=0.5), make_speed(), slow, INFO, 1, 1).ttft_s == math.inf


def test_break_even_is_the_rate_at_which_computing_takes_as_long() -> None:
    assert break_even_bytes_per_s(make_workload(), make_speed(), INFO) == pytest.approx(23_040 * 1000 / 1.0)


def test_break_even_falls_with_the_length_where_attention_is_quadratic() -> None:
    speed = make_speed(pair_s=1e-6)
    short, long = (break_even_bytes_per_s(make_workload((n,)), speed, INFO) for n in (100, 10_000))
    assert long < short / 5


def test_load_ratio_is_prefill_time_to_decode_time_at_the_largest_batch_allowed() -> None:
    # 40 sequences take 50 ms: 1.25 ms a token, 0.125 s an output; a prompt takes 1 s.
    assert load_ratio(make_workload(), make_speed(), 0.05) == pytest.approx(8.0)
    assert load_ratio(make_workload(), make_speed(), 0.005) == math.inf


def test_split_pays_where_streams_must_not_pause() -> None:
    strict = Objectives(ttft_s=3.0, tpot_s=0.05, gap_s=0.1)
    found = plan(make_workload(rate=1.0), make_speed(), FAST, INFO, strict, 4)
    assert found.pays
    assert found.disaggregated is not None
    assert found.disaggregated.strain(strict) <= 1 < found.colocated.strain(strict)
    assert found.disaggregated.num_prefill > found.disaggregated.num_decode


def test_split_does_not_pay_for_short_prompts_and_loose_objectives() -> None:
    found = plan(make_workload((50,), rate=1.0), make_speed(), FAST, INFO, Objectives(1.0, 0.5), 2)
    assert not found.pays


def test_split_does_not_pay_over_a_slow_network() -> None:
    strict = Objectives(ttft_s=3.0, tpot_s=0.05, gap_s=0.1)
    assert not plan(make_workload(rate=1.0), make_speed(), Link(bytes_per_s=1e6), INFO, strict, 4).pays


def test_one_engine_cannot_be_split() -> None:
    found = plan(make_workload(rate=0.1), make_speed(), FAST, INFO, OBJECTIVES, 1)
    assert found.disaggregated is None
    assert not found.pays


def test_fewest_engines_meet_the_objectives_and_one_less_does_not() -> None:
    workload, speed = make_workload(rate=3.0), make_speed()
    found = fewest_engines(workload, speed, FAST, INFO, OBJECTIVES)
    assert found is not None
    num_engines = found.colocated.num_engines
    assert num_engines > 3
    less = plan(workload, speed, FAST, INFO, OBJECTIVES, num_engines - 1)
    assert less.disaggregated is not None
    assert min(less.colocated.strain(OBJECTIVES), less.disaggregated.strain(OBJECTIVES)) > 1
    assert fewest_engines(workload, speed, FAST, INFO, Objectives(0.5, 0.05)) is None  # a prompt alone takes 1 s


def test_tensor_parallel_prefill_halves_the_arithmetic_and_adds_two_all_reduces_per_layer() -> None:
    link = Link(bytes_per_s=1e9, latency_s=1e-4)
    hidden_bytes = 1000 * 576 * 2
    expected = 1.0 / 2 + 2 * 30 * (hidden_bytes / 1e9 + 2 * 1e-4 * 2)
    assert tensor_parallel_prefill_s(make_speed(), INFO, 1000, 2, link) == pytest.approx(expected)


@pytest.mark.parametrize("parallel", [tensor_parallel_prefill_s, pipeline_parallel_prefill_s])
def test_one_device_pays_for_no_communication(parallel: object) -> None:
    assert callable(parallel)
    assert parallel(make_speed(), INFO, 1000, 1, Link(bytes_per_s=1.0, latency_s=9.0)) == pytest.approx(1.0)


def test_more_devices_are_not_faster_over_a_slow_link() -> None:
    slow = Link(bytes_per_s=1e7)
    assert tensor_parallel_prefill_s(make_speed(), INFO, 1000, 4, slow) > make_speed().prefill_s(1000)


def test_pipeline_of_one_chunk_gains_nothing_and_many_chunks_approach_the_number_of_devices() -> None:
    free = Link(bytes_per_s=math.inf, latency_s=0.0)
    assert pipeline_parallel_prefill_s(make_speed(chunk=1000), INFO, 1000, 4, free) == pytest.approx(1.0)
    assert pipeline_parallel_prefill_s(make_speed(chunk=10), INFO, 1000, 4, free) == pytest.approx(103 / 400)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: make_workload(()), "prompt_tokens must hold positive lengths"),
        (lambda: make_workload(rate=0.0), "request_rate must be positive, got 0.0"),
        (lambda: make_speed(chunk=0), "chunk_tokens must be at least 1, got 0"),
        (lambda: make_speed(d0=-1.0), "decode times must not be negative"),
        (lambda: Link(bytes_per_s=0.0), "a link needs a positive rate"),
        (
            lambda: plan(make_workload(), make_speed(), FAST, INFO, OBJECTIVES, 0),
            "num_engines must be at least 1, got 0",
        ),
    ],
)
def test_values_outside_their_range_are_named(make: object, text: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=text):
        make()
