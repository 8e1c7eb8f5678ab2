"""The three ways to fill a step, behind one interface.

The scheduler serves decodes first under every policy; a policy says how large a step may be, in which order running
prefills and waiting sequences are offered the rest, and how much of it each one takes.

``token_budget``  A step has a budget of tokens; prompts are cut into chunks that fill it. Candidates are ordered by

    1. preempted ones, which had a place already
    2. priority, lifted by one for every ``priority_ageing_s`` of waiting, at most to the highest there is
    3. tokens served to the tenant, fewest first
    4. pressure: time waited over the patience of the prompt, which is ``ageing_ms_per_token`` for every token of it,
       or the time to its last useful start where a deadline makes that shorter

  So a prompt that is ten times as long is expected to wait ten times as long, whatever the load is (highest response
  ratio next): a short one overtakes a long one soon after it comes, also one that is running, while everybody's
  pressure grows without end, so nobody starves. Patience 2 ms a token, a step a second, L has 6,000 tokens, S 100::

    time   L waited / 12 s   S waited / 0.2 s
       3        0.25             0              S comes
       4        0.33             5              S is served, L goes on

``fixed_count``  The baseline that many start from: up to so many sequences at once, in order of arrival, whole prompts.
  A step is as long as its prompts are, and the streams of all others stand still meanwhile.

``length_bucket``  Whole prompts of one length bucket together (short, medium, long, very long), in turn of the one that
  has waited longest; as many as the token budget holds, at least one.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from engine.config import PolicyName, SchedulerConfig
from engine.cost_model import PrefillCostModel, num_attention_pairs
from engine.fairness import TenantAccounts
from engine.lengths import length_bucket
from engine.sequence import Sequence


@dataclass(slots=True)
class StepBudget:
    """What is left of the step that is being planned."""

    num_tokens: int
    """Tokens that may still be added."""
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0

    def add_decode(self) -> None:
        """Plan one token of a stream."""
        self.num_tokens -= 1
        self.num_decode_tokens += 1

    def add_prefill(self, num_new_tokens: int, num_context_tokens: int) -> None:
        """Plan a chunk."""
        self.num_tokens -= num_new_tokens
        self.num_prefill_tokens += num_new_tokens
        self.num_prefill_pairs += num_attention_pairs(num_new_tokens, num_context_tokens)

    def give_back(self, num_new_tokens: int) -> None:
        """A planned sequence has left the step again."""
        self.num_tokens += num_new_tokens


class SchedulingPolicy(Protocol):
    """Fills a step. All of it is arithmetic: what is changed by it, the scheduler changes."""

    @property
    def max_num_running(self) -> int:
        """Most sequences that run at once; each of them finds its token in every step."""
        ...

    def due_s(self, sequence: Sequence) -> float:
        """Place of a new sequence among those of its priority and tenant."""
        ...

    def step_budget(self) -> StepBudget:
        """Budget of an empty step."""
        ...

    def order(
        self, prefills: SequenceOf[Sequence], waiting: SequenceOf[Sequence], accounts: TenantAccounts, now: float
    ) -> Iterable[Sequence]:
        """Running prefills and waiting sequences, in the order in which the rest of the step is offered to them."""
        ...

    def num_chunk_tokens(self, num_uncomputed_tokens: int, num_context_tokens: int, budget: StepBudget) -> int:
        """Tokens that a sequence takes of the rest; 0 where it has to wait for another step."""
        ...


class TokenBudgetPolicy:
    """Chunks under a token budget; see the module."""

    def __init__(self, config: SchedulerConfig, cost_model: PrefillCostModel | None, min_chunk_tokens: int) -> None:
        """``min_chunk_tokens`` is what a chunk is not made smaller than for the sake of the decode gap."""
        self._config = config
        self._cost_model = cost_model
        self._min_chunk_tokens = min(min_chunk_tokens, config.max_chunk_tokens)

    @property
    def max_num_running(self) -> int:
        """A decode needs a token of the budget in every step."""
        return min(self._config.max_num_seqs, self._config.max_num_batched_tokens)

    def due_s(self, sequence: Sequence) -> float:
        """When its patience ends: later for every token, but not after the last useful start before a deadline."""
        due_s = sequence.arrival_s + sequence.num_tokens * self._config.ageing_ms_per_token / 1e3
        if sequence.deadline_s is None:
            return due_s
        predicted_s = self._cost_model.predict_s(sequence.num_tokens, 0) if self._cost_model else None
        return min(due_s, sequence.deadline_s - (predicted_s or 0.0))

    def step_budget(self) -> StepBudget:
        """``max_num_batched_tokens``."""
        return StepBudget(self._config.max_num_batched_tokens)

    def order(
        self, prefills: SequenceOf[Sequence], waiting: SequenceOf[Sequence], accounts: TenantAccounts, now: float
    ) -> Iterable[Sequence]:
        """By preemption, aged priority, tokens served, pressure; equal ones by due time, then as they queue."""
        candidates = [*prefills, *waiting]
        if len(candidates) < 2:
            return candidates
        config = self._config
        highest = max(sequence.priority for sequence in candidates)
        served: Mapping[str, int] = (
            {sequence.tenant_id: accounts.served(sequence.tenant_id) for sequence in candidates}
            if config.fair_tenants
            else {}
        )

        def rank(sequence: Sequence) -> tuple[bool, int, int, float, float]:
            waited_s = now - sequence.arrival_s
            patience_s = sequence.due_s - sequence.arrival_s
            pressure = waited_s / patience_s if patience_s > 0 else 0.0
            priority = min(sequence.priority + int(waited_s / config.priority_ageing_s), highest)
            is_preempted = sequence.num_preemptions > 0 and sequence.num_computed_tokens == 0
            return not is_preempted, -priority, served.get(sequence.tenant_id, 0), -pressure, sequence.due_s

        return sorted(candidates, key=rank)

    def num_chunk_tokens(self, num_uncomputed_tokens: int, num_context_tokens: int, budget: StepBudget) -> int:
        """As many as chunk size, budget and, while streams decode, the longest gap allow."""
        count = min(num_uncomputed_tokens, self._config.max_chunk_tokens, budget.num_tokens)
        return min(count, self._num_tokens_within_gap(num_context_tokens, budget))

    def _num_tokens_within_gap(self, num_context_tokens: int, budget: StepBudget) -> int:
        gap_ms = self._config.max_decode_gap_ms
        coefficients = (
            self._cost_model.coefficients if self._cost_model and gap_ms and budget.num_decode_tokens else None
        )
        if gap_ms is None or coefficients is None:
            return sys.maxsize
        num_tokens = budget.num_decode_tokens + budget.num_prefill_tokens
        rest_s = gap_ms / 1e3 - coefficients.step_time_s(num_tokens, budget.num_prefill_pairs)
        limit = coefficients.max_tokens_within(rest_s, num_context_tokens)
        # The first chunk of a step always advances, or a long prefill beside endless streams would never end.
        least = 0 if budget.num_prefill_tokens else self._min_chunk_tokens
        return max(least, sys.maxsize if math.isinf(limit) else int(limit))


class FixedCountPolicy:
    """So many whole prompts at once, in order of arrival; see the module."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_num_running = min(config.fixed_count, config.max_num_seqs)

    @property
    def max_num_running(self) -> int:
        """``fixed_count``."""
        return self._max_num_running

    def due_s(self, sequence: Sequence) -> float:
        """Arrival."""
        return sequence.arrival_s

    def step_budget(self) -> StepBudget:
        """No limit: the number of sequences is one."""
        return StepBudget(sys.maxsize)

    def order(
        self, prefills: SequenceOf[Sequence], waiting: SequenceOf[Sequence], accounts: TenantAccounts, now: float
    ) -> Iterable[Sequence]:
        """As they queue."""
        return [*prefills, *waiting]

    def num_chunk_tokens(self, num_uncomputed_tokens: int, num_context_tokens: int, budget: StepBudget) -> int:
        """Everything."""
        return num_uncomputed_tokens


