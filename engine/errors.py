"""Errors of the engine.

EngineError
├── ModelError           a model cannot be found, checked or read
├── PromptTooLongError   prompt (and output) do not fit into the window
├── OutputTooLongError   the window has no room for so many output tokens
├── AdmissionError       refused at once with a reason; retry later
│   └── QueueFullError   the waiting queue is full
├── GrammarError         an output cannot follow the schema that was asked for
└── EngineDeadError      the engine process is gone; it is being restarted
"""

from typing import Literal


class EngineError(Exception):
    """Base of all engine errors."""


class ModelError(EngineError):
    """A model cannot be found, its digest is wrong, or its files cannot be read; the text names the file."""


class PromptTooLongError(EngineError):
    """The prompt leaves no room for an output token in the window, or exceeds the configured limit for prompts."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int, *, is_input_limit: bool = False) -> None:
        """``max_model_len`` is the limit that was passed; with ``is_input_limit`` the one for prompts alone."""
        what = "exceeds the limit for prompts" if is_input_limit else "does not fit into the window"
        super().__init__(f"prompt of {num_prompt_tokens} tokens {what} of {max_model_len} tokens")
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.is_input_limit = is_input_limit


class OutputTooLongError(EngineError):
    """More output tokens are asked for than the window has room for, and the engine is set to refuse that."""

    def __init__(self, max_tokens: int, room: int) -> None:
        super().__init__(f"max_tokens of {max_tokens} exceeds the room of {room} tokens that the prompt leaves")
        self.max_tokens = max_tokens
        self.room = room


RefusalReason = Literal["queue_length", "queue_tokens", "tenant_queue", "kv_watermark", "deadline", "draining"]


class AdmissionError(EngineError):
    """The engine does not take a request now; ``retry_after_s`` says when it may."""

    def __init__(self, message: str, *, reason: RefusalReason, retry_after_s: float) -> None:
        super().__init__(f"{message}; retry in {retry_after_s:.0f} s")
        self.reason = reason
        self.retry_after_s = retry_after_s

    @classmethod
    def from_message(cls, message: str, reason: RefusalReason, retry_after_s: float) -> "AdmissionError":
        """The same error from its whole text, as it comes from another process."""
        error = cls("", reason=reason, retry_after_s=retry_after_s)
        error.args = (message,)
        return error


class QueueFullError(AdmissionError):
    """The waiting queue is full."""

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"{num_waiting} sequences are waiting already", reason="queue_length", retry_after_s=retry_after_s
        )
        self.num_waiting = num_waiting


class GrammarError(EngineError, ValueError):
    """A JSON schema cannot be read, is too large, or asks for what no grammar here can hold an output to."""


class EngineDeadError(EngineError):
    """The engine process has died or is not started yet; ``retry_after_s`` estimates when it is back."""

    def __init__(self, reason: str, retry_after_s: float = 5.0) -> None:
        super().__init__(f"the engine is not available: {reason}")
        self.retry_after_s = retry_after_s
