"""Traffic traces: when requests came, how long they were, which prompts began alike. No text.

One JSON object a line: ``{"t", "input_tokens", "output_tokens", "prefix_blocks", "block_tokens", "session"}``. Equal
ids in ``prefix_blocks`` mean equal prompts up to and including that block. ``anonymise`` makes a trace from a log that
holds the prompts: a block's id is a keyed hash of the block and of the id before it, so without the key nobody can look
up whether a known text is in the trace, and ids of two traces say nothing about each other.
"""

import gzip
import hashlib
import hmac
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from eval.errors import DataError
from eval.readers.base import Row, read_rows, stored_bytes

BYTES_PER_TOKEN = 4
"""Where a log names no token counts and no tokenizer is given."""
_ID_BITS = 52  # exact in JSON readers that know doubles only

_TIMES = ("t", "timestamp", "time", "created", "created_at", "start_time", "startTime", "arrival")
_PROMPTS = ("messages", "prompt", "input", "input_messages")
_OUTPUTS = ("response", "output", "completion", "choices")
_SESSIONS = ("session", "session_id", "conversation_id", "tenant", "user")


class TraceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace."""

    t: float
    """Arrival in seconds since the start."""
    input_tokens: int
    output_tokens: int
    prefix_blocks: list[int] | None = None
    block_tokens: int | None = None
    session: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of one file, by arrival."""

    name: str
    sha256: str
    lines: list[TraceLine]


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Reads a trace, gzip or not; requests without input are left out.

    Raises DataError naming the file and the line at fault.
    """
    content = stored_bytes(path)
    lines: list[TraceLine] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            lines.append(msgspec.json.decode(line, type=TraceLine))
        except msgspec.DecodeError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    if not lines:
        raise DataError(f"{path}: holds no request")
    lines = sorted((item for item in lines if item.input_tokens > 0), key=lambda item: item.t)
    return Trace(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), lines[:limit])


def write_trace(path: Path, lines: Sequence[TraceLine]) -> None:
    """Writes a trace, packed if the name ends with ``.gz``."""
    content = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


@dataclass(slots=True)
class Anonymiser:
    """Turns log entries into trace lines; nothing but lengths, times and keyed hashes leaves it."""

    salt: bytes
    """Key of the hashes; drawn for one trace and thrown away."""
    block_tokens: int = 64
    encode: Callable[[str], Sequence[int]] | None = None
    """Text to token ids; without it a block is ``4 * block_tokens`` bytes."""
    _sessions: dict[str, int] = field(default_factory=dict)

    def lines(self, path: Path) -> list[TraceLine]:
        """The trace of a log. Raises DataError naming the entry that has no time or no prompt."""
        found = [self._line(row, f"{path}, entry {place}") for place, row in enumerate(read_rows(path), start=1)]
        if not found:
            raise DataError(f"{path}: holds no request")
        start = min(line.t for line in found)
        shifted = [msgspec.structs.replace(line, t=round(line.t - start, 3)) for line in found]
        return sorted(shifted, key=lambda line: line.t)

    def _line(self, row: Row, where: str) -> TraceLine:
        request: Row = row["request"] if isinstance(row.get("request"), dict) else row
        answer: Row = row["response"] if isinstance(row.get("response"), dict) else row
        prompt = _first(request, _PROMPTS)
        time = _first(row, _TIMES)
        usage: Mapping[str, Any] = _first(answer, ("usage",)) or _first(row, ("usage",)) or {}
        known = usage.get("prompt_tokens", row.get("input_tokens"))
        if time is None:
            raise DataError(f"{where}: none of the fields {', '.join(_TIMES)}")
        if prompt is None and known is None:
            raise DataError(f"{where}: neither a prompt ({', '.join(_PROMPTS)}) nor usage.prompt_tokens")
        text = "" if prompt is None else _plain(prompt)
        units = self._units(text)
        blocks = list(self._chain(units)) if text else None
        output = usage.get("completion_tokens", row.get("output_tokens"))
        if output is None:
            output = self._num_tokens(_plain(_first(answer, _OUTPUTS) or ""))
        return TraceLine(
            t=_seconds(time, where),
            input_tokens=int(known if known is not None else self._num_tokens(text)),
            output_tokens=max(1, int(output)),
            prefix_blocks=blocks,
            block_tokens=None if blocks is None else self.block_tokens,
            session=self._session(_first(row, _SESSIONS)),
        )

    def _units(self, text: str) -> list[bytes]:
        """The text in blocks."""
        if self.encode is not None:
            ids, size = self.encode(text), self.block_tokens
            return [repr(list(ids[start : start + size])).encode() for start in range(0, len(ids), size)]
        raw, size = text.encode(), self.block_tokens * BYTES_PER_TOKEN
        return [raw[start : start + size] for start in range(0, len(raw), size)]

    def _chain(self, units: Sequence[bytes]) -> Iterator[int]:
        parent = b""
        for unit in units:
            parent = hmac.digest(self.salt, parent + unit, "sha256")
            yield int.from_bytes(parent[:8], "big") >> (64 - _ID_BITS)

    def _num_tokens(self, text: str) -> int:
        if self.encode is not None:
            return len(self.encode(text))
        return math.ceil(len(text.encode()) / BYTES_PER_TOKEN)

    def _session(self, value: Any) -> int | None:
        return None if value is None else self._sessions.setdefault(str(value), len(self._sessions))


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _plain(value: Any) -> str:
    """A prompt as one text in which equal beginnings of conversations are equal beginnings."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(
            f"<{item.get('role', '')}>{_plain(item.get('content') or item.get('message') or item.get('text') or '')}"
            if isinstance(item, dict)
            else str(item)
            for item in value
        )
    if isinstance(value, dict):
        return _plain(value.get("content") or value.get("text") or value.get("choices") or "")
    return str(value)


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, int | float):
        return float(value) / (1000.0 if value > 1e11 else 1.0)  # milliseconds since 1970, or seconds
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()
    except ValueError:
        pass
    try:
        return float(value)
    except (TypeError, ValueError):
        raise DataError(f"{where}: {value!r} is no time") from None
