"""Random operations on a scheduler with a tiny block pool: nothing leaks, nothing is shared wrongly, all ends.

The fake model reads its past from the paged memory that the block tables point to, so a block that is shared with the
wrong prefix or tenant, found before it is computed, or overwritten while in use changes the tokens of some sequence.
"""

import random
from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from factories_engine import EOS_TOKEN_ID, FakeModelRunner, fake_next_token, make_scheduler, make_sequence, run_step
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import PromptTooLongError, QueueFullError
from engine.scheduler import Scheduler
from engine.scheduler_output import ModelRunnerOutput
from engine.sequence import Sequence

SALTS = ("acme", "globex", "initech")


def prompt_of(family: int, num_shared: int, tail: SequenceOf[int]) -> list[int]:
    """Prompts of one family share their head."""
    return [(family * 50 + i) % 250 for i in range(num_shared)] + list(tail)


class Driver:
    """A scheduler with its fake model, and what must hold whatever is done with it."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        budget: int,
        chunk: int,
        num_seqs: int,
        policy: str = "token_budget",
        num_second_tier_blocks: int = 0,
        public: SequenceOf[int] = (),
    ) -> None:
        self.scheduler: Scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=chunk,
            max_num_seqs=num_seqs,
            max_num_waiting=6,
            max_model_len=48,
            eos_token_ids=[EOS_TOKEN_ID],
            policy=policy,
            fixed_count=num_seqs,
            num_second_tier_blocks=num_second_tier_blocks,
            public_prefixes=[public] if public else (),
            ageing_ms_per_token=1.0,
        )
        self.public = list(public)
        self.now = 0.0
        self.runner = FakeModelRunner(num_blocks, block_size)
        self.live: dict[str, Sequence] = {}
        self.num_added = 0
        self.seen: Counter[str] = Counter()
        self._salts_of_head: dict[tuple[int, ...], set[str]] = {}

    def add(
        self,
        prompt: list[int],
        salt: str,
        max_tokens: int,
        ignore_eos: bool,
        priority: int = 0,
        patience_s: float | None = None,
    ) -> None:
        request_id = f"r{self.num_added}"
        self.num_added += 1
        sequence = make_sequence(
            prompt,
            request_id=request_id,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            cache_salt=salt,
            arrival_s=self.now,
            priority=priority,
            deadline_s=None if patience_s is None else self.now + patience_s,
        )
        try:
            self.scheduler.add(sequence)
        except PromptTooLongError:
            assert len(prompt) >= self.scheduler.max_model_len
            self.seen["too long"] += 1
        except QueueFullError:
            assert len(self.scheduler.waiting) >= 6  # preempted ones queue on top
            self.seen["queue full"] += 1
        else:
            self.live[request_id] = sequence
        self.scheduler.check_integrity()

    def step(self) -> None:
        had_work = self.scheduler.has_unfinished
        self.now += 0.01
        computed = run_step(self.scheduler, self.runner, self.now)
        for sequence, _ in self.scheduler.take_expired():
            assert sequence.deadline_s is not None
            assert sequence.deadline_s < self.now
            self.seen["expired"] += 1
            had_work = had_work and bool(computed)
        assert bool(computed) == had_work, "a step is empty exactly when there is nothing to do"
        config = self.scheduler.config
        if config.policy == "token_budget":
            assert sum(computed.values()) <= config.max_num_batched_tokens
        if computed:
            decoding = [s for s in self.runner.steps[-1].scheduled if s.num_output_tokens and s.num_new_tokens == 1]
            self.seen["decode"] += len(decoding)
            self.check_no_decode_was_left_out()
        for request_id in computed:
            self.note_hit(self.live[request_id])
        self.collect()

    def fail_step(self) -> None:
        scheduled = self.scheduler.schedule(self.now)
        self.seen["expired"] += len(self.scheduler.take_expired())
        if not scheduled.scheduled:
            self.collect()
            return
        self.runner.fail_next_step = True
        with pytest.raises(RuntimeError):
            self.runner.execute(scheduled)
        rest = self.scheduler.recompute_after_failed_transfers(scheduled)
        failed = {part.request_id: "lost" for part in rest.scheduled}
        updates = self.scheduler.update_from_output(rest, ModelRunnerOutput(sampled={}, failed=failed), self.now)
        assert [update.sequence.request_id for update in updates] == list(failed)
        self.seen["failed"] += len(updates)
        self.scheduler.check_integrity()
        self.collect()

    def poison(self, rng: random.Random) -> None:
        """One running sequence fails with values that are not finite in some of its blocks."""
        if not self.scheduler.running:
            return
        victim = rng.choice(self.scheduler.running)
        block_ids = self.scheduler.kv_cache_manager.block_ids(victim.request_id)
        self.runner.failing_request_ids = {victim.request_id}
        self.runner.poisoned_block_ids = rng.sample(block_ids, rng.randint(1, len(block_ids)))
        self.runner.dirty_after_step = list(self.runner.poisoned_block_ids)
        self.seen["poisoned"] += 1
        self.step()
        self.runner.failing_request_ids = set()
        self.runner.poisoned_block_ids = []

    def abort(self, request_id: str) -> None:
        assert self.scheduler.abort(request_id, 0.0) is self.live[request_id]
        self.seen["aborted"] += 1
        self.scheduler.check_integrity()
        self.collect()

    def check_no_decode_was_left_out(self) -> None:
        scheduled = {s.request_id for s in self.runner.steps[-1].scheduled}
        for sequence in self.scheduler.running:
            # What runs on and did not take part can only be a prefill for which no budget was left.
            assert sequence.request_id in scheduled or not sequence.is_decoding

    def note_hit(self, sequence: Sequence) -> None:
        """Whoever hits the cache must share the hit tokens with an earlier sequence of the same tenant."""
        if sequence.num_cached_tokens:
            head = tuple(sequence.prompt_token_ids[: sequence.num_cached_tokens])
            if list(head) == self.public[: len(head)]:
                self.seen["public hit"] += sequence.cache_salt not in self._salts_of_head.get(head, set())
            else:
                assert sequence.cache_salt in self._salts_of_head.get(head, set()), "a hit across tenants"
            self.seen["hit"] += 1
        for end in range(1, sequence.num_tokens + 1):
            self._salts_of_head.setdefault(tuple(sequence.token_ids[:end]), set()).add(sequence.cache_salt)

    def collect(self) -> None:
        """Check the tokens of all sequences, and let go of those that have ended."""
        for request_id, sequence in list(self.live.items()):
            if sequence.is_finished:
                self.check_end(sequence)
                self.seen["preempted"] += sequence.num_preemptions
                del self.live[request_id]

    def check_end(self, sequence: Sequence) -> None:
        for index in range(sequence.num_prompt_tokens, sequence.num_tokens):
            assert sequence.token_ids[index] == fake_next_token(sequence.token_ids[:index]), (
                f"{sequence.request_id}: token {index} is not what a run without a cache gives"
            )
        is_eos = sequence.token_ids[-1] == EOS_TOKEN_ID and not sequence.sampling.ignore_eos
        if sequence.finish_reason == "length":
            assert not is_eos
            is_full = sequence.num_tokens == self.scheduler.max_model_len
            assert is_full or sequence.num_output_tokens == sequence.sampling.max_tokens
        elif sequence.finish_reason == "stop":
            assert is_eos

    def drain(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.live, f"unfinished: {sorted(self.live)}"
        assert self.scheduler.kv_cache_manager.usage == 0
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        self.scheduler.check_integrity()


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(2, 24),
        chunk=st.integers(0, 9),
        num_seqs=st.integers(1, 5),
        policy=st.sampled_from(["token_budget", "fixed_count", "length_bucket"]),
        num_second_tier_blocks=st.sampled_from([0, 0, 3, 12]),
        num_public=st.sampled_from([0, 0, 6, 12]),
    )
    def start(self, num_public: int, **options: Any) -> None:
        self.driver = Driver(public=prompt_of(0, num_public, ()), **options)

    @rule(
        family=st.integers(0, 1),
        num_shared=st.integers(0, 20),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=4),
        salt=st.sampled_from(SALTS),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
        patience_s=st.sampled_from([None, None, 0.05]),
    )
    def add(self, family: int, num_shared: int, tail: list[int], salt: str, **options: Any) -> None:
        self.driver.add(prompt_of(family, num_shared, tail), salt, **options)

    @rule()
    def step(self) -> None:
        self.driver.step()

    @rule(count=st.integers(2, 6))
    def some_steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.live))))

    @rule()
    def fail_step(self) -> None:
        self.driver.fail_step()

    @rule(seed=st.integers(0, 1000))
    def poison(self, seed: int) -> None:
        self.driver.poison(random.Random(seed))

    @rule()
    def reset(self) -> None:
        manager = self.driver.scheduler.kv_cache_manager
        assert manager.reset_prefix_cache() == (not self.driver.scheduler.running)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def random_operations(seed: int, num_operations: int) -> Counter[str]:
    """A long life of one scheduler under pressure; returns how often what happened."""
    rng = random.Random(seed)
    driver = Driver(
        num_blocks=rng.randint(6, 16),
        block_size=rng.choice([2, 4]),
        budget=rng.randint(8, 32),
        chunk=rng.choice([0, 3, 6]),
        num_seqs=rng.randint(3, 6),
        policy=("token_budget", "token_budget", "fixed_count", "length_bucket")[seed % 4],
        num_second_tier_blocks=rng.choice([0, 4, 16]),
        public=prompt_of(0, 12, ()) if seed % 2 == 0 else (),
    )
    for _ in range(num_operations):
        choice = rng.random()
        if choice < 0.3:
            tail = [rng.randrange(4) for _ in range(rng.randint(1, 4))]
            prompt = prompt_of(rng.randrange(2), rng.choice([0, 4, 8, 12, 16]), tail)
            patience_s = 0.1 if rng.random() < 0.1 else None
            driver.add(
                prompt, rng.choice(SALTS), rng.randint(1, 14), rng.random() < 0.5, rng.randint(-1, 1), patience_s
            )
        elif choice < 0.36 and driver.live:
            driver.abort(rng.choice(sorted(driver.live)))
        elif choice < 0.365:
            driver.fail_step()
        elif choice < 0.37:
            driver.poison(rng)
        else:
            driver.step()
    driver.drain()
    driver.seen["loaded"] += sum(len(step.kv_loads) for step in driver.runner.steps)
    return driver.seen


def test_thousands_of_random_operations_keep_every_token_right() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        seen += random_operations(seed, 2000)
    # The run is only worth something if all of it happened.
    happened = ("decode", "hit", "preempted", "aborted", "failed", "queue full", "too long")
    for what in (*happened, "expired", "poisoned", "loaded", "public hit"):
        assert seen[what] >= 10, f"{what} happened {seen[what]} times: {seen}"
