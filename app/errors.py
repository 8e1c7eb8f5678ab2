"""The gateway's own errors, and the one table that turns every error into an OpenAI-shaped answer.

GatewayError
├── ConfigError             settings that cannot be used (command line only)
├── InvalidRequestError     400  a field is missing, of the wrong type or out of range; ``param`` names it
├── ContextLengthError      400  context_length_exceeded
├── AuthenticationError     401  no key, or an unknown one
├── PermissionDeniedError   403  a key that may not do this
├── NotFoundError           404  model or receipt
├── ConflictError           409  the name is taken
├── RequestTooLargeError    413  body
├── RateLimitError          429  requests per minute, tokens per day
├── ClientDisconnectedError 499  the client left; only logs see it
├── GenerationError         500  the engine failed this request
├── UpstreamError           400, 429, 502, 503 or 504  the upstream refused or failed this request
└── OverloadedError         503  too many jobs; retry later
    └── ShuttingDownError   503  the server ends; retry later
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.errors import AdmissionError, EngineDeadError, EngineError, OutputTooLongError, PromptTooLongError
from reducer.errors import BudgetExceededError, InvalidPromptError, ReducerError, StageFailedError
from reducer.prompt import Budget

_FIELD = re.compile(r"(messages|documents|tools)(\[\d+\]|\.\w+)*")


class GatewayError(Exception):
    """Base of the gateway's errors."""


class ConfigError(GatewayError):
    """Settings that cannot be used; the text names the file and the key."""

    def __init__(self, message: str, *, key: str | None = None, hint: str | None = None) -> None:
        """``key`` is the path of the key at fault, ``hint`` what may have been meant; both are in the text as well."""
        super().__init__(message)
        self.key = key
        self.hint = hint


class InvalidRequestError(GatewayError):
    """A request field is missing, of the wrong type or out of range."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(GatewayError):
    """A prompt that must not be cut does not fit. The first sentence is the one that OpenAI's clients look for."""

    def __init__(
        self, max_model_len: int, num_tokens: int, limit: Budget | None = None, *, is_lower_bound: bool = False
    ) -> None:
        """``limit`` is the one that the prompt is over; ``None`` for the model's window."""
        at_least = "at least " if is_lower_bound else ""
        if limit is None:
            reason = "and the answer needs at least 1 more"
        else:
            reason = f"and the limit set by the {limit.source} is {limit.max_input_tokens}"
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your messages resulted in "
            f"{at_least}{num_tokens} tokens that must not be cut, {reason}. Please reduce the length of the messages."
        )


class AuthenticationError(GatewayError):
    """No API key, or one that no tenant has."""


class PermissionDeniedError(GatewayError):
    """A known key that may not do this."""


class NotFoundError(GatewayError):
    """A model, receipt or address that does not exist for this caller."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConflictError(GatewayError):
    """What is asked for clashes with what exists; ``param`` names the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLargeError(GatewayError):
    """The body is larger than the gateway takes in."""

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(f"The request body is larger than the limit of {max_body_bytes} bytes.")


