"""What an upstream's refusals and failures become: an error in OpenAI's shape that says whose mistake it is."""

import math
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from app.errors import UpstreamError

MAX_MESSAGE_CHARS = 2000
MAX_RETRY_AFTER_S = 86_400.0

RETRIED_STATUSES = frozenset({401, 403, 404, 408, 425, 429, 500, 502, 503, 504, 529})
"""Another replica may answer: this one is overloaded, broken or set up wrongly."""
FAILED_STATUSES = RETRIED_STATUSES - {429, 503, 529}
"""They speak against the replica itself; being busy does not."""

_TYPES = {400: "invalid_request_error", 413: "invalid_request_error", 422: "invalid_request_error"}


def upstream_refusal(status: int, body: bytes, retry_after: str | None, now_s: float) -> UpstreamError:
    """The error for an answer with a status other than 200; ``now_s`` is Unix time, for a date in ``Retry-After``."""
    told = read_error(body)
    message, retry_after_s = told.message, parse_retry_after(retry_after, now_s)
    if status in (401, 403):
        text = "The upstream refuses the gateway's key; its operator has to set another one."
        return UpstreamError(text, status=502, type="server_error", code="upstream_authentication")
    if status == 404:
        text = f"The upstream does not know the model or the path: {message or 'not found'}"
        return UpstreamError(text, status=502, type="server_error", code="upstream_not_found")
    if status == 429:
        text = message or "The upstream has reached a rate limit."
        kind = told.type if told.type in ("tokens", "requests") else "rate_limit_error"
        reason = told.code if told.code == "insufficient_quota" else "rate_limit_exceeded"
        return UpstreamError(text, status=429, type=kind, code=reason, retry_after_s=retry_after_s or 1.0)
    if status in (503, 529):
        text = message or "The upstream is overloaded."
        return UpstreamError(text, status=503, type="overloaded", retry_after_s=retry_after_s or 5.0)
    if 400 <= status < 500:
        code = _context_code(message) or told.code
        param = told.param or ("messages" if code == "context_length_exceeded" else None)
        shown = status if status in _TYPES else 400
        return UpstreamError(
            message or f"The upstream refused the request with status {status}.",
            status=shown,
            type="invalid_request_error",
            param=param,
            code=code,
        )
    text = f"The upstream failed with status {status}{': ' + message if message else '.'}"
    return UpstreamError(text, status=502, type="server_error", retry_after_s=retry_after_s)


def refused_stream(first: bytes, told: "ToldError") -> UpstreamError:
    """The error for a stream whose first event is one: vLLM finds some mistakes after it has answered 200.

    Its ``code`` is the status that it would have had.
    """
    if told.status is None:
        return broken_stream(told)
    refusal = upstream_refusal(told.status, first, None, 0.0)
    refusal.upstream_status = told.status
    return refusal


def broken_stream(told: "ToldError") -> UpstreamError:
    """The error for an error frame in the middle of a stream."""
    text = f"The upstream broke off the answer: {told.message or 'it gave no reason'}"
    return UpstreamError(text, status=502, type="server_error", code=told.code)


class ToldError(msgspec.Struct, frozen=True, kw_only=True):
    """What an upstream says of an error, in whichever shape."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | None = None
    status: int | None = None
    """HTTP status that the error itself names."""


def read_error(body: bytes) -> ToldError:
    """The error in a body: OpenAI's ``{"error": {...}}``, vLLM's bare one, FastAPI's ``detail``, or plain text."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return ToldError(message=body[: 4 * MAX_MESSAGE_CHARS].decode("utf-8", "replace").strip()[:MAX_MESSAGE_CHARS])
    error: Any = document.get("error", document) if isinstance(document, dict) else document
    if isinstance(error, str):
        return ToldError(message=error[:MAX_MESSAGE_CHARS])
    if not isinstance(error, dict):
        return ToldError()
    message = error.get("message", error.get("detail"))
    if message is not None and not isinstance(message, str):
        message = msgspec.json.encode(message).decode()
    return ToldError(
        message=(message or "")[:MAX_MESSAGE_CHARS],
        type=_text(error.get("type")),
        param=_text(error.get("param")),
        code=_text(error.get("code")),
        status=_status(error.get("code")),
    )


def parse_retry_after(value: str | None, now_s: float) -> float | None:
    """Seconds of a ``Retry-After`` header, a number or a date; ``None`` for none or one that says nothing."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now_s
        except (ValueError, TypeError, OverflowError):
            return None
    if not math.isfinite(seconds):
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)


def _text(value: Any) -> str | None:
    """Codes are strings or null; vLLM repeats the status as a number there, which says nothing new."""
    return value if isinstance(value, str) and value else None


def _status(value: Any) -> int | None:
    return value if type(value) is int and 400 <= value <= 599 else None


def _context_code(message: str) -> str | None:
    return "context_length_exceeded" if "maximum context length" in message.lower() else None
