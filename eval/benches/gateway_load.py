"""A client that costs little beside what it measures: prepared requests on kept connections."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from eval.errors import EvalError

_TEXT = b'"content":" token'
_LAST_CHUNK = b"0\r\n\r\n"
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Timing:
    """One answered request, in seconds from when it was due."""

    first_text_s: float
    total_s: float


def make_request(port: int, body: dict[str, Any], key: str) -> bytes:
    """A whole HTTP request for a chat completion."""
    content = msgspec.json.encode(body)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class Connection(asyncio.Protocol):
    """One kept connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._answer: asyncio.Future[None] | None = None
        self._received = bytearray()
        self._body_end = -1
        self._is_chunked = False
        self.first_text_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails the request that waits."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EvalError(f"the connection was lost: {bytes(self._received[-200:])!r}"))

    def data_received(self, data: bytes) -> None:
        """Notes the first text and the end."""
        if self._answer is None or self._answer.done():
            return
        if self._is_chunked and self.first_text_s:
            # Nothing but the end is of interest; it may be cut into two pieces.
            self._received = bytearray(self._received[-8:] + data)
        else:
            self._received += data
        if self._body_end < 0 and not self._is_chunked:
            self._read_head()
        if not self.first_text_s and _TEXT in self._received:
            self.first_text_s = time.perf_counter()
        is_over = self._received.endswith(_LAST_CHUNK) if self._is_chunked else len(self._received) == self._body_end
        if is_over:
            self._answer.set_result(None)

    def _read_head(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            assert self._answer is not None, "called for an answer"
            self._answer.set_exception(EvalError(f"refused: {bytes(self._received[:600])!r}"))
            return
        if b"transfer-encoding: chunked" in head:
            self._is_chunked = True
        else:
            self._body_end = end + 4 + int(head.partition(b"content-length:")[2].split(b"\r\n")[0])

    async def ask(self, request: bytes, due_s: float | None = None) -> Timing:
        """Sends a request and waits for the end of its answer. Raises EvalError for a refusal or a broken stream."""
        started = time.perf_counter() if due_s is None else due_s
        self._received = bytearray()
        self._body_end, self._is_chunked, self.first_text_s = -1, False, 0.0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(TIMEOUT_S):
            await self._answer
        ended = time.perf_counter()
        return Timing((self.first_text_s or ended) - started, ended - started)

    def close(self) -> None:
        """Closes the connection."""
        self._answer = None
        self._transport.close()


async def connect(port: int, count: int) -> list[Connection]:
    """Kept connections to a server on this machine."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(count)]


async def closed_loop(port: int, request: bytes, *, num_requests: int, concurrency: int) -> tuple[list[Timing], float]:
    """``num_requests`` requests, at most ``concurrency`` at a time; timings and the seconds they took together."""
    connections = await connect(port, concurrency)
    left = num_requests
    timings: list[Timing] = []

    async def work(connection: Connection) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            timings.append(await connection.ask(request))

    started = time.perf_counter()
    try:
        await asyncio.gather(*(work(connection) for connection in connections))
    finally:
        for connection in connections:
            connection.close()
    return timings, time.perf_counter() - started


async def open_loop(port: int, request: bytes, *, rate: float, num_requests: int, warm: int = 64) -> list[Timing]:
    """Requests that arrive evenly at ``rate`` a second whatever becomes of them; latency counts from the arrival."""
    idle: list[Connection] = await connect(port, warm)
    everyone = list(idle)
    loop = asyncio.get_running_loop()

    async def work(due_s: float) -> Timing:
        if idle:
            connection = idle.pop()
        else:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
            everyone.append(connection)
        timing = await connection.ask(request, due_s)
        idle.append(connection)
        return timing

    tasks: list[asyncio.Task[Timing]] = []
    first_s = time.perf_counter() + 0.05
    try:
        for place in range(num_requests):
            due_s = first_s + place / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(work(due_s)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        for connection in everyone:
            connection.close()
