"""Server-sent events of a chat completion, in OpenAI's chunk shape.

A stream that breaks off after its first byte ends with an error frame and the end of the response: no ``finish_reason``
and no ``[DONE]``, so that nobody takes the part for the whole.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import structlog
from litestar import Response
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Send

from app.answers import extension_of, logprobs_of, streamed_call, usage_of
from app.errors import GenerationError, answer_of
from app.generation import Delta, Generation, IdentifiedCall
from app.http_io import cancel_and_wait, disconnected
from app.relay import Relay

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Proxies must neither keep a stream nor hold it back."""


class ChunkEncoder:
    """Writes chunks. What all chunks of a stream share is encoded once; a token costs the encoding of its text."""

    def __init__(self, generation: Generation, model: str, *, includes_usage: bool) -> None:
        self._generation = generation
        self._includes_usage = includes_usage
        shared = {
            "id": generation.completion_id,
            "object": "chat.completion.chunk",
            "created": generation.created,
            "model": model,
            "system_fingerprint": None,
        }
        self._head = b"data: " + msgspec.json.encode(shared)[:-1]
        # Where usage was asked for, every chunk but the last has it as null; elsewhere there is no such field.
        self._tail = (b',"usage":null' if includes_usage else b"") + b"}\n\n"
        self._encoder = msgspec.json.Encoder()

    def role(self, index: int) -> bytes:
        """The first chunk of a choice."""
        return self._chunk(index, b'{"role":"assistant","content":"","refusal":null}', b"null", b"null")

    def text(self, delta: Delta) -> bytes:
        """A part of an answer."""
        logprobs = b"null" if delta.logprobs is None else self._encoder.encode(logprobs_of(delta.logprobs))
        return self._chunk(delta.choice, b'{"content":' + self._encoder.encode(delta.text) + b"}", logprobs, b"null")

    def call(self, delta: Delta, found: IdentifiedCall) -> bytes:
        """A call of a tool, all of it."""
        logprobs = b"null" if delta.logprobs is None else self._encoder.encode(logprobs_of(delta.logprobs))
        calls = self._encoder.encode([streamed_call(found)])
        return self._chunk(delta.choice, b'{"tool_calls":' + calls + b"}", logprobs, b"null")

    def finish(self, index: int, reason: str) -> bytes:
        """The end of an answer."""
        return self._chunk(index, b"{}", b"null", self._encoder.encode(reason))

    def totals(self) -> bytes:
        """Usage and extension, for a client that asked for usage."""
        rest = {"choices": [], "usage": usage_of(self._generation), "firsttoken": extension_of(self._generation)}
        return self._head + b"," + self._encoder.encode(rest)[1:] + b"\n\n"

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        start = b'{"index":%d,"delta":' % index
        choice = start + delta + b',"logprobs":' + logprobs + b',"finish_reason":' + finish_reason + b"}"
        return self._head + b',"choices":[' + choice + b"]" + self._tail


async def completion_events(generation: Generation, model: str, *, includes_usage: bool) -> AsyncGenerator[bytes, None]:
    """The events of a started generation, to the end or to the error that breaks it off."""
    chunks = ChunkEncoder(generation, model, includes_usage=includes_usage)
    for choice in generation.choices:
        yield chunks.role(choice.index)
    try:
        async for delta in generation.deltas():
            if delta.tool_call is not None:
                yield chunks.call(delta, delta.tool_call)
            elif delta.text or delta.logprobs:
                yield chunks.text(delta)
            if delta.finish_reason is not None:
                yield chunks.finish(delta.choice, delta.finish_reason)
    except Exception as error:
        yield error_event(error, generation)
        return
    if includes_usage:
        yield chunks.totals()
    yield DONE


async def relayed_events(relay: Relay, model: str) -> AsyncGenerator[bytes, None]:
    """The events of a started relay, to the end or to the error that breaks it off."""
    request = relay.compaction.request
    options = request.body.stream_options
    repeats_usage = options is not None and bool(options.continuous_usage_stats)
    frames = relay.frames(model, includes_usage=request.includes_usage, repeats_usage=repeats_usage)
    try:
        async with aclosing(frames):
            async for frame in frames:
                yield frame
    except Exception as error:
        yield error_event(error, relay)


def answer_events(generation: Generation, model: str) -> AsyncGenerator[bytes, None]:
    """The events of a started generation, wherever it is computed."""
    if isinstance(generation, Relay):
        return relayed_events(generation, model)
    return completion_events(generation, model, includes_usage=generation.compaction.request.includes_usage)


def error_event(error: Exception, generation: Generation) -> bytes:
    """The frame that ends a broken stream."""
    log = structlog.get_logger("firsttoken.requests")
    answer = answer_of(error)
    is_bug = answer.status == 500 and not isinstance(error, GenerationError)
    log.error(
        "stream_broken",
        request_id=generation.request_id,
        error=type(error).__name__,
        status=answer.status,
        exc_info=error if is_bug else None,
    )
    return b"data: " + answer.body() + b"\n\n"


class ASGIEventStream(ASGIResponse):
    """Sends the events while the client is there, then closes the generation."""

    _should_set_content_length = False

    def __init__(self, *, generation: Generation, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(headers={**HEADERS, **headers}, media_type="text/event-stream")
        self._generation = generation
        self._events = events

    async def start_response(self, send: Send) -> None:
        """Sends status and headers; a client that is gone already costs nothing more."""
        try:
            await super().start_response(send)
        except BaseException:
            await self._generation.aclose()
            raise

    async def send_body(self, send: Send, receive: Receive) -> None:
        """Sends the events. Returns early when the client leaves; the generation is closed either way.

        A server that ends cancels what is left then: a client that does not even take the last frame.
        """
        sender = asyncio.ensure_future(self._send_events(send))
        watcher = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        except asyncio.CancelledError:
            if not self._generation.drain.is_over:
                raise
            log = structlog.get_logger("firsttoken.requests")
            log.warning("stream_stuck_at_shutdown", request_id=self._generation.request_id)
        finally:
            await cancel_and_wait(sender, watcher)
            await self._events.aclose()
            await self._generation.aclose()

    async def _send_events(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response[None]):
    """The events of a generation as a handler returns them."""

    def __init__(self, generation: Generation, events: AsyncGenerator[bytes, None], *, headers: dict[str, str]) -> None:
        super().__init__(None, media_type="text/event-stream")
        self._generation = generation
        self._events = events
        self._extra_headers = headers

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIEventStream:
        """The low-level response; everything it needs was given to this one."""
        return ASGIEventStream(generation=self._generation, events=self._events, headers=self._extra_headers)
