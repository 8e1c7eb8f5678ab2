"""One line in the log for every request that leaves no other: lists, receipts, embeddings, what operators change.

Completions and compactions are logged where they end (``app.service_observer``), refusals where they are answered
(``app.error_answers``), probes nowhere.
"""

import time

import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPResponseStartEvent, Receive, Scope, Send

from app.http_io import at_response_start, log_fields
from app.probes import PROBES

LOGGED_ELSEWHERE = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/compact")
)
ADMIN_PREFIX = "/admin/"


class RequestLogMiddleware:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = structlog.get_logger("firsttoken.requests")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != ScopeType.HTTP or scope["path"] in PROBES or scope["path"] in LOGGED_ELSEWHERE:
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        status = 0

        def note_status(message: HTTPResponseStartEvent) -> None:
            nonlocal status
            status = message["status"]

        await self._app(scope, receive, at_response_start(send, note_status))
        if 100 <= status < 400:
            fields = log_fields(scope)
            # Names of tenants, keys and policies; nowhere else are there words of a caller's in an address.
            if scope["path"].startswith(ADMIN_PREFIX):
                fields |= {name: str(value) for name, value in scope.get("path_params", {}).items()}
            self._log.info(
                "request",
                method=scope["method"],
                route=scope.get("path_template", "unknown"),
                status=status,
                ms=round(1000 * (time.perf_counter() - started_s), 1),
                **fields,
            )
