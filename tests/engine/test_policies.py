"""The three policies: who goes first, how much of a step each takes, and that nobody starves."""

import pytest
from factories_engine import FakeModelRunner, make_scheduler, make_sequence, run_step

from engine.cost_model import CostCoefficients, PrefillCostModel, num_attention_pairs
from engine.fairness import TenantAccounts
from engine.scheduler import Scheduler
from engine.sequence import Sequence


def make_runner(scheduler: Scheduler) -> FakeModelRunner:
    manager = scheduler.kv_cache_manager
    return FakeModelRunner(manager.block_pool.num_blocks, manager.block_size)


def order_of_first_tokens(scheduler: Scheduler, sequences: list[Sequence], step_s: float = 1.0) -> list[str]:
    """Runs sequences that arrive at their times; names in the order of their first tokens."""
    runner = make_runner(scheduler)
    names: list[str] = []
    pending = sorted(sequences, key=lambda sequence: sequence.arrival_s)
    now = 0.0
    for _ in range(500):
        while pending and pending[0].arrival_s <= now:
            scheduler.add(pending.pop(0))
        if not pending and not scheduler.has_unfinished:
            return names
        run_step(scheduler, runner, now)
        now += step_s
        first = [s for s in sequences if s.first_token_s is not None and s.request_id not in names]
        names.extend(sequence.request_id for sequence in first)
    raise AssertionError("still unfinished after 500 steps")


def prompt(name: str, num_tokens: int, **options: object) -> Sequence:
    """A prompt that shares nothing with one of another name."""
    first = sum(name.encode()) * 1000
    return make_sequence(range(first, first + num_tokens), request_id=name, max_tokens=1, **options)  # type: ignore[arg-type]


def test_short_prompt_overtakes_a_long_one_that_is_already_running() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, ageing_ms_per_token=100)
    long, short = prompt("long", 100), prompt("short", 8, arrival_s=2.0)
    assert order_of_first_tokens(scheduler, [long, short]) == ["short", "long"]


def test_long_prompt_does_not_starve_though_short_ones_need_all_there_is() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_waiting=500, ageing_ms_per_token=100)
    shorts = [prompt(f"s{i:03}", 8, arrival_s=float(i)) for i in range(250)]
    names = order_of_first_tokens(scheduler, [prompt("long", 100), *shorts])
    assert names[:5] == ["s000", "s001", "s002", "s003", "s004"]
    assert names.index("long") < 200


def test_who_waits_ten_times_as_long_may_have_ten_times_as_much_to_compute() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=1, ageing_ms_per_token=100)
    running = prompt("running", 80)
    names = order_of_first_tokens(
        scheduler,
        [running, prompt("long", 40, arrival_s=1.0), prompt("a", 4, arrival_s=9.0), prompt("b", 4, arrival_s=9.5)],
    )
    # At 10 s the long one has waited 9 s of 4, the short ones 1 s and 0.5 s of 0.4 each; at 11 s b is ahead as well.
    assert names == ["running", "a", "b", "long"]


def test_without_ageing_prompts_are_served_as_they_come() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    names = order_of_first_tokens(scheduler, [prompt("long", 60), prompt("short", 4, arrival_s=0.5)])
    assert names == ["long", "short"]


def test_higher_priority_goes_first_and_waiting_lifts_the_lower_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, priority_ageing_s=4.0)
    low = prompt("low", 8, priority=0)
    high = [prompt(f"h{i}", 8, priority=1, arrival_s=float(i)) for i in range(12)]
    names = order_of_first_tokens(scheduler, [low, *high])
    assert names[:4] == ["h0", "h1", "h2", "h3"]
    assert "low" in names[:7]


def test_lowest_priority_is_preempted_though_another_is_younger() -> None:
    scheduler = make_scheduler(num_blocks=8)
    runner = make_runner(scheduler)
    sequences = [
        make_sequence([10 * i + 1, 2, 3], request_id=name, max_tokens=12, ignore_eos=True, priority=priority)
        for i, (name, priority) in enumerate((("old", 1), ("low", 0), ("young", 1)))
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
    assert [sequence.num_preemptions > 0 for sequence in sequences] == [False, True, False]


def test_tenants_take_turns_by_tokens_served() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    many = [prompt(f"a{i}", 8, cache_salt="acme") for i in range(6)]
    one = prompt("g", 8, cache_salt="globex", arrival_s=1.0)
    names = order_of_first_tokens(scheduler, [*many, one])
    assert names.index("g") <= 2  # behind the one that was running, not behind five more


def test_without_fairness_the_tenant_that_asks_most_gets_most() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, fair_tenants=False)
    many = [prompt(f"a{i}", 8, cache_salt="acme") for i in range(6)]
    names = order_of_first_tokens(scheduler, [*many, prompt("g", 8, cache_salt="globex", arrival_s=1.0)])
    assert names[-1] == "g"


