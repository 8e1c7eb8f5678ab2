"""What the parsers of tool calls share: text goes in as it is generated, text and whole calls come out.

A call is handed out when its last character has come, never in parts: until then nobody knows whether it is one. What
turns out to be none is given out as the text that it was. So whatever the cuts between the pieces, the same text gives
the same calls, and nothing is lost.
"""

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import msgspec


class ToolCall(NamedTuple):
    """One call that the model makes."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


class ToolParser(ABC):
    """Parses the output of one sequence. ``feed`` it, then ``finish`` it."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that mark a call; where the vocabulary has them as control tokens, the detokenizer must write them out."""

    def __init__(self, tool_names: Iterable[str]) -> None:
        """``tool_names`` are those that were offered: a call of anything else is text."""
        self._tool_names = frozenset(tool_names)
        self._buffer = ""
        self._is_at_end = False
        self.num_calls = 0
        """Calls handed out so far."""

    def feed(self, text: str) -> list[str | ToolCall]:
        """Takes text in and returns what is now certain, in order."""
        self._buffer += text
        return self._take()

    def finish(self) -> list[str | ToolCall]:
        """The rest, at the end of the output."""
        self._is_at_end = True
        return self._take()

    @staticmethod
    def make_call_id() -> str:
        """A new id for a call, of the kind that the model's template takes back."""
        return f"call_{secrets.token_hex(12)}"

    @abstractmethod
    def _parse(self) -> Iterable[str | ToolCall]:
        """Cuts what is certain off the front of ``_buffer``."""

    def _take(self) -> list[str | ToolCall]:
        pieces: list[str | ToolCall] = []
        for piece in self._parse():
            if isinstance(piece, ToolCall):
                self.num_calls += 1
            elif self.num_calls and not piece.strip():
                continue  # the white space between calls and behind them belongs to their format
            elif pieces and isinstance(pieces[-1], str):
                pieces[-1] += piece
                continue
            if piece:
                pieces.append(piece)
        return pieces

    def _calls_in(self, text: str, *, needs_arguments: bool = False) -> list[ToolCall] | None:
        """The call in a JSON object, or those in an array of them; ``None`` for anything else."""
        try:
            found = msgspec.json.decode(text, type=_WrittenCall | list[_WrittenCall])
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            return None
        calls: list[ToolCall] = []
        for written in found if isinstance(found, list) else [found]:
            arguments = bytes(written.arguments or written.parameters).decode()
            if not arguments and needs_arguments:
                return None
            call = self._call(written.name, arguments or "{}")
            if call is None:
                return None
            calls.append(call)
        return calls or None

    def _call(self, name: str, arguments: str) -> ToolCall | None:
        """The call of an offered tool with an object as arguments, else ``None``."""
        text = object_text(arguments)
        return ToolCall(name, text) if name in self._tool_names and text is not None else None


class _WrittenCall(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def object_text(text: str) -> str | None:
    """``text`` where it is a JSON object, the object inside where it is a JSON string that holds one, else ``None``."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text, value = value, json.loads(value)
    except (ValueError, RecursionError):
        return None
    return text.strip() if isinstance(value, dict) else None


_OUTSIDE_STRINGS = frozenset(" \t\r\n,:+-." + string.ascii_letters + string.digits)


class JsonScanner:
    """Finds the end of a JSON object or array in text that grows at its end, and looks at every character once."""

    def __init__(self) -> None:
        self._position = 0
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def end_of_value(self, text: str) -> int | None:
        """Where the object or array at the start of ``text`` ends: ``None`` not yet, the place of what is no JSON.

        ``text`` begins with that of the calls before.
        """
        for position in range(self._position, len(text)):
            character = text[position]
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = character == "\\"
                self._is_in_string = character != '"'
            elif character == '"':
                self._is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
            elif character not in _OUTSIDE_STRINGS:
                return position
        self._position = len(text)
        return None


def num_held(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``, white space before it included."""
    length = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return length + len(text[: len(text) - length]) - len(text[: len(text) - length].rstrip())
