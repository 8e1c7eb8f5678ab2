"""A trivial OpenAI-compatible upstream for the gateway's bench: it answers at once, or token by token at a given pace.

    python -m eval.benches.gateway_upstream

prints its port and serves until its standard input ends. Fields of the body that no server knows choose the answer and
pass through a gateway untouched: ``max_tokens`` tokens, ``bench_per_write`` of them together every ``bench_pace_ms``.
There is no HTTP library in it, so that what is measured in front of it is the gateway.
"""

import asyncio
import re
import sys
from typing import Any

import msgspec
import uvloop

MODEL = "bench-upstream"
MAX_MODEL_LEN = 16_000_000

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD = (
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"' + MODEL.encode() + b'","choices":['
)
_OPEN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class _Body(msgspec.Struct):
    stream: bool = False
    max_tokens: int = 16
    bench_pace_ms: float = 0.0
    bench_per_write: int = 1


_read_body = msgspec.json.Decoder(_Body).decode


def _event(choice: bytes) -> bytes:
    return b"data: " + _HEAD + choice + b'],"usage":null}\n\n'


_ROLE = _event(b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}')
_TOKEN = _event(b'{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}')
_FINISH = _event(b'{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null}')


def _usage(num_tokens: int) -> bytes:
    return b'{"prompt_tokens":100,"completion_tokens":%d,"total_tokens":%d}' % (num_tokens, 100 + num_tokens)


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One client; requests come one after the other."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops writing."""
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Answers every request that is complete."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end])
            found = _LENGTH.search(head)
            stop = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < stop:
                return
            body = bytes(self._buffer[end + 4 : stop])
            del self._buffer[:stop]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST"):
            asked = _read_body(body)
            if asked.stream:
                self._stream(asked)
                return
            text = b" token" * asked.max_tokens
            answer = (
                b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1700000000,"model":"'
                + MODEL.encode()
                + b'","choices":[{"index":0,"message":{"role":"assistant","content":"'
                + text
                + b'","tool_calls":[]},"logprobs":null,"finish_reason":"stop"}],"usage":'
                + _usage(asked.max_tokens)
                + b"}"
            )
        elif b"/models" in head:
            cards = [{"id": MODEL, "object": "model", "max_model_len": MAX_MODEL_LEN}]
            answer = msgspec.json.encode({"object": "list", "data": cards})
        else:
            answer = b"{}"
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer)
        )

    def _stream(self, asked: _Body) -> None:
        left = asked.max_tokens
        first = True

        def write() -> None:
            nonlocal left, first
            num_tokens = min(left, asked.bench_per_write)
            left -= num_tokens
            data = _TOKEN * num_tokens
            if left == 0:
                last = b"data: " + _HEAD + b'],"usage":' + _usage(asked.max_tokens) + b"}\n\n"
                data += _FINISH + last + b"data: [DONE]\n\n"
            framed = _framed(data) if not first else _OPEN + _framed(_ROLE + data)
            first = False
            self._transport.write(framed if left else framed + b"0\r\n\r\n")
            if left:
                self._timer = loop.call_later(asked.bench_pace_ms / 1000, write)

        loop = asyncio.get_running_loop()
        write()


async def serve() -> None:
    """Serves on a free port until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(serve())