def test_tenant_that_was_away_has_no_credit() -> None:
    accounts = TenantAccounts()
    accounts.enter("acme")
    accounts.charge("acme", 100)
    accounts.enter("globex")
    assert accounts.served("globex") == 100
    accounts.charge("globex", 30)
    accounts.leave("globex")
    accounts.charge("acme", 500)
    accounts.enter("globex")
    assert accounts.served("globex") == 600
    accounts.leave("globex")
    accounts.leave("acme")
    assert accounts.served("acme") == 0


def test_deadline_comes_before_due_time() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, ageing_ms_per_token=100)
    urgent = prompt("urgent", 60, deadline_s=5.5)
    names = order_of_first_tokens(scheduler, [prompt("a", 59), urgent])
    assert names == ["urgent", "a"]


def test_what_misses_its_deadline_in_the_queue_ends_with_an_error() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    runner = make_runner(scheduler)
    scheduler.add(make_sequence([1], request_id="first", max_tokens=5, ignore_eos=True))
    late = prompt("late", 4, deadline_s=2.0)
    scheduler.add(late)
    for now in (0.0, 1.0, 2.0):
        run_step(scheduler, runner, now)
        assert scheduler.take_expired() == []
    run_step(scheduler, runner, 2.1)
    assert scheduler.take_expired() == [(late, [])]
    assert (late.finish_reason, late.error) == ("error", "the deadline of 2000 ms passed in the queue")


def test_decode_gap_shrinks_the_chunk_only_while_streams_decode() -> None:
    cost_model = PrefillCostModel()
    for num_tokens in (8, 16, 32, 64, 128):
        cost_model.observe_step(num_tokens, num_attention_pairs(num_tokens, 0), num_tokens * 0.01)
    scheduler = make_scheduler(
        num_blocks=200, max_model_len=512, cost_model=cost_model, max_decode_gap_ms=200.0, max_num_batched_tokens=64
    )
    runner = make_runner(scheduler)
    scheduler.add(prompt("p", 100))
    assert run_step(scheduler, runner) == {"p": 64}
    scheduler.add(make_sequence([1], request_id="stream", max_tokens=100, ignore_eos=True))
    run_step(scheduler, runner)
    scheduler.add(prompt("q", 100))
    step = run_step(scheduler, runner)
    assert step["stream"] == 1
    assert 15 <= step["q"] <= 20  # about 20 tokens in 200 ms


def test_decode_gap_never_stops_a_prefill() -> None:
    cost_model = PrefillCostModel()
    for num_tokens in (8, 16, 32):
        cost_model.observe_step(num_tokens, num_attention_pairs(num_tokens, 0), num_tokens * 1.0)
    scheduler = make_scheduler(cost_model=cost_model, max_decode_gap_ms=1.0)
    runner = make_runner(scheduler)
    scheduler.add(make_sequence([1], request_id="stream", max_tokens=50, ignore_eos=True))
    run_step(scheduler, runner)
    scheduler.add(prompt("p", 20))
    assert run_step(scheduler, runner) == {"stream": 1, "p": 4}  # a block


@pytest.mark.parametrize("num_context_tokens", [0, 100, 5000])
def test_tokens_within_a_time_are_those_whose_step_takes_it(num_context_tokens: int) -> None:
    costs = CostCoefficients(0.5, 1e-3, 1e-6)
    num_tokens = costs.max_tokens_within(1.0, num_context_tokens)
    pairs = num_tokens * num_context_tokens + num_tokens * (num_tokens + 1) / 2
    assert costs.token_s * num_tokens + costs.pair_s * pairs == pytest.approx(1.0)
    assert costs.max_tokens_within(0.0, num_context_tokens) == 0


def test_fixed_count_computes_whole_prompts_of_so_many() -> None:
    scheduler = make_scheduler(policy="fixed_count", fixed_count=2, max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    for name, count in (("a", 40), ("b", 30), ("c", 5)):
        scheduler.add(prompt(name, count))
    assert run_step(scheduler, runner) == {"a": 40, "b": 30}
    assert run_step(scheduler, runner) == {"c": 5}


def test_length_bucket_computes_prompts_of_one_bucket_together() -> None:
    scheduler = make_scheduler(policy="length_bucket", num_blocks=2000, max_model_len=4000, max_num_batched_tokens=2048)
    runner = make_runner(scheduler)
    for name, count in (("short", 100), ("medium", 700), ("short too", 200), ("long", 3000), ("medium too", 600)):
        scheduler.add(prompt(name, count))
    assert run_step(scheduler, runner) == {"short": 100, "short too": 200}
    assert run_step(scheduler, runner) == {"medium": 700, "medium too": 600}
    assert run_step(scheduler, runner) == {"long": 3000}  # alone and whole, though above the budget


def test_decodes_come_first_under_every_policy() -> None:
    for policy in ("token_budget", "fixed_count", "length_bucket"):
        scheduler = make_scheduler(policy=policy, max_num_batched_tokens=32)
        runner = make_runner(scheduler)
        scheduler.add(make_sequence([1], request_id="stream", max_tokens=20, ignore_eos=True))
        run_step(scheduler, runner)
        scheduler.add(prompt("p", 20))
        assert list(run_step(scheduler, runner)) == ["stream", "p"]
