"""Decides which tokens the next step computes: phase-free, under one token budget.

Every sequence has tokens it knows and tokens that are computed; a step lets the second number catch up with the first.
A decode is one token behind, a prompt is many, a prompt after a prefix hit is fewer, a chunk is as many as the budget
gives, and a preempted sequence is all behind again. Budget 32, chunks of at most 20 (D decodes, P has 50 tokens, Q 9)::

    step   D   P    Q    tokens
    1      1   20   9    30      Q fits beside the chunk, as P may not take the whole budget
    2      1   20   1    22      Q has its first token already and decodes
    3      1   10   1    12      the end of P: its first token

Order within a step: running sequences that decode, then running prefills and waiting ones as the policy ranks them
(``engine.policies``). Never more sequences run than the budget has tokens, so each stream always finds its own. When a
running sequence gets no block, the youngest of the lowest priority gives back all its own and queues again in front;
the oldest of the highest thus always advances, and the engine with it. A sequence is admitted only if all its known
tokens fit beside what the running ones still need, so preemption is left for what nobody knows: how long outputs get.
One that needs a block which a running sequence is about to compute waits for it: equal prompts are computed once.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from engine.admission import AdmissionController
from engine.config import AdmissionConfig, SchedulerConfig
from engine.cost_model import PrefillCostModel
from engine.fairness import TenantAccounts
from engine.kv_cache_manager import ComputedBlocks, KVCacheManager
from engine.outputs import FinishReason
from engine.policies import StepBudget, make_policy
from engine.scheduler_output import ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence, SequenceStatus

MAX_PREFIX_WAITS = 32
"""Steps without progress after which a sequence does not wait for another one's prefix any longer."""


class SequenceUpdate(NamedTuple):
    """What a step did to one sequence: it has new tokens, or it has just ended, or both."""

    sequence: Sequence
    new_token_ids: list[int]


