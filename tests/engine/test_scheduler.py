"""The scheduler's arithmetic: exact tokens per step, admission, preemption, ends. Blocks hold four tokens here."""

import pytest
from factories_engine import FakeModelRunner, fake_generate, make_scheduler, make_sequence, run_step

from engine.cost_model import PrefillCostModel
from engine.errors import PromptTooLongError, QueueFullError
from engine.scheduler import Scheduler
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine.sequence import Sequence, SequenceStatus


def make_runner(scheduler: Scheduler) -> FakeModelRunner:
    manager = scheduler.kv_cache_manager
    return FakeModelRunner(manager.block_pool.num_blocks, manager.block_size)


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def run_to_end(scheduler: Scheduler, runner: FakeModelRunner) -> list[dict[str, int]]:
    steps = []
    while scheduler.has_unfinished:
        steps.append(run_step(scheduler, runner))
        assert steps[-1], "a step is empty while sequences are unfinished"
    assert scheduler.kv_cache_manager.usage == 0
    return steps


def test_prompt_is_one_step_and_each_further_token_one_more() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_sequence(10, max_tokens=3, ignore_eos=True))
    assert run_to_end(scheduler, make_runner(scheduler)) == [{"r0": 10}, {"r0": 1}, {"r0": 1}]


def test_the_step_of_the_module_docstring() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=20)
    runner = make_runner(scheduler)
    add(scheduler, make_sequence([9], request_id="d", ignore_eos=True))
    run_step(scheduler, runner)
    add(scheduler, make_sequence(50, request_id="p", ignore_eos=True))
    add(scheduler, make_sequence([8] * 9, request_id="q", ignore_eos=True))
    assert run_step(scheduler, runner) == {"d": 1, "p": 20, "q": 9}
    assert run_step(scheduler, runner) == {"d": 1, "q": 1, "p": 20}
    assert run_step(scheduler, runner) == {"d": 1, "q": 1, "p": 10}


def test_scheduled_sequence_carries_tokens_positions_and_blocks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    runner = make_runner(scheduler)
    add(scheduler, make_sequence([10, 11, 12, 13, 14, 15, 16, 17], max_tokens=2, ignore_eos=True))
    run_to_end(scheduler, runner)
    first, second, third = (step.scheduled[0] for step in runner.steps)
    assert (first.token_ids, first.start, first.block_ids, first.needs_sample) == ([*range(10, 16)], 0, [0, 1], False)
    assert (second.token_ids, second.start, second.block_ids, second.needs_sample) == ([16, 17], 6, [0, 1], True)
    assert (third.start, third.block_ids, third.needs_sample) == (8, [0, 1, 2], True)
    assert [first.num_output_tokens, second.num_output_tokens, third.num_output_tokens] == [0, 0, 1]


def test_budget_is_shared_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    runner = make_runner(scheduler)
    for name, first_token in (("a", 0), ("b", 50), ("c", 100)):
        add(scheduler, make_sequence(range(first_token, first_token + 10), request_id=name, ignore_eos=True))
    assert run_step(scheduler, runner) == {"a": 10, "b": 6}
    assert run_step(scheduler, runner) == {"a": 1, "b": 4, "c": 10}


def test_decode_is_served_before_prefills_that_were_admitted_earlier() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, long_prefill_token_threshold=6)
    runner = make_runner(scheduler)
    add(scheduler, make_sequence(40, request_id="long"), make_sequence([1, 2], request_id="short", ignore_eos=True))
    assert run_step(scheduler, runner) == {"long": 6, "short": 2}
    for _ in range(4):
        assert list(run_step(scheduler, runner).items()) == [("short", 1), ("long", 6)]


def test_no_more_sequences_run_than_the_budget_has_tokens() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=3, max_num_seqs=8)
    runner = make_runner(scheduler)
    add(scheduler, *(make_sequence([i], request_id=f"r{i}", ignore_eos=True) for i in range(5)))
    assert run_step(scheduler, runner) == {"r0": 1, "r1": 1, "r2": 1}
    assert run_step(scheduler, runner) == {"r0": 1, "r1": 1, "r2": 1}


