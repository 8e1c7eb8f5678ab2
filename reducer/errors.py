"""Errors of the reducer.

ReducerError
├── BudgetExceededError   what must not be cut (system, tools, question) does not fit into the budget
└── InvalidPromptError    messages or passages that cannot be reduced: no user message, two passages with one id
"""


class ReducerError(Exception):
    """Base of all reducer errors."""


class BudgetExceededError(ReducerError):
    """The protected part of the prompt alone is larger than the budget."""

    def __init__(self, num_tokens: int, max_input_tokens: int, source: str) -> None:
        super().__init__(
            f"system messages, tools and question need {num_tokens} tokens, the {source} budget is {max_input_tokens}"
        )
        self.num_tokens = num_tokens
        self.max_input_tokens = max_input_tokens
        self.source = source


class InvalidPromptError(ReducerError):
    """Messages or passages that cannot be reduced; the text names the field and the value."""
