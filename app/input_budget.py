"""How many prompt tokens a request may have, and which limit says so.

    input budget = min(request, tenant, policy, window - output reserve, what the TTFT objective affords)

The first three are limits: what must not be cut and does not fit is refused. The last two are wishes: the output
reserve and the objective shrink passages and history, but never refuse a question that the window could hold.
"""

from dataclasses import dataclass

from engine.cost_model import PrefillCostModel
from engine.outputs import RequestTimings
from reducer.prompt import Budget

MIN_OUTPUT_TOKENS = 1
OVERHEAD_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class InputBudget:
    """The budget to aim at, and the one that must hold."""

    wanted: Budget
    hard: Budget

    def stretched(self, num_tokens: int) -> Budget | None:
        """A budget for a protected part of ``num_tokens`` that passes a wish but no limit; ``None`` where none is left.

        It keeps the wish's source: the wish still decides that nothing but the protected part goes in.
        """
        if self.wanted.max_input_tokens < num_tokens <= self.hard.max_input_tokens:
            return Budget(num_tokens, self.wanted.source)
        return None


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """The limits of one request before the smallest is taken; ``None`` is no limit."""

    request: int | None
    tenant: int | None
    policy: int | None
    window: int
    """Window of the model, prompt and output together."""
    output_reserve: int
    """Part of the window kept free for the output."""
    slo: int | None
    """Tokens that the TTFT objective affords."""

    def smallest(self) -> InputBudget:
        """The smallest limit; of equal ones the first in the order request, tenant, policy, window, slo."""
        limits = [
            Budget(limit, source)
            for limit, source in ((self.request, "request"), (self.tenant, "tenant"), (self.policy, "policy"))
            if limit is not None
        ]
        hard = [*limits, Budget(self.window - MIN_OUTPUT_TOKENS, "window")]
        wanted = [*limits, Budget(max(1, self.window - self.output_reserve), "window")]
        if self.slo is not None:
            wanted.append(Budget(max(1, self.slo), "slo"))
        return InputBudget(wanted=min(wanted, key=_size), hard=min(hard, key=_size))


def _size(budget: Budget) -> int:
    return budget.max_input_tokens


class TtftObjective:
    """Answers what a time to the first token affords, from the prefills and waits seen so far."""

    def __init__(self, cost_model: PrefillCostModel) -> None:
        self._cost_model = cost_model
        self._overhead_s = 0.0

    def observe(
        self, *, num_prompt_tokens: int, num_cached_tokens: int, reduce_s: float, timings: RequestTimings
    ) -> None:
        """Learns from one request that got its first token."""
        overhead_s = reduce_s + timings.queue_ms / 1000
        self._overhead_s += OVERHEAD_WEIGHT * (overhead_s - self._overhead_s)
        num_new_tokens = num_prompt_tokens - num_cached_tokens
        if num_new_tokens > 0 and timings.prefill_ms > 0:
            self._cost_model.observe(num_new_tokens, num_cached_tokens, timings.prefill_ms / 1000)

    def max_input_tokens(self, ttft_slo_ms: float | None) -> int | None:
        """Prompt tokens whose first token should come within the objective; ``None`` without objective or experience.

        The prefix cache is not counted on: what it holds is only known once the prompt exists.
        """
        if ttft_slo_ms is None:
            return None
        return self._cost_model.max_new_tokens(max(0.0, ttft_slo_ms / 1000 - self._overhead_s), 0)


def tightest_objective(*objectives_ms: float | None) -> float | None:
    """The shortest of the given TTFT objectives; ``None`` where there is none."""
    return min((objective for objective in objectives_ms if objective is not None), default=None)