class RateLimitError(GatewayError):
    """A tenant's limit is used up; ``kind`` is ``requests`` or ``tokens``."""

    def __init__(self, message: str, *, kind: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


class ClientDisconnectedError(GatewayError):
    """The client closed the connection before the answer was complete."""


class GenerationError(GatewayError):
    """The engine failed this request and goes on with the others."""


class UpstreamError(GatewayError):
    """The upstream refused this request, failed, or cannot be reached; ``status`` is what the client is told."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.upstream_status: int | None = None
        """The status that the upstream answered with; ``None`` where it did not answer."""


class OverloadedError(GatewayError):
    """The gateway has as much work as it takes; retry later."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDownError(OverloadedError):
    """The server ends before the request could be finished."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down; retry later.", retry_after_s=5.0)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as the client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The JSON document ``{"error": {...}}``."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def _invalid_prompt(error: InvalidPromptError) -> ErrorAnswer:
    field_name = _FIELD.match(str(error))
    param = field_name[0] if field_name else "messages"
    return ErrorAnswer(400, "invalid_request_error", str(error), param, "invalid_value")


def _invalid(error: Exception) -> ErrorAnswer:
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return ErrorAnswer(400, "invalid_request_error", str(error), param, code)


def _context_length(error: Exception) -> ErrorAnswer:
    return ErrorAnswer(400, "invalid_request_error", str(error), "messages", "context_length_exceeded")


def _prompt_too_long(error: PromptTooLongError) -> ErrorAnswer:
    if error.is_input_limit:
        return _context_length(error)
    return _context_length(ContextLengthError(error.max_model_len, error.num_prompt_tokens))


def _upstream(error: UpstreamError) -> ErrorAnswer:
    headers = {} if error.retry_after_s is None else _retry_after(error.retry_after_s)
    return ErrorAnswer(error.status, error.type, str(error), error.param, error.code, headers)


def _not_found(error: NotFoundError) -> ErrorAnswer:
    return ErrorAnswer(404, "invalid_request_error", str(error), error.param, error.code)


def _rate_limit(error: RateLimitError) -> ErrorAnswer:
    headers = _retry_after(error.retry_after_s)
    return ErrorAnswer(429, error.kind, str(error), None, "rate_limit_exceeded", headers)


def _output_too_long(error: OutputTooLongError) -> ErrorAnswer:
    return ErrorAnswer(400, "invalid_request_error", str(error), "max_tokens", "context_length_exceeded")


def _refused(error: AdmissionError) -> ErrorAnswer:
    """429 where the tenant itself is the reason, 503 where the load of all is."""
    if error.reason == "tenant_queue":
        return ErrorAnswer(429, "tokens", str(error), None, "rate_limit_exceeded", _retry_after(error.retry_after_s))
    return _unavailable(error)


def _unavailable(error: Any) -> ErrorAnswer:
    return ErrorAnswer(503, "overloaded", str(error), headers=_retry_after(error.retry_after_s))


def _stage_failed(error: StageFailedError) -> ErrorAnswer:
    return ErrorAnswer(503, "server_error", str(error), None, "stage_failed", _retry_after(1.0))


def _unauthenticated(error: Exception) -> ErrorAnswer:
    headers = {"WWW-Authenticate": "Bearer"}
    return ErrorAnswer(401, "authentication_error", str(error), None, "invalid_api_key", headers)


def _forbidden(error: Exception) -> ErrorAnswer:
    return ErrorAnswer(403, "permission_error", str(error))


def _too_large(error: Exception) -> ErrorAnswer:
    # The rest of the body is not read, so the connection cannot be used again.
    headers = {"Connection": "close"}
    return ErrorAnswer(413, "invalid_request_error", str(error), None, "request_too_large", headers)


def _failed(error: Exception) -> ErrorAnswer:
    return ErrorAnswer(500, "server_error", str(error))


def _internal(_: Exception) -> ErrorAnswer:
    message = "The server had an error while processing your request. Its log has the details under the x-request-id."
    return ErrorAnswer(500, "server_error", message)


def _unlisted(error: Exception) -> ErrorAnswer:
    """Errors that the web framework raises before a handler runs, and those that nobody expected."""
    # Imported here, so that the command line shows its help without a web framework.
    from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException

    if not isinstance(error, HTTPException):
        return _internal(error)
    if isinstance(error, NotFoundException):
        return ErrorAnswer(404, "invalid_request_error", "Unknown request URL.", None, "unknown_url")
    headers = {str(name): str(value) for name, value in (error.headers or {}).items()}
    if isinstance(error, MethodNotAllowedException):
        message = f"This method is not allowed for this URL; allowed: {headers.get('allow', 'none')}."
        return ErrorAnswer(405, "invalid_request_error", message, None, "method_not_allowed", headers)
    if error.status_code >= 500:
        return _internal(error)
    return ErrorAnswer(error.status_code, "invalid_request_error", error.detail, headers=headers)


# The nearest class in an error's MRO decides.
TABLE: dict[type[Exception], Callable[[Any], ErrorAnswer]] = {
    InvalidRequestError: _invalid,
    InvalidPromptError: _invalid_prompt,
    StageFailedError: _stage_failed,
    RecursionError: lambda _: ErrorAnswer(
        400, "invalid_request_error", "The request body is nested too deeply.", None, "invalid_json"
    ),
    ContextLengthError: _context_length,
    BudgetExceededError: _context_length,
    PromptTooLongError: _prompt_too_long,
    AuthenticationError: _unauthenticated,
    PermissionDeniedError: _forbidden,
    NotFoundError: _not_found,
    ConflictError: lambda error: ErrorAnswer(409, "invalid_request_error", str(error), error.param, "already_exists"),
    RequestTooLargeError: _too_large,
    RateLimitError: _rate_limit,
    ClientDisconnectedError: lambda error: ErrorAnswer(499, "client_closed_request", str(error)),
    GenerationError: _failed,
    UpstreamError: _upstream,
    OutputTooLongError: _output_too_long,
    AdmissionError: _refused,
    EngineDeadError: _unavailable,
    OverloadedError: _unavailable,
    ShuttingDownError: _unavailable,
    EngineError: _internal,
    ReducerError: _internal,
    Exception: _unlisted,
}


def answer_of(error: Exception) -> ErrorAnswer:
    """How ``error`` is told to the client."""
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)(error)