class LengthBucketPolicy:
    """Whole prompts of similar length together; see the module."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    @property
    def max_num_running(self) -> int:
        """A decode needs a token of the budget in every step."""
        return min(self._config.max_num_seqs, self._config.max_num_batched_tokens)

    def due_s(self, sequence: Sequence) -> float:
        """Arrival."""
        return sequence.arrival_s

    def step_budget(self) -> StepBudget:
        """``max_num_batched_tokens``."""
        return StepBudget(self._config.max_num_batched_tokens)

    def order(
        self, prefills: SequenceOf[Sequence], waiting: SequenceOf[Sequence], accounts: TenantAccounts, now: float
    ) -> Iterable[Sequence]:
        """Running ones, then the waiting ones of the bucket in which somebody has waited longest."""
        if not waiting:
            return prefills
        oldest = min(waiting, key=lambda sequence: (sequence.num_preemptions == 0, sequence.due_s))
        bucket = length_bucket(oldest.num_tokens)
        return [*prefills, oldest, *(s for s in waiting if s is not oldest and length_bucket(s.num_tokens) == bucket)]

    def num_chunk_tokens(self, num_uncomputed_tokens: int, num_context_tokens: int, budget: StepBudget) -> int:
        """Everything, where it fits or is the first; else nothing."""
        fits = num_uncomputed_tokens <= budget.num_tokens
        return num_uncomputed_tokens if fits or not budget.num_prefill_tokens else 0


def make_policy(
    config: SchedulerConfig, *, cost_model: PrefillCostModel | None = None, block_size: int = 16
) -> SchedulingPolicy:
    """The configured policy."""
    policies: dict[PolicyName, SchedulingPolicy] = {
        "token_budget": TokenBudgetPolicy(config, cost_model, block_size),
        "fixed_count": FixedCountPolicy(config),
        "length_bucket": LengthBucketPolicy(config),
    }
    return policies[config.policy]
