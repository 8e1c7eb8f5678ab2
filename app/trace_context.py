"""A request's place in a trace: what the token path knows of tracing, and how W3C's context passes without it.

Nothing here imports OpenTelemetry. ``app.tracing`` makes the traces where spans are on.
"""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from litestar.types import Scope

SCOPE_KEY = "firsttoken.trace"
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
MAX_TRACESTATE_CHARS = 8192


class UpstreamCall(Protocol):
    """One try to get an answer from a replica."""

    @property
    def headers(self) -> Mapping[str, str]:
        """To send with the request."""
        ...

    def end(self, error: BaseException | None = None) -> None:
        """It is over; further calls do nothing."""
        ...


class Trace(Protocol):
    """One request in a trace."""

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        ...

    @property
    def wants_text(self) -> bool:
        """Whether the answer's text is to be told as well."""
        ...

    def attach(self, timeline: Any) -> None:
        """The ``app.waterfall.Timeline`` of the request."""
        ...

    def call(self, replica_url: str, model: str) -> UpstreamCall:
        """Begins a try at a replica."""
        ...

    def on_end(self, generation: Any) -> None:
        """An ``app.generation.Generation`` is over."""
        ...


class PassedContext:
    """The client's own trace where no spans are made: it goes on to the replica as it came."""

    __slots__ = ("headers", "trace_id")
    wants_text = False

    def __init__(self, trace_id: str, headers: dict[str, str]) -> None:
        self.trace_id = trace_id
        self.headers: Mapping[str, str] = headers

    def attach(self, timeline: Any) -> None:
        """Nothing is made of it."""

    def call(self, replica_url: str, model: str) -> UpstreamCall:
        """The client's headers."""
        return self

    def end(self, error: BaseException | None = None) -> None:
        """Nothing to end."""

    def on_end(self, generation: Any) -> None:
        """Nothing to note."""


def passed_context(headers: Mapping[str, str]) -> PassedContext | None:
    """Of a client's headers; ``None`` without a valid ``traceparent``."""
    parent = headers.get("traceparent")
    if parent is None or (found := _TRACEPARENT.fullmatch(parent.strip())) is None:
        return None
    passed = {"traceparent": parent.strip()}
    state = headers.get("tracestate")
    if state is not None and len(state) <= MAX_TRACESTATE_CHARS:
        passed["tracestate"] = state
    return PassedContext(found[1], passed)


def trace_of(scope: Scope, headers: Mapping[str, str]) -> Trace | None:
    """The trace that the middleware began for a request, else the one that its client told."""
    trace: Trace | None = scope.get(SCOPE_KEY)  # type: ignore[assignment]
    return passed_context(headers) if trace is None else trace
