"""Decides at arrival whether a request is queued or refused, with a reason and the time after which it may come again.

What cannot be served in time is refused at once: a client that hears so now can go elsewhere, one that hears it after
a minute in the queue cannot. Checked in this order; the first that fails is the reason::

    the prompt fits          into max_input_tokens, the window, the pool      PromptTooLongError, for good
    the output fits          or is clamped to the room left                   OutputTooLongError, for good
    queue_length             max_num_waiting sequences
    queue_tokens             max_num_waiting_tokens prompt tokens
    tenant_queue             max_tenant_waiting_tokens of one tenant
    kv_watermark             share of blocks in use
    deadline                 predicted time to the first token

The predicted time to the first token is that of the prefills before it plus its own: running ones, and the waiting
ones that will go first (higher priority, or earlier due). What the cache has of the prompt need not be computed.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import msgspec

from engine.config import AdmissionConfig, SchedulerConfig
from engine.cost_model import PrefillCostModel
from engine.errors import (
    AdmissionError,
    OutputTooLongError,
    PromptTooLongError,
    QueueFullError,
    RefusalReason,
)
from engine.kv_cache_manager import KVCacheManager
from engine.sequence import Sequence

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
UNKNOWN_RETRY_AFTER_S = 5.0


class Queues(Protocol):
    """What admission looks at of the scheduler."""

    @property
    def waiting(self) -> Iterable[Sequence]: ...
    @property
    def running(self) -> Iterable[Sequence]: ...


class AdmissionController:
    """Checks new sequences against the limits and the state of the queues; refuses by raising."""

    def __init__(
        self,
        config: AdmissionConfig,
        scheduler_config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        cost_model: PrefillCostModel | None,
        *,
        max_model_len: int,
    ) -> None:
        """Without a cost model no time is predicted, and a constant is told as the time to come again."""
        self.config = config
        self.num_refused: Counter[RefusalReason] = Counter()
        self._max_num_waiting = scheduler_config.max_num_waiting
        self._kv_cache_manager = kv_cache_manager
        self._cost_model = cost_model
        self._max_model_len = max_model_len

    def check(self, sequence: Sequence, queues: Queues) -> None:
        """Let a new sequence pass, its ``max_tokens`` reduced to the room left where that is less.

        Raises:
            PromptTooLongError: no output token would fit.
            OutputTooLongError: ``max_tokens`` does not fit, and is to be refused then.
            QueueFullError: too many sequences wait.
            AdmissionError: any other reason to come again later.
        """
        self._check_length(sequence)
        waiting = list(queues.waiting)
        if len(waiting) >= self._max_num_waiting:
            self.num_refused["queue_length"] += 1
            raise QueueFullError(len(waiting), self.retry_after_s(queues))
        config = self.config
        num_new = sequence.num_prompt_tokens
        num_waiting_tokens = sum(other.num_tokens for other in waiting)
        # A prompt longer than the limit may wait alone: else it could never be served.
        if config.max_num_waiting_tokens is not None and waiting:
            self._check_tokens(num_waiting_tokens, num_new, config.max_num_waiting_tokens, "queue_tokens", queues)
        if config.max_tenant_waiting_tokens is not None:
            of_tenant = sum(other.num_tokens for other in waiting if other.tenant_id == sequence.tenant_id)
            if of_tenant:
                self._check_tokens(of_tenant, num_new, config.max_tenant_waiting_tokens, "tenant_queue", queues)
        usage = self._kv_cache_manager.usage
        if config.kv_watermark < 1.0 and usage > config.kv_watermark:
            share = f"{usage:.0%} of the KV blocks are in use, the watermark is {config.kv_watermark:.0%}"
            self._refuse(share, "kv_watermark", self.retry_after_s(queues))
        if config.refuse_missed_deadlines and sequence.deadline_s is not None:
            self._check_deadline(sequence, queues)

    def predict_ttft_s(self, sequence: Sequence, queues: Queues) -> float | None:
        """Predicted time from now to the first token of a new sequence; ``None`` without experience."""
        if self._cost_model is None:
            return None
        cached = self._kv_cache_manager.get_computed_blocks(sequence).num_tokens
        if sequence.remote_prefill is not None:  # what another engine has computed is not computed here
            cached = max(cached, min(sequence.remote_prefill.num_tokens, sequence.num_tokens - 1))
        own_s = self._cost_model.predict_s(sequence.num_tokens - cached, cached)
        if own_s is None:
            return None
        ahead = [
            other
            for other in queues.waiting
            if other.priority > sequence.priority
            or (other.priority == sequence.priority and other.due_s <= sequence.due_s)
        ]
        return own_s + self._prefill_s([*queues.running, *ahead])

    def retry_after_s(self, queues: Queues) -> float:
        """Time to prefill what waits now: when that is done, there is certainly a place."""
        if self._cost_model is None or self._cost_model.coefficients is None:
            return UNKNOWN_RETRY_AFTER_S
        return _bounded(self._prefill_s(queues.waiting))

    def _check_length(self, sequence: Sequence) -> None:
        limit = self._max_model_len
        if sequence.num_prompt_tokens >= limit:
            raise PromptTooLongError(sequence.num_prompt_tokens, limit)
        max_input_tokens = self.config.max_input_tokens
        if max_input_tokens is not None and sequence.num_prompt_tokens > max_input_tokens:
            raise PromptTooLongError(sequence.num_prompt_tokens, max_input_tokens, is_input_limit=True)
        room, asked = limit - sequence.num_prompt_tokens, sequence.sampling.max_tokens
        if asked > room:
            if self.config.max_tokens_overflow == "refuse":
                raise OutputTooLongError(asked, room)
            sequence.max_tokens_asked = asked
            min_tokens = min(sequence.sampling.min_tokens, room)
            sequence.sampling = msgspec.structs.replace(sequence.sampling, max_tokens=room, min_tokens=min_tokens)

    def _check_tokens(
        self, num_waiting_tokens: int, num_new_tokens: int, limit: int, reason: RefusalReason, queues: Queues
    ) -> None:
        if num_waiting_tokens + num_new_tokens > limit:
            whose = "of this tenant " if reason == "tenant_queue" else ""
            text = (
                f"{num_waiting_tokens} prompt tokens {whose}wait already, "
                f"{num_new_tokens} more would pass the limit of {limit}"
            )
            self._refuse(text, reason, self.retry_after_s(queues))

    def _check_deadline(self, sequence: Sequence, queues: Queues) -> None:
        assert sequence.deadline_s is not None, f"{sequence.request_id} has no deadline"
        predicted_s = self.predict_ttft_s(sequence, queues)
        allowed_s = sequence.deadline_s - sequence.arrival_s
        if predicted_s is not None and predicted_s > allowed_s:
            text = (
                f"the first token is expected in {predicted_s * 1e3:.0f} ms, the deadline is {allowed_s * 1e3:.0f} ms"
            )
            self._refuse(text, "deadline", _bounded(predicted_s - allowed_s))

    def _prefill_s(self, sequences: Iterable[Sequence]) -> float:
        assert self._cost_model is not None, "only asked with a cost model"
        return sum(
            self._cost_model.predict_s(sequence.num_uncomputed_tokens, sequence.num_computed_tokens) or 0.0
            for sequence in sequences
            if not sequence.is_decoding
        )

    def _refuse(self, text: str, reason: RefusalReason, retry_after_s: float) -> None:
        self.num_refused[reason] += 1
        raise AdmissionError(text, reason=reason, retry_after_s=retry_after_s)


def _bounded(seconds: float) -> float:
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, seconds))