def test_max_num_seqs_limits_the_running() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    runner = make_runner(scheduler)
    add(scheduler, *(make_sequence([i], request_id=f"r{i}", max_tokens=1) for i in range(3)))
    assert run_step(scheduler, runner) == {"r0": 1, "r1": 1}
    assert run_step(scheduler, runner) == {"r2": 1}


def test_prefix_hit_counts_only_the_rest_against_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=24)
    runner = make_runner(scheduler)
    add(scheduler, make_sequence(20, request_id="a", max_tokens=1))
    run_step(scheduler, runner)
    hit = make_sequence([*range(20), 200, 201], request_id="b")
    add(scheduler, hit)
    assert run_step(scheduler, runner) == {"b": 2}
    assert hit.num_cached_tokens == 20


def test_a_repeated_prompt_computes_at_least_its_last_token() -> None:
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    add(scheduler, make_sequence(13, request_id="a", max_tokens=1))
    run_step(scheduler, runner)
    add(scheduler, make_sequence(13, request_id="b", max_tokens=1))
    assert run_step(scheduler, runner) == {"b": 1}


def test_another_tenant_computes_the_whole_prompt() -> None:
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    add(scheduler, make_sequence(16, request_id="a", max_tokens=1, cache_salt="acme"))
    run_step(scheduler, runner)
    other = make_sequence(16, request_id="b", max_tokens=1, cache_salt="globex")
    add(scheduler, other)
    assert run_step(scheduler, runner) == {"b": 16}
    assert other.num_cached_tokens == 0


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    first = make_sequence(9, request_id="a", max_tokens=2, ignore_eos=True)
    second = make_sequence(9, request_id="b", max_tokens=2, ignore_eos=True)
    add(scheduler, first, second)
    assert run_to_end(scheduler, runner) == [{"a": 9}, {"a": 1, "b": 1}, {"b": 1}]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.output_token_ids == second.output_token_ids == fake_generate(list(range(9)), 2)


def test_a_prompt_waits_only_for_the_part_that_another_is_computing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    add(scheduler, make_sequence(24, request_id="a", max_tokens=1))
    add(scheduler, make_sequence([*range(8), 90, 91, 92], request_id="b", max_tokens=1))
    steps = run_to_end(scheduler, runner)
    assert steps[0] == {"a": 8}
    assert sum(step.get("b", 0) for step in steps) == 3


def test_nobody_waits_for_ever_for_a_prefix_that_does_not_grow() -> None:
    scheduler = make_scheduler(num_blocks=400, max_num_batched_tokens=8, max_num_waiting=200)
    runner = make_runner(scheduler)
    add(scheduler, make_sequence(20, request_id="slow", max_tokens=1, priority=-1))
    run_step(scheduler, runner)
    same = make_sequence(20, request_id="same", max_tokens=1)
    # More urgent prompts take every token there is, so the one with the prefix does not advance.
    for i in range(60):
        prompt = range(1000 * (i + 1), 1000 * (i + 1) + 8)
        add(scheduler, make_sequence(prompt, request_id=f"urgent{i}", max_tokens=1, priority=1))
    add(scheduler, same)
    same.priority = 2
    steps = 0
    while same.first_token_s is None:
        run_step(scheduler, runner)
        steps += 1
    assert 32 < steps < 40
    assert scheduler.get("slow") is not None


def test_when_the_one_that_others_wait_for_is_gone_the_next_one_computes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    for name in ("a", "b", "c"):
        add(scheduler, make_sequence(20, request_id=name, max_tokens=1))
    assert run_step(scheduler, runner) == {"a": 8}
    scheduler.abort("a", now=0.0)
    assert run_step(scheduler, runner) == {"b": 8}  # the first eight tokens are cached
    assert run_to_end(scheduler, runner) == [{"b": 4, "c": 4}]


