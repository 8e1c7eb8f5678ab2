"""What all handlers share: request ids, bodies within a limit, the principal, and leaving with the client."""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response
from litestar.datastructures import Headers, State
from litestar.types import ASGIApp, HTTPResponseStartEvent, Message, Receive, Scope, Send

from app.auth import Principal
from app.chat_service import Arrival
from app.errors import AuthenticationError, ClientDisconnectedError, InvalidRequestError, RequestTooLargeError
from app.gateway import Gateway
from app.snapshot import Snapshot
from app.trace_context import trace_of
from app.waterfall import Timeline

GatewayRequest = Request[Any, Any, State]
T = TypeVar("T")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SCOPE_KEY = "firsttoken.request_id"
_CALLER_KEY = "firsttoken.caller"
_OPERATOR_KEY = "firsttoken.operator"
_TRUE = ("1", "true", "yes", "on")

MAX_DISCARDED_BYTES = 64 * 1024 * 1024
MAX_DISCARD_S = 5.0
NUM_SHOWN_DIGITS = 8


def request_id_of(scope: Scope) -> str:
    """The client's ``x-request-id`` where it is harmless, else a new one; the same for the whole request."""
    known: str | None = scope.get(_SCOPE_KEY)  # type: ignore[assignment]
    if known is not None:
        return known
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
    scope[_SCOPE_KEY] = request_id  # type: ignore[literal-required]
    return request_id


def note_caller(scope: Scope, principal: Principal) -> None:
    """Who calls, for the log of an error that may come later."""
    scope[_CALLER_KEY] = principal  # type: ignore[literal-required]


def note_operator(scope: Scope, digest: str) -> None:
    """By which admin key something is done: the beginning of its SHA-256, which stands in the configuration."""
    scope[_OPERATOR_KEY] = digest[:NUM_SHOWN_DIGITS]  # type: ignore[literal-required]


def log_fields(scope: Scope) -> dict[str, str]:
    """What identifies a request in a log: its id, and its caller and its trace where they are known."""
    fields = {"request_id": request_id_of(scope)}
    caller: Principal | None = scope.get(_CALLER_KEY)  # type: ignore[assignment]
    if caller is not None:
        fields |= {"tenant": caller.tenant_id, "key": caller.key_name}
    operator: str | None = scope.get(_OPERATOR_KEY)  # type: ignore[assignment]
    if operator is not None:
        fields["operator"] = operator
    trace = trace_of(scope, Headers.from_scope(scope))
    if trace is not None:
        fields["trace_id"] = trace.trace_id
    return fields


def at_response_start(send: Send, act: Callable[[HTTPResponseStartEvent], None]) -> Send:
    """``send`` that gives the message which begins an answer to ``act`` first.

    A plain function and no coroutine: a stream calls it with every token.
    """

    def wrapped(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            act(message)
        return send(message)

    return wrapped


class RequestIdMiddleware:
    """Puts ``x-request-id`` on every answer, errors and unknown addresses included. Wraps the whole application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""

        def add_id(message: HTTPResponseStartEvent) -> None:
            named = (b"x-request-id", request_id_of(scope).encode("latin-1"))
            message["headers"] = [*message.get("headers", ()), named]

        await self._app(scope, receive, at_response_start(send, add_id))


def gateway_of(request: GatewayRequest) -> Gateway:
    """The gateway that this application serves."""
    gateway: Gateway = request.app.state.gateway
    return gateway


async def authenticated(request: GatewayRequest, snapshot: Snapshot | None = None) -> Principal:
    """The caller, by ``Authorization`` or, as Anthropic's clients do, ``x-api-key``; by the keys of ``snapshot``, else
    of the one in force. Raises ``AuthenticationError``."""
    authorization = request.headers.get("authorization")
    if authorization is None and (key := request.headers.get("x-api-key")) is not None:
        authorization = f"Bearer {key}"
    gateway = gateway_of(request)
    return await gateway.directory.authenticate(authorization, (snapshot or gateway.config.current).authenticator)


async def read_arrival(request: GatewayRequest) -> Arrival:
    """Authenticates, then reads the body. Raises ``AuthenticationError`` or as ``read_body`` does."""
    timeline = Timeline(time.perf_counter(), trace_of(request.scope, request.headers))
    snapshot = gateway_of(request).config.current
    try:
        principal = await authenticated(request, snapshot)
    except AuthenticationError:
        await _discard(request.receive)
        raise
    note_caller(request.scope, principal)
    timeline.lap("authenticate")
    body = await read_body(request, snapshot.settings.server.max_body_bytes)
    timeline.lap("read_body")
    return Arrival(
        request_id=request_id_of(request.scope),
        principal=principal,
        body=body,
        arrived_s=timeline.arrived_s,
        snapshot=snapshot,
        bypass=request.headers.get("x-firsttoken-bypass", "").strip().lower() in _TRUE,
        timeline=timeline,
    )


async def read_body(request: GatewayRequest, max_body_bytes: int) -> bytes:
    """The whole body. Raises ``RequestTooLargeError``, and ``ClientDisconnectedError`` where it never ends."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        text = f"The content encoding {encoding!r} is not supported; send the body as it is."
        raise InvalidRequestError(text, code="unsupported_value")
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError("The client left before its request was complete.")
        assert message["type"] == "http.request", message["type"]
        num_bytes += len(message["body"])
        if num_bytes > max_body_bytes:
            if message["more_body"]:
                await _discard(request.receive)
            raise RequestTooLargeError(max_body_bytes)
        chunks.append(message["body"])
        if not message["more_body"]:
            return b"".join(chunks)


async def _discard(receive: Receive) -> None:
    """Reads on for a while: a connection that is closed with unread data loses the answer on its way."""
    num_bytes = 0
    try:
        async with asyncio.timeout(MAX_DISCARD_S):
            while num_bytes <= MAX_DISCARDED_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message["more_body"]:
                    return
                num_bytes += len(message["body"])
    except TimeoutError:
        return


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves. Raises ``ClientDisconnectedError`` then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError("The client left before the answer was complete.")
        return task.result()
    finally:
        await cancel_and_wait(task, watcher)


async def cancel_and_wait(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels tasks and waits until they have cleaned up; their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def json_response(content: Any, *, headers: dict[str, str] | None = None, status_code: int = 200) -> Response[bytes]:
    """A JSON answer encoded by msgspec."""
    return Response(
        msgspec.json.encode(content), status_code=status_code, media_type="application/json", headers=headers
    )
