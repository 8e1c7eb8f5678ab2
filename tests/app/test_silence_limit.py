"""How long a stream of an upstream may be silent: counted while somebody waits for it, from the last event on."""

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from app.backends.upstream_client import SilentError, UpstreamResponse

LIMIT_S = 0.2
EVENT = b"data: {}\n\n"


class Stream:
    """A response whose bytes the test feeds."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        loop = asyncio.get_running_loop()
        protocol = BaseProtocol(loop)
        protocol.transport = SimpleNamespace(is_closing=lambda: False)  # type: ignore[assignment]
        self.content = aiohttp.StreamReader(protocol, 2**16, loop=loop)
        self.is_closed = False
        fake: Any = SimpleNamespace(content=self.content, close=self.close, release=self.close)
        self.response = UpstreamResponse(fake, set())
        self.response.limit_silence(limit_s)

    def close(self) -> None:
        self.is_closed = True


async def test_a_wait_for_the_next_event_ends_at_the_limit() -> None:
    stream = Stream()
    stream.content.feed_data(EVENT)
    assert len(await stream.response.next_events()) == 1
    with pytest.raises(SilentError):
        await stream.response.next_events()
    stream.response.close()
    assert stream.is_closed


async def test_bytes_that_complete_no_event_do_not_count_as_one() -> None:
    stream = Stream()
    loop = asyncio.get_running_loop()
    for place in range(100):
        loop.call_later(place * LIMIT_S / 4, stream.content.feed_data, b": still there\n")
    with pytest.raises(SilentError):
        await stream.response.next_events()


async def test_time_in_which_nobody_waits_does_not_count() -> None:
    stream = Stream()
    await asyncio.sleep(3 * LIMIT_S)  # a client that takes nothing
    stream.content.feed_data(EVENT)
    assert len(await stream.response.next_events()) == 1


async def test_a_stream_may_take_longer_than_the_limit_as_long_as_events_come() -> None:
    stream = Stream(limit_s=2.0)
    loop = asyncio.get_running_loop()
    started = loop.time()
    while loop.time() - started < 2.3:
        loop.call_later(0.05, stream.content.feed_data, EVENT)
        assert len(await stream.response.next_events()) == 1


async def test_an_answer_that_is_over_keeps_no_timer() -> None:
    stream = Stream()
    stream.content.feed_eof()
    assert await stream.response.next_events() == []
    stream.response.close()
    await asyncio.sleep(2 * LIMIT_S)
    assert stream.content.exception() is None