def test_youngest_is_preempted_and_computes_the_same_tokens() -> None:
    scheduler = make_scheduler(num_blocks=6)
    runner = make_runner(scheduler)
    old = make_sequence(range(8), request_id="old", max_tokens=14, ignore_eos=True)
    young = make_sequence(range(50, 57), request_id="young", max_tokens=12, ignore_eos=True)
    add(scheduler, old, young)
    run_to_end(scheduler, runner)
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert scheduler.num_preemptions == 1
    assert old.output_token_ids == fake_generate(old.prompt_token_ids, 14)
    assert young.output_token_ids == fake_generate(young.prompt_token_ids, 12)


def test_preempted_sequence_waits_in_front_with_nothing_computed() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2)
    runner = make_runner(scheduler)
    old = make_sequence(range(4), request_id="old", max_tokens=9, ignore_eos=True)
    young = make_sequence(range(50, 54), request_id="young", ignore_eos=True)
    add(scheduler, old, young, make_sequence([1], request_id="later"))
    while not young.num_preemptions:
        run_step(scheduler, runner)
    assert [sequence.request_id for sequence in scheduler.waiting] == ["young", "later"]
    assert young.status is SequenceStatus.WAITING
    assert young.num_computed_tokens == 0


def test_a_preempted_sequence_keeps_the_time_and_the_hit_of_its_first_admission() -> None:
    scheduler = make_scheduler(num_blocks=6)
    runner = make_runner(scheduler)
    old = make_sequence(range(8), request_id="old", max_tokens=14, ignore_eos=True)
    young = make_sequence(range(50, 57), request_id="young", max_tokens=12, ignore_eos=True)
    add(scheduler, old, young)
    now = 0.0
    while scheduler.has_unfinished:
        now += 1
        run_step(scheduler, runner, now)
    assert young.num_preemptions == 1
    assert (young.first_scheduled_s, young.num_cached_tokens) == (1.0, 0)
    assert young.first_token_s == 1.0


def test_a_victim_already_in_the_step_leaves_it_and_its_budget_goes_to_others() -> None:
    scheduler = make_scheduler(num_blocks=9, max_num_batched_tokens=9, long_prefill_token_threshold=8)
    runner = make_runner(scheduler)
    first = make_sequence(20, request_id="first", max_tokens=1)
    second = make_sequence(range(50, 60), request_id="second", max_tokens=1)
    decode = make_sequence([90, 91], request_id="decode", ignore_eos=True)
    # Admission keeps blocks for running prefills, so this pressure is made by hand.
    add(scheduler, first, second, decode)
    manager = scheduler.kv_cache_manager
    for sequence, count in ((first, 4), (second, 3), (decode, 2)):
        manager.allocate_slots(sequence, count)
        scheduler.waiting.remove(sequence)
        scheduler.running.append(sequence)
        sequence.status = SequenceStatus.RUNNING
        scheduled = scheduler._scheduled(sequence, count)
        scheduler.update_from_output(
            SchedulerOutput([scheduled]), runner.execute(SchedulerOutput([scheduled])), now=0.0
        )
    scheduler.check_integrity()
    taken = manager.block_pool.get_new_blocks(5)
    # One block is free. The decode is served first; then a prefill needs two blocks and takes the decode's. The
    # token of the decode is left for the second prefill, which has room for it.
    scheduler_output = scheduler.schedule(0.0)
    manager.block_pool.free_blocks(taken)
    assert [(s.request_id, s.num_new_tokens) for s in scheduler_output.scheduled] == [("first", 8), ("second", 1)]
    assert decode.num_preemptions == 1
    scheduler.update_from_output(scheduler_output, runner.execute(scheduler_output), 0.0)
    scheduler.check_integrity()
    run_to_end(scheduler, runner)
    assert decode.output_token_ids == fake_generate([90, 91], 8)
    assert first.output_token_ids == fake_generate(first.prompt_token_ids, 1)


