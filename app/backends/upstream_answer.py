"""The answer of a replica once it has begun: the chunks of its stream as they come, or all of its body."""

import msgspec

from app.backends.event_stream import ServerEvent
from app.backends.replicas import Replica
from app.backends.upstream_chunks import ChunkFacts, read_chunk
from app.backends.upstream_client import SilentError, UnreachableError, UpstreamResponse
from app.errors import UpstreamError
from app.trace_context import UpstreamCall

DONE = b"[DONE]"


class UpstreamAnswer:
    """An answer that has begun, and the replica's share of it; always ``aclose``."""

    def __init__(
        self,
        replica: Replica,
        response: UpstreamResponse,
        *,
        body: bytes = b"",
        first: list[ServerEvent] | None = None,
        idle_timeout_s: float = 60.0,
    ) -> None:
        self.replica = replica
        self.body = body
        """The whole answer, where it does not stream."""
        self._response = response
        self._first = first
        self._idle_timeout_s = idle_timeout_s
        if first is not None:
            response.limit_silence(idle_timeout_s)
        self._is_closed = False
        self.call: UpstreamCall | None = None
        """The span of this try, where there is one."""

    async def next_chunks(self) -> list[bytes]:
        """What has come of a stream since the last call, from the first chunk on; empty at its end or ``[DONE]``.

        Raises ``UpstreamError`` where the stream breaks off or falls silent.
        """
        if self._response.is_done:
            return []
        events, self._first = self._first or await self._next_events(), None
        chunks = [event.data for event in events]
        if DONE in chunks:
            self._response.is_done = True
            del chunks[chunks.index(DONE) :]
        return chunks

    async def _next_events(self) -> list[ServerEvent]:
        try:
            return await self._response.next_events()
        except UnreachableError as error:
            self.replica.fail(str(error))
            text = f"The upstream's stream broke off: {error}"
            raise UpstreamError(text, status=502, type="server_error") from error
        except SilentError:
            self.replica.fail("a stream fell silent")
            text = f"The upstream sent nothing for {self._idle_timeout_s:g} s."
            raise UpstreamError(text, status=504, type="server_error") from None

    async def aclose(self) -> None:
        """Ends it; an upstream that has not finished sees its connection close. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._response.close()
        finally:
            self.replica.end()
            if self.call is not None:
                self.call.end()


def chunk_facts(data: bytes) -> ChunkFacts:
    """What an event says. Raises ``UpstreamError`` for one that is no chunk."""
    try:
        return read_chunk(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        text = f"The upstream sent an event that cannot be read: {error}"
        raise UpstreamError(text, status=502, type="server_error") from None
