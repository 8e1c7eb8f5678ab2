"""Reads server-sent events from bytes that come in any pieces: an event is handed on when its last byte has come.

Lines end with LF, CR LF or CR, which may be split between two pieces; text is never decoded, so no character can be.

    b'data: {"a"'  b': 1}\\r'  b'\\n\\r\\ndata: [DO'  b'NE]\\n\\n'      ->  b'{"a": 1}'   b'[DONE]'
"""

from typing import NamedTuple

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""A longer event is no event: the stream is refused instead of filling the memory."""


class ServerEvent(NamedTuple):
    """One event: its data, lines joined by LF, and its name, empty for most."""

    data: bytes
    name: bytes = b""


class EventParser:
    """Feed it bytes, get whole events."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._name = b""
        self._num_bytes = 0
        self._is_first = True

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """The events that ``piece`` completes. Raises ValueError for one of more than ``MAX_EVENT_BYTES``."""
        if not self._rest and not self._is_first and not self._data and (events := _plain_events(piece)) is not None:
            return events
        found: list[ServerEvent] = []
        rest = self._rest
        rest += piece
        if self._is_first and len(rest) >= 3:
            self._is_first = False
            if rest.startswith(b"\xef\xbb\xbf"):
                del rest[:3]
        start = 0
        while (line_end := self._line_end(start)) is not None:
            end, following = line_end
            event = self._line(bytes(rest[start:end]))
            start = following
            if event is not None:
                found.append(event)
        del rest[:start]
        if self._num_bytes + len(rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of the stream is longer than {MAX_EVENT_BYTES} bytes")
        return found

    def _line_end(self, start: int) -> tuple[int, int] | None:
        """Where the line that begins at ``start`` ends, and where the next one begins."""
        rest = self._rest
        newline = rest.find(b"\n", start)
        carriage = rest.find(b"\r", start, None if newline < 0 else newline)
        if carriage < 0:
            return None if newline < 0 else (newline, newline + 1)
        if carriage + 1 == len(rest):
            return None  # an LF may follow
        return carriage, carriage + 2 if rest[carriage + 1] == 0x0A else carriage + 1

    def _line(self, line: bytes) -> ServerEvent | None:
        if not line:
            event = ServerEvent(b"\n".join(self._data), self._name) if self._data else None
            self._data, self._name, self._num_bytes = [], b"", 0
            return event
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._num_bytes += len(value)
        elif name == b"event":
            self._name = value
        return None


def _plain_events(piece: bytes) -> list[ServerEvent] | None:
    """The events of a piece in which all are whole and of one line of data, as nearly all servers write them.

    ``None`` for every other piece; its lines are then looked at one by one.
    """
    if not piece.endswith(b"\n\n") or b"\r" in piece:
        return None
    events = []
    for block in piece[:-2].split(b"\n\n"):
        if not block.startswith(b"data: ") or b"\n" in block:
            return None
        events.append(ServerEvent(block[6:]))
    return events