def test_a_prompt_is_admitted_only_when_all_of_it_fits_beside_the_running_prefills() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    runner = make_runner(scheduler)
    add(scheduler, make_sequence(range(24), request_id="a", max_tokens=2, ignore_eos=True))
    add(scheduler, make_sequence(range(50, 70), request_id="b", max_tokens=2, ignore_eos=True))
    steps = run_to_end(scheduler, runner)
    assert all(len(step) == 1 for step in steps)
    assert scheduler.num_preemptions == 0


def test_admission_leaves_each_running_sequence_a_block_to_grow() -> None:
    scheduler = make_scheduler(num_blocks=4)
    runner = make_runner(scheduler)
    add(scheduler, make_sequence(4, request_id="old", max_tokens=7, ignore_eos=True))
    run_step(scheduler, runner)
    add(scheduler, make_sequence(range(50, 57), request_id="young", max_tokens=1))
    # The old one holds two blocks and the young one needs the other two: it would be preempted before long.
    steps = run_to_end(scheduler, runner)
    assert steps == [{"old": 1}] * 6 + [{"young": 7}]


def test_admission_counts_a_block_for_those_admitted_in_the_same_step() -> None:
    scheduler = make_scheduler(num_blocks=4)
    runner = make_runner(scheduler)
    add(scheduler, make_sequence(8, request_id="a", max_tokens=5, ignore_eos=True))
    add(scheduler, make_sequence(range(50, 57), request_id="b", max_tokens=1))
    assert run_step(scheduler, runner) == {"a": 8}
    run_to_end(scheduler, runner)
    assert scheduler.num_preemptions == 0


def test_a_prompt_that_leaves_no_room_in_the_window_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=16)
    with pytest.raises(PromptTooLongError, match="prompt of 16 tokens does not fit into the window of 16 tokens"):
        add(scheduler, make_sequence(16))
    add(scheduler, make_sequence(15))


def test_a_prompt_larger_than_the_whole_pool_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=256)
    with pytest.raises(PromptTooLongError, match="prompt of 12 tokens does not fit into the window of 12 tokens"):
        add(scheduler, make_sequence(12))
    sequence = make_sequence(11, max_tokens=50, ignore_eos=True)
    add(scheduler, sequence)
    run_to_end(scheduler, make_runner(scheduler))
    assert sequence.finish_reason == "length"
    assert sequence.num_tokens == 12


def test_a_full_queue_refuses_at_once() -> None:
    scheduler = make_scheduler(max_num_waiting=2)
    add(scheduler, make_sequence(request_id="a"), make_sequence(request_id="b"))
    with pytest.raises(QueueFullError, match="2 sequences are waiting already; retry in 5 s") as caught:
        add(scheduler, make_sequence(request_id="c"))
    assert caught.value.num_waiting == 2
    assert scheduler.get("c") is None


def test_a_full_queue_tells_when_what_waits_will_be_computed() -> None:
    cost_model = PrefillCostModel()
    for num_tokens in (100, 200, 400, 800):
        cost_model.observe(num_tokens, 0, num_tokens * 0.1)
    scheduler = make_scheduler(max_num_waiting=2, cost_model=cost_model)
    add(scheduler, make_sequence(100, request_id="a"), make_sequence(150, request_id="b"))
    with pytest.raises(QueueFullError) as caught:
        add(scheduler, make_sequence(request_id="c"))
    assert caught.value.retry_after_s == pytest.approx(25, rel=0.02)


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_sequence(request_id="a"))
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        add(scheduler, make_sequence(request_id="a"))


def test_an_empty_salt_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_salt must not be empty"):
        add(make_scheduler(enable_prefix_caching=False), make_sequence(cache_salt=""))


def test_eos_ends_with_stop() -> None:
    prompt = [1, 2, 3]
    third = fake_generate(prompt, 3)[2]
    scheduler = make_scheduler(eos_token_ids=[third, 9999])
    sequence = make_sequence(prompt)
    add(scheduler, sequence)
    run_to_end(scheduler, make_runner(scheduler))
    assert sequence.output_token_ids == fake_generate(prompt, 3)
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    prompt = [1, 2, 3]
    scheduler = make_scheduler(eos_token_ids=range(257))
    sequence = make_sequence(prompt, max_tokens=5, ignore_eos=True)
    add(scheduler, sequence)
    run_to_end(scheduler, make_runner(scheduler))
    assert sequence.output_token_ids == fake_generate(prompt, 5)
    assert sequence.finish_reason == "length"


