"""Calls that a marker begins, with text before it: what the formats of Hermes and Mistral have in common."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from engine.tool_parsers.base import JsonScanner, ToolCall, ToolParser, num_held


class MarkedToolParser(ToolParser):
    """Text up to ``begin``, then one JSON value, then text again.

    state     outside ──begin──▶ inside ──value ends──▶ closing ──▶ outside
    gives     text               calls, or text         nothing
    """

    begin: ClassVar[str]
    end: ClassVar[str] = ""
    """Stands behind the value; may be missing, since models stop before it."""

    def __init__(self, tool_names: Iterable[str]) -> None:
        super().__init__(tool_names)
        self._scanner: JsonScanner | None = None
        self._space = ""  # before the marker; belongs to the text if there is no call
        self._is_inside = False
        self._is_closing = False

    @abstractmethod
    def _start_of_value(self, text: str) -> int | None:
        """Where the JSON value starts in the text behind ``begin``: ``None`` not yet, -1 never."""

    @abstractmethod
    def _read(self, head: str, value: str) -> list[ToolCall] | None:
        """The calls in a value and what stands before it; ``None`` where it is none."""

    def _parse(self) -> Iterable[str | ToolCall]:
        while True:
            if self._is_closing:
                if not self._skip_end():
                    return
            elif self._is_inside:
                pieces = self._parse_inside()
                if pieces is None:
                    return
                yield from pieces
            else:
                place = self._buffer.find(self.begin)
                if place < 0:
                    num_certain = len(self._buffer)
                    num_certain -= 0 if self._is_at_end else num_held(self._buffer, self.begin)
                    text, self._buffer = self._buffer[:num_certain], self._buffer[num_certain:]
                    yield text
                    return
                text = self._buffer[:place].rstrip()
                self._space = self._buffer[len(text) : place]
                yield text
                self._buffer = self._buffer[place + len(self.begin) :]
                self._is_inside = True

    def _parse_inside(self) -> list[str | ToolCall] | None:
        """What the value has become; ``None`` while it is not complete."""
        start = self._start_of_value(self._buffer)
        if start is None:
            return self._give_up(len(self._buffer)) if self._is_at_end else None
        if start < 0:
            return self._give_up(0)
        self._scanner = self._scanner or JsonScanner()
        end = self._scanner.end_of_value(self._buffer[start:])
        if end is None:
            return self._give_up(len(self._buffer)) if self._is_at_end else None
        calls = self._read(self._buffer[:start], self._buffer[start : start + end])
        if calls is None:
            return self._give_up(start + end)
        self._buffer = self._buffer[start + end :]
        self._scanner, self._is_inside, self._is_closing = None, False, True
        return list(calls)

    def _give_up(self, length: int) -> list[str | ToolCall]:
        """It was text, up to ``length`` behind the marker."""
        text, self._buffer = self._space + self.begin + self._buffer[:length], self._buffer[length:]
        self._scanner, self._is_inside = None, False
        return [text]

    def _skip_end(self) -> bool:
        """Drops what closes a call; whether it is known what follows."""
        rest = self._buffer.lstrip()
        if rest.startswith(self.end):
            self._buffer = rest[len(self.end) :] if self.end else self._buffer
        elif self.end.startswith(rest):  # so far the beginning of it
            if not self._is_at_end:
                return False
            self._buffer = ""
        self._is_closing = False
        return True