class Scheduler:
    """Queues, admits, advances, preempts and ends sequences. Times are passed in, so that a trace can simulate them."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        cost_model: PrefillCostModel | None = None,
        admission: AdmissionConfig | None = None,
    ) -> None:
        """Build an empty scheduler.

        Args:
            config: policy, budget and limits.
            kv_cache_manager: used by this scheduler alone.
            max_model_len: the model's window; smaller where the whole block pool holds fewer tokens.
            eos_token_ids: ids that end any output, unless ``ignore_eos``.
            cost_model: predicts times for admission, deadlines and the decode gap; without it none is predicted.
            admission: what is refused at once.
        """
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.max_model_len = min(max_model_len, kv_cache_manager.max_num_tokens)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.policy = make_policy(config, cost_model=cost_model, block_size=kv_cache_manager.block_size)
        self.admission = AdmissionController(
            admission or AdmissionConfig(),
            config,
            kv_cache_manager,
            cost_model,
            max_model_len=self.max_model_len,
        )
        self.accounts = TenantAccounts()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of admission, oldest first."""
        self.num_preemptions = 0
        self.num_waits_for_prefix = 0
        """Times a sequence was passed over in a step because a running one was computing its prefix."""
        self._sequences: dict[str, Sequence] = {}
        self._finished_request_ids: list[str] = []
        self._expired: list[SequenceUpdate] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def get(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of this id."""
        return self._sequences.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            ValueError: the id is in use, or the cache salt is empty.
            PromptTooLongError: no output token would fit into the window or into the whole block pool.
            OutputTooLongError: ``max_tokens`` would not, and is not to be reduced.
            AdmissionError: it cannot be served now, see ``engine.admission``.
        """
        if sequence.request_id in self._sequences:
            raise ValueError(f"request_id {sequence.request_id!r} is in use by an unfinished sequence")
        if not sequence.cache_salt:
            raise ValueError("cache_salt must not be empty: it keeps the prefix caches of tenants apart")
        sequence.due_s = self.policy.due_s(sequence)
        self.admission.check(sequence, self)
        self._sequences[sequence.request_id] = sequence
        self.waiting.append(sequence)
        self.accounts.enter(sequence.tenant_id)

    def abort(self, request_id: str, now: float) -> Sequence | None:
        """End a sequence in whatever state it is; ``None`` if there is no such one (it may just have ended)."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort", now)
        return sequence

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """End an unfinished sequence and take back its blocks and its place."""
        assert not sequence.is_finished, f"{sequence.request_id} ends twice"
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.kv_cache_manager.free(sequence)
        self.kv_cache_manager.received_blocks.forget(sequence.request_id)
        self.accounts.leave(sequence.tenant_id)
        del self._sequences[sequence.request_id]
        self._finished_request_ids.append(sequence.request_id)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.error = error
        sequence.finished_s = now

    def stop(self, sequence: Sequence, stop_string: str, now: float) -> None:
        """End a sequence whose text has reached a stop string, be it with the very token that ended it anyway."""
        if sequence.is_finished:
            sequence.finish_reason = "stop"
            sequence.stop_reason = stop_string
        else:
            self.finish(sequence, "stop", now, stop_reason=stop_string)

    def schedule(self, now: float) -> SchedulerOutput:
        """Choose the tokens of the next step and give them blocks. Nothing counts as computed before ``update``.

        Never empty while a sequence is unfinished, but where all of them wait for blocks that others hold: those of
        another engine, or those that an offer to one keeps. What has missed its deadline ends here, see
        ``take_expired``.
        """
        self._expire(now)
        num_new_tokens: dict[Sequence, int] = {}
        budget = self.policy.step_budget()
        self._schedule_decodes(num_new_tokens, budget)
        self._schedule_prefills(num_new_tokens, budget, now)
        if not num_new_tokens:
            return SchedulerOutput(scheduled=[])
        finished_request_ids, self._finished_request_ids = self._finished_request_ids, []
        kv_stores, kv_loads = self.kv_cache_manager.take_transfers()
        kv_receives = self.kv_cache_manager.received_blocks.take_receives()
        return SchedulerOutput(
            scheduled=[self._scheduled(sequence, count) for sequence, count in num_new_tokens.items()],
            finished_request_ids=finished_request_ids,
            kv_stores=kv_stores,
            kv_loads=kv_loads,
            kv_receives=kv_receives,
        )

    def take_expired(self) -> list[SequenceUpdate]:
        """Sequences that ended since the last call because nothing of them was scheduled before their deadline."""
        expired, self._expired = self._expired, []
        return expired

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput, now: float
    ) -> list[SequenceUpdate]:
        """Take in an executed step: computed tokens, cached blocks, sampled tokens, ends.

        Returns:
            Whatever a caller has to hear about, in scheduled order; a chunk in the middle of a prompt is nothing.
        """
        updates = []
        self.kv_cache_manager.end_step()
        if runner_output.poisoned_block_ids:
            self._contain(runner_output)
        for scheduled in scheduler_output.scheduled:
            sequence = self._sequences.get(scheduled.request_id)
            if sequence is None or sequence.status is not SequenceStatus.RUNNING:
                continue  # ended while the step was running, or has to be computed again
            error = runner_output.failed.get(scheduled.request_id)
            if error is not None:
                self.finish(sequence, "error", now, error=error)
                updates.append(SequenceUpdate(sequence, []))
                continue
            if sequence.num_computed_tokens < sequence.num_prompt_tokens:
                sequence.num_chunks += 1
            sequence.num_computed_tokens += scheduled.num_new_tokens
            self.accounts.charge(sequence.tenant_id, scheduled.num_new_tokens)
            self.kv_cache_manager.cache_blocks(sequence)
            if scheduled.needs_sample:
                token_id = runner_output.sampled[scheduled.request_id]
                sequence.append_token(token_id, now)
                self._finish_if_done(sequence, now)
                updates.append(SequenceUpdate(sequence, [token_id]))
        return updates

    def recompute_after_failed_transfers(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Take in that the transfers of a step may not have been made: what relies on them is computed anew, later.

        Returns:
            The same step without its transfers and without those sequences; it may be empty.
        """
        self.kv_cache_manager.fail_step([*scheduler_output.kv_stores, *scheduler_output.kv_loads])
        loaded = {load.block_id for load in scheduler_output.kv_loads}
        loaded |= {receive.block_id for receive in scheduler_output.kv_receives}
        scheduled = []
        for part in scheduler_output.scheduled:
            if loaded.isdisjoint(part.block_ids):
                scheduled.append(part)
            elif (sequence := self._sequences.get(part.request_id)) is not None:
                self._preempt(sequence)
        return SchedulerOutput(scheduled=scheduled, finished_request_ids=scheduler_output.finished_request_ids)

    def _expire(self, now: float) -> None:
        late = [
            sequence
            for sequence in self.waiting
            if sequence.deadline_s is not None and sequence.deadline_s < now and sequence.first_scheduled_s is None
        ]
        for sequence in late:
            assert sequence.deadline_s is not None, f"{sequence.request_id} is late without a deadline"
            sequence.is_expired = True
            allowed_ms = (sequence.deadline_s - sequence.arrival_s) * 1e3
            self.finish(sequence, "error", now, error=f"the deadline of {allowed_ms:.0f} ms passed in the queue")
            self._expired.append(SequenceUpdate(sequence, []))

    def _schedule_decodes(self, num_new_tokens: dict[Sequence, int], budget: StepBudget) -> None:
        """Give every stream its token; a prefill takes what is left, but a stream must not pause."""
        for sequence in list(self.running):
            # One may have been preempted for the sake of one before it.
            if sequence.is_decoding and sequence.status is SequenceStatus.RUNNING:
                assert budget.num_tokens > 0, f"{len(self.running)} sequences run, more than a step has tokens"
                if self._grow(sequence, 1, num_new_tokens, budget):
                    budget.add_decode()

    def _schedule_prefills(self, num_new_tokens: dict[Sequence, int], budget: StepBudget, now: float) -> None:
        """Offer the rest of the step to running prefills and waiting sequences, in the policy's order.

        The first waiting one that finds no blocks ends admission: it must not be overtaken until it starves.
        """
        manager = self.kv_cache_manager
        prefills = [sequence for sequence in self.running if not sequence.is_decoding]
        can_admit = len(self.running) < self.policy.max_num_running
        waiting = [sequence for sequence in self.waiting if not sequence.awaits_kv] if can_admit else []
        candidates = self.policy.order(prefills, waiting, self.accounts, now)
        # What running prefills still need is theirs; one more block each keeps a new one from being preempted at once.
        num_reserved_blocks: int | None = None
        was_running = set(prefills)
        for sequence in candidates:
            if budget.num_tokens <= 0:
                break
            if sequence in was_running:
                if sequence.status is SequenceStatus.RUNNING:  # else preempted for the sake of one before it
                    context = sequence.num_computed_tokens
                    count = self.policy.num_chunk_tokens(sequence.num_uncomputed_tokens, context, budget)
                    if count > 0 and self._grow(sequence, count, num_new_tokens, budget):
                        budget.add_prefill(count, context)
                continue
            if not can_admit:
                continue
            if num_reserved_blocks is None:
                num_reserved_blocks = sum(manager.num_missing_blocks(other) + 1 for other in self.running)
            computed = manager.get_computed_blocks(sequence)
            if manager.is_promised(sequence, computed) and self._may_wait(sequence, computed.num_tokens):
                self.num_waits_for_prefix += 1
                continue
            num_uncomputed = sequence.num_tokens - computed.num_tokens
            count = self.policy.num_chunk_tokens(num_uncomputed, computed.num_tokens, budget)
            if count <= 0 or not manager.can_fit(sequence, computed, num_reserved_blocks):
                can_admit = False
                continue
            new_blocks = manager.allocate_slots(sequence, count, computed)
            assert new_blocks is not None, f"{sequence.request_id} fits, but gets no blocks"
            self._admit(sequence, computed, now)
            num_new_tokens[sequence] = count
            budget.add_prefill(count, computed.num_tokens)
            num_reserved_blocks += manager.num_missing_blocks(sequence) + 1
            can_admit = len(self.running) < self.policy.max_num_running

    def _may_wait(self, sequence: Sequence, num_computed_tokens: int) -> bool:
        """Whether to wait for a prefix any longer: the one that computes it may itself stand behind others."""
        if sequence.awaited_num_tokens != num_computed_tokens:
            sequence.awaited_num_tokens = num_computed_tokens
            sequence.num_prefix_waits = 0
        sequence.num_prefix_waits += 1
        return sequence.num_prefix_waits <= MAX_PREFIX_WAITS

    def _grow(self, sequence: Sequence, count: int, num_new_tokens: dict[Sequence, int], budget: StepBudget) -> bool:
        """Plan ``count`` tokens of a running sequence, preempting others for its blocks; False if it was itself."""
        while self.kv_cache_manager.allocate_slots(sequence, count) is None:
            lowest = min(other.priority for other in self.running)
            victim = next(other for other in reversed(self.running) if other.priority == lowest)
            budget.give_back(num_new_tokens.pop(victim, 0))
            self._preempt(victim)
            if victim is sequence:
                return False
        num_new_tokens[sequence] = count
        return True

    def _admit(self, sequence: Sequence, computed: ComputedBlocks, now: float) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = computed.num_tokens
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now
            sequence.num_transferred_tokens = len(computed.received) * self.kv_cache_manager.block_size
            sequence.num_cached_tokens = computed.num_tokens - sequence.num_transferred_tokens

    def _contain(self, runner_output: ModelRunnerOutput) -> None:
        """Values that were not finite reached some blocks: forget these, and compute anew who relies on them."""
        for request_id in sorted(self.kv_cache_manager.drop_blocks(runner_output.poisoned_block_ids)):
            if request_id not in runner_output.failed:
                self._preempt(self._sequences[request_id])

    def _preempt(self, sequence: Sequence) -> None:
        """Take back all blocks; the sequence computes its tokens again later, or finds them still cached."""
        self.running.remove(sequence)
        self.kv_cache_manager.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _scheduled(self, sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        end = start + num_new_tokens
        return ScheduledSequence(
            request_id=sequence.request_id,
            token_ids=sequence.token_ids[start:end],
            start=start,
            block_ids=self.kv_cache_manager.block_ids(sequence.request_id),
            sampling=sequence.sampling,
            needs_sample=end == sequence.num_tokens,
            num_output_tokens=sequence.num_output_tokens,
            known_token_ids=sequence.token_ids,
        )

    def _finish_if_done(self, sequence: Sequence, now: float) -> None:
        token_id = sequence.token_ids[-1]
        sampling = sequence.sampling
        if token_id in self.eos_token_ids and not sampling.ignore_eos:
            self.finish(sequence, "stop", now)
        elif token_id in sampling.stop_token_ids:
            self.finish(sequence, "stop", now, stop_reason=token_id)
        elif sequence.num_output_tokens >= sampling.max_tokens or sequence.num_tokens >= self.max_model_len:
            self.finish(sequence, "length", now)

    def check_integrity(self) -> None:
        """Assert that queues, sequences, block tables and pool add up. Call it between steps."""
        known = [*self.running, *self.waiting]
        assert len(known) == len(self._sequences), f"{len(known)} sequences queue, {len(self._sequences)} are known"
        for sequence in known:
            assert self._sequences.get(sequence.request_id) is sequence, f"{sequence.request_id} is not known"
            sequence.check_integrity()
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING, f"{sequence.request_id} runs as {sequence.status}"
            assert not sequence.awaits_kv, f"{sequence.request_id} runs while its blocks are on the way"
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING, f"{sequence.request_id} waits as {sequence.status}"
            assert sequence.num_computed_tokens == 0, f"{sequence.request_id} waits with computed tokens"
        max_num_running = self.policy.max_num_running
        assert len(self.running) <= max_num_running, f"{len(self.running)} sequences run, {max_num_running} may"
        self.kv_cache_manager.check_integrity(self.running)