def test_stop_token_id_ends_with_stop_and_says_which_even_when_eos_is_ignored() -> None:
    prompt = [1, 2, 3]
    second = fake_generate(prompt, 2)[1]
    scheduler = make_scheduler(eos_token_ids=[second])
    sequence = make_sequence(prompt, stop_token_ids=(second,), ignore_eos=True)
    add(scheduler, sequence)
    run_to_end(scheduler, make_runner(scheduler))
    assert sequence.num_output_tokens == 2
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", second)


def test_full_window_ends_with_length() -> None:
    scheduler = make_scheduler(max_model_len=8)
    sequence = make_sequence(5, max_tokens=50, ignore_eos=True)
    add(scheduler, sequence)
    run_to_end(scheduler, make_runner(scheduler))
    assert sequence.num_tokens == 8
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted"])
def test_abort_in_any_state_gives_everything_back(state: str) -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    sequence = make_sequence(range(50, 60), request_id="gone", max_tokens=12, ignore_eos=True)
    if state == "preempted":
        add(scheduler, make_sequence(4, request_id="old", max_tokens=18, ignore_eos=True))
    add(scheduler, sequence)
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 3, "preempted": 0}[state]):
        run_step(scheduler, runner)
    while state == "preempted" and not sequence.num_preemptions:
        run_step(scheduler, runner)
    assert scheduler.abort("gone", now=1.0) is sequence
    assert (sequence.finish_reason, sequence.finished_s) == ("abort", 1.0)
    scheduler.check_integrity()
    scheduler.abort("old", now=1.0)
    assert not scheduler.has_unfinished
    assert scheduler.kv_cache_manager.usage == 0


def test_abort_of_an_unknown_id_is_none() -> None:
    assert make_scheduler().abort("nobody", now=0.0) is None


def test_runner_hears_of_ended_sequences_once_with_the_next_step() -> None:
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    add(scheduler, make_sequence([1], request_id="a", max_tokens=1), make_sequence([2], request_id="b"))
    run_step(scheduler, runner)
    scheduler.abort("b", now=0.0)
    assert scheduler.schedule(0.0).finished_request_ids == []  # nothing to execute, so nobody hears it
    add(scheduler, make_sequence([3], request_id="c", max_tokens=2, ignore_eos=True))
    run_to_end(scheduler, runner)
    assert [step.finished_request_ids for step in runner.steps] == [[], ["a", "b"], []]


def test_failed_step_ends_its_sequences_only_and_caches_nothing_of_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    first = make_sequence(16, request_id="first")
    second = make_sequence(range(50, 58), request_id="second", max_tokens=1)
    add(scheduler, first, second)
    run_step(scheduler, runner)
    scheduler_output = scheduler.schedule(0.0)
    updates = scheduler.update_from_output(
        scheduler_output, ModelRunnerOutput(sampled={}, failed={"first": "lost"}), now=2.0
    )
    assert updates == [(first, [])]
    assert (first.finish_reason, first.error, first.finished_s) == ("error", "lost", 2.0)
    scheduler.check_integrity()
    probe = make_sequence(16, request_id="probe")
    assert scheduler.kv_cache_manager.get_computed_blocks(probe).num_tokens == 8
    run_to_end(scheduler, runner)
    assert second.output_token_ids == fake_generate(second.prompt_token_ids, 1)


