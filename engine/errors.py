"""Errors of the engine.

EngineError
├── ModelError           a model cannot be found, checked or read
├── PromptTooLongError   prompt (and output) do not fit into the window
├── QueueFullError       the waiting queue is full; retry later
├── GrammarError         an output cannot follow the schema that was asked for
└── EngineDeadError      the engine process is gone; it is being restarted
"""


class EngineError(Exception):
    """Base of all engine errors."""


class ModelError(EngineError):
    """A model cannot be found, its digest is wrong, or its files cannot be read; the text names the file."""


class PromptTooLongError(EngineError):
    """The prompt leaves no room for an output token in the window."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(f"prompt of {num_prompt_tokens} tokens does not fit into the window of {max_model_len} tokens")
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class QueueFullError(EngineError):
    """The waiting queue is full."""

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{num_waiting} sequences are waiting already; retry in {retry_after_s:.0f} s")
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s


class GrammarError(EngineError, ValueError):
    """A JSON schema cannot be read, is too large, or asks for what no grammar here can hold an output to."""


class EngineDeadError(EngineError):
    """The engine process has died or is not started yet; ``retry_after_s`` estimates when it is back."""

    def __init__(self, reason: str, retry_after_s: float = 5.0) -> None:
        super().__init__(f"the engine is not available: {reason}")
        self.retry_after_s = retry_after_s
