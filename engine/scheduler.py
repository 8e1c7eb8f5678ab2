"""Decides which tokens the next step computes: phase-free, under one token budget.

Every sequence has tokens it knows and tokens that are computed; a step lets the second number catch up with the first.
A decode is one token behind, a prompt is many, a prompt after a prefix hit is fewer, a chunk is as many as the budget
gives, and a preempted sequence is all behind again. Budget 32, chunks of at most 20 (D decodes, P has 50 tokens, Q 9)::

    step   D   P    Q    tokens
    1      1   20   9    30      Q fits beside the chunk, as P may not take the whole budget
    2      1   20   1    22      Q has its first token already and decodes
    3      1   10   1    12      the end of P: its first token

Order within a step: running sequences that decode, running prefills, then waiting ones in order of arrival. A waiting
one is admitted only to what the running ones leave of the budget, so each of those always finds its token. When a
running sequence gets no block, the youngest one gives back all its own and queues again in front; the oldest thus
always advances, and the engine with it. A sequence is admitted only if all its known tokens fit beside what the running
ones still need, so preemption is left for what nobody knows: how long outputs get.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from engine.config import SchedulerConfig
from engine.cost_model import PrefillCostModel
from engine.errors import PromptTooLongError, QueueFullError
from engine.kv_cache_manager import KVCacheManager
from engine.outputs import FinishReason
from engine.scheduler_output import ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence, SequenceStatus

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
UNKNOWN_RETRY_AFTER_S = 5.0


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
    ) -> None:
        """Build an empty scheduler.

        Args:
            config: budget and limits.
            kv_cache_manager: used by this scheduler alone.
            max_model_len: the model's window; smaller where the whole block pool holds fewer tokens.
            eos_token_ids: ids that end any output, unless ``ignore_eos``.
            cost_model: estimates when a refused request may come again; without it a constant is told.
        """
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.max_model_len = min(max_model_len, kv_cache_manager.max_num_tokens)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.cost_model = cost_model
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of admission, oldest first."""
        self.num_preemptions = 0
        self._max_chunk_tokens = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._sequences: dict[str, Sequence] = {}
        self._finished_request_ids: list[str] = []

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
            QueueFullError: ``max_num_waiting`` sequences wait already.
        """
        if sequence.request_id in self._sequences:
            raise ValueError(f"request_id {sequence.request_id!r} is in use by an unfinished sequence")
        if not sequence.cache_salt:
            raise ValueError("cache_salt must not be empty: it keeps the prefix caches of tenants apart")
        if sequence.num_prompt_tokens >= self.max_model_len:
            raise PromptTooLongError(sequence.num_prompt_tokens, self.max_model_len)
        if len(self.waiting) >= self.config.max_num_waiting:
            raise QueueFullError(len(self.waiting), self._retry_after_s())
        self._sequences[sequence.request_id] = sequence
        self.waiting.append(sequence)

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

        Never empty while a sequence is unfinished.
        """
        num_new_tokens: dict[Sequence, int] = {}
        token_budget = self._schedule_running(num_new_tokens)
        self._admit_waiting(num_new_tokens, token_budget, now)
        if not num_new_tokens:
            return SchedulerOutput(scheduled=[])
        finished_request_ids, self._finished_request_ids = self._finished_request_ids, []
        return SchedulerOutput(
            scheduled=[self._scheduled(sequence, count) for sequence, count in num_new_tokens.items()],
            finished_request_ids=finished_request_ids,
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput, now: float
    ) -> list[SequenceUpdate]:
        """Take in an executed step: computed tokens, cached blocks, sampled tokens, ends.

        Returns:
            Whatever a caller has to hear about, in scheduled order; a chunk in the middle of a prompt is nothing.
        """
        updates = []
        for scheduled in scheduler_output.scheduled:
            sequence = self._sequences.get(scheduled.request_id)
            if sequence is None:
                continue  # ended while the step was running
            error = runner_output.failed.get(scheduled.request_id)
            if error is not None:
                self.finish(sequence, "error", now, error=error)
                updates.append(SequenceUpdate(sequence, []))
                continue
            if sequence.num_computed_tokens < sequence.num_prompt_tokens:
                sequence.num_chunks += 1
            sequence.num_computed_tokens += scheduled.num_new_tokens
            self.kv_cache_manager.cache_blocks(sequence)
            if scheduled.needs_sample:
                token_id = runner_output.sampled[scheduled.request_id]
                sequence.append_token(token_id, now)
                self._finish_if_done(sequence, now)
                updates.append(SequenceUpdate(sequence, [token_id]))
        return updates

    def fail(self, scheduler_output: SchedulerOutput, error: str, now: float) -> list[SequenceUpdate]:
        """Take in a step that could not be executed: its sequences end with an error, all others stay as they are."""
        failed = []
        for scheduled in scheduler_output.scheduled:
            sequence = self._sequences.get(scheduled.request_id)
            if sequence is not None:
                self.finish(sequence, "error", now, error=error)
                failed.append(SequenceUpdate(sequence, []))
        # The runner may not have come to these.
        self._finished_request_ids[:0] = scheduler_output.finished_request_ids
        return failed

    def _schedule_running(self, num_new_tokens: dict[Sequence, int]) -> int:
        """Fill in the running sequences; returns the budget that is left."""
        token_budget = self.config.max_num_batched_tokens
        # Decodes first: a prefill takes what it gets, a stream must not pause. The sort is stable.
        for sequence in sorted(self.running, key=lambda sequence: not sequence.is_decoding):
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for the sake of one before it
            count = min(sequence.num_uncomputed_tokens, self._max_chunk_tokens, token_budget)
            if count == 0:
                break
            while self.kv_cache_manager.allocate_slots(sequence, count) is None:
                victim = self.running[-1]
                token_budget += num_new_tokens.pop(victim, 0)
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                num_new_tokens[sequence] = count
                token_budget -= count
        return token_budget

    def _admit_waiting(self, num_new_tokens: dict[Sequence, int], token_budget: int, now: float) -> None:
        """Admit waiting sequences in order while budget, places and blocks last.

        One that was preempted in this step is in front and needs more blocks than it has set free for others.
        """
        if not self.waiting:
            return
        manager = self.kv_cache_manager
        # What running prefills still need is theirs; one more block each keeps a new one from being preempted at once.
        num_reserved_blocks = sum(manager.num_missing_blocks(sequence) + 1 for sequence in self.running)
        while self.waiting and token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            computed = manager.get_computed_blocks(sequence)
            if not manager.can_fit(sequence, computed, num_reserved_blocks):
                break
            count = min(sequence.num_tokens - computed.num_tokens, self._max_chunk_tokens, token_budget)
            new_blocks = manager.allocate_slots(sequence, count, computed)
            assert new_blocks is not None, f"{sequence.request_id} fits, but gets no blocks"
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            sequence.num_computed_tokens = computed.num_tokens
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
                sequence.num_cached_tokens = computed.num_tokens
            num_new_tokens[sequence] = count
            token_budget -= count
            num_reserved_blocks += manager.num_missing_blocks(sequence) + 1

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

    def _retry_after_s(self) -> float:
        """Time to prefill what waits now: when that is done, there is certainly a place."""
        total_s = 0.0
        for sequence in self.waiting:
            predicted_s = self.cost_model.predict_s(sequence.num_tokens, 0) if self.cost_model else None
            if predicted_s is None:
                return UNKNOWN_RETRY_AFTER_S
            total_s += predicted_s
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, total_s))

    def check_integrity(self) -> None:
        """Assert that queues, sequences, block tables and pool add up. Call it between steps."""
        known = [*self.running, *self.waiting]
        assert len(known) == len(self._sequences), f"{len(known)} sequences queue, {len(self._sequences)} are known"
        for sequence in known:
            assert self._sequences.get(sequence.request_id) is sequence, f"{sequence.request_id} is not known"
            sequence.check_integrity()
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING, f"{sequence.request_id} runs as {sequence.status}"
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING, f"{sequence.request_id} waits as {sequence.status}"
            assert sequence.num_computed_tokens == 0, f"{sequence.request_id} waits with computed tokens"
        max_num_running = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        assert len(self.running) <= max_num_running, f"{len(self.running)} sequences run, {max_num_running} may"
        self.kv_cache_manager.check_integrity(self.running)
