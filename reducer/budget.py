"""Budget: what is left beside the protected part of the prompt, and how history and passages share it."""

from dataclasses import dataclass

from reducer.config import HistoryConfig
from reducer.errors import BudgetExceededError
from reducer.prompt import Budget


@dataclass(frozen=True, slots=True)
class Allowance:
    """Tokens for history and for passages, labels and titles included; together never above the budget."""

    history: int
    documents: int


def free_tokens(budget: Budget, num_protected: int) -> int:
    """Tokens left beside system messages, tools and question. Raises BudgetExceededError when these do not fit."""
    if num_protected > budget.max_input_tokens:
        raise BudgetExceededError(num_protected, budget.max_input_tokens, budget.source)
    return budget.max_input_tokens - num_protected


def split_allowance(free: int, num_history: int, num_documents: int, config: HistoryConfig) -> Allowance:
    """Split ``free`` tokens: history gets its share, and what the passages do not need; passages get the rest.

    With 1000 free tokens, a share of 0.5, 700 of history and 800 of passages: 500 and 500. With 300 of passages: 700
    and 300.
    """
    history = min(num_history, max(int(free * config.max_share), free - num_documents), free)
    history = min(history, config.max_tokens)
    return Allowance(history=history, documents=free - history)