def test_a_sequence_that_fails_alone_leaves_the_others_of_its_step() -> None:
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    runner.failing_request_ids = {"bad"}
    bad = make_sequence(9, request_id="bad")
    good = make_sequence(range(50, 59), request_id="good", ignore_eos=True)
    add(scheduler, bad, good)
    run_to_end(scheduler, runner)
    assert (bad.finish_reason, bad.error) == ("error", "the fake sequence is out of memory")
    assert scheduler.kv_cache_manager.get_computed_blocks(make_sequence(9, request_id="p")).num_tokens == 0
    assert good.output_token_ids == fake_generate(good.prompt_token_ids, 8)


def test_output_for_a_sequence_that_ended_meanwhile_is_ignored() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_sequence(4, request_id="a"))
    scheduler_output = scheduler.schedule(0.0)
    scheduler.abort("a", now=0.0)
    assert scheduler.update_from_output(scheduler_output, ModelRunnerOutput(sampled={"a": 1}), now=0.0) == []
    scheduler.check_integrity()


def test_times_are_those_of_scheduling_and_of_the_tokens() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    runner = make_runner(scheduler)
    sequence = make_sequence(6, max_tokens=2, ignore_eos=True)
    add(scheduler, sequence)
    for now in (1.0, 2.0, 3.0):
        run_step(scheduler, runner, now)
    assert (sequence.first_scheduled_s, sequence.first_token_s, sequence.last_token_s) == (1.0, 2.0, 3.0)
    assert sequence.finished_s == 3.0
    assert sequence.num_chunks == 2


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [10, 64])
def test_tokens_do_not_depend_on_chunks_cache_batch_or_preemption(
    chunk: int, enable_prefix_caching: bool, num_blocks: int
) -> None:
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_num_batched_tokens=24,
        long_prefill_token_threshold=chunk,
        enable_prefix_caching=enable_prefix_caching,
    )
    runner = make_runner(scheduler)
    prompts = [[*range(15), *range(100 + i, 100 + 2 * i)] for i in range(8)]
    sequences = [
        make_sequence(prompt, request_id=f"r{i}", max_tokens=11, ignore_eos=True) for i, prompt in enumerate(prompts)
    ]
    add(scheduler, *sequences)
    run_to_end(scheduler, runner)
    for sequence in sequences:
        assert sequence.output_token_ids == fake_generate(sequence.prompt_token_ids, 11)
    if num_blocks == 10:
        assert scheduler.num_preemptions > 0


def test_blocks_that_are_not_finite_are_not_found_and_who_shares_them_computes_again() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    bad = make_sequence(20, request_id="bad")
    sharer = make_sequence([*range(8), 90, 91, 92, 93, 94], request_id="sharer", ignore_eos=True)
    add(scheduler, bad, sharer)
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    runner.failing_request_ids = {"bad"}
    runner.poisoned_block_ids = [0]
    runner.dirty_after_step = [0]
    run_step(scheduler, runner)
    assert (bad.finish_reason, sharer.num_preemptions) == ("error", 1)
    assert scheduler.kv_cache_manager.get_computed_blocks(make_sequence(20, request_id="p")).num_tokens == 0
    run_to_end(scheduler, runner)
    assert sharer.output_token_ids == fake_generate(sharer.prompt_token_ids, 8)


def test_sequence_whose_transfer_failed_is_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=8, num_second_tier_blocks=32)
    runner = make_runner(scheduler)
    for name, prompt in (("first", range(17)), ("flood", range(100, 130))):
        add(scheduler, make_sequence(prompt, request_id=name, max_tokens=1))
        run_to_end(scheduler, runner)
    again = make_sequence(range(17), request_id="again", max_tokens=2, ignore_eos=True)
    add(scheduler, again)
    scheduler_output = scheduler.schedule(0.0)
    assert len(scheduler_output.kv_loads) == 4
    rest = scheduler.recompute_after_failed_transfers(scheduler_output)
    assert rest.scheduled == []
    scheduler.update_from_output(rest, ModelRunnerOutput(sampled={}), 0.0)
    scheduler.check_integrity()
    again_steps = run_to_end(scheduler, runner)
    assert again_steps[0] == {"again": 17}  # what could not be loaded is not tried a second time
    assert again.output_token_ids == fake_generate(range(17), 2)
