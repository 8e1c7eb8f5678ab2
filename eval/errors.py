"""Errors of the evaluation.

EvalError
├── DataError             a data file cannot be read, or a line of it is no case; the text names file and line
└── GatewayError          the gateway refused or could not be reached
    ├── ContextLengthError   the prompt does not fit into the model's window
    └── LaunchError          the gateway of our own did not become ready
"""


class EvalError(Exception):
    """Base of all evaluation errors."""


class DataError(EvalError):
    """A data file cannot be read, or one of its lines is malformed."""


class GatewayError(EvalError):
    """The gateway answered with an error, or not at all (``status`` is 0 then)."""

    def __init__(self, message: str, *, status: int = 0, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ContextLengthError(GatewayError):
    """The prompt does not fit into the window."""


class LaunchError(GatewayError):
    """The gateway that was started for this run did not become ready."""
