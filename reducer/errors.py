"""Errors of the reducer.

ReducerError
├── BudgetExceededError   what must not be cut (system, tools, question) does not fit into the budget
├── InvalidPromptError    messages or passages that cannot be reduced: no user message, two passages with one id
└── StageFailedError      a stage failed in a way that nobody foresaw, and is set to refuse then
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


class StageFailedError(ReducerError):
    """A stage that must not be left out failed. The text holds nothing of the request; the cause may."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"The {stage} stage of the reduction failed: {reason}. Nothing was sent to the model.")
        self.stage = stage
