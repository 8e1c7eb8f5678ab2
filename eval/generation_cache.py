"""Generations that an earlier run made from the very same messages; a resumed or repeated run need not make them again.

The key is the messages that the model sees, not the request: another reduction of the same case is another prompt. The
times of a cached answer are those of the day it was made, so they stay out of the tables.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eval.errors import DataError
from eval.gateway import Generation


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    generation: dict[str, Any]


class GenerationCache:
    """A file of lines, each one generation; only ever appended to."""

    def __init__(self, path: Path, server: Mapping[str, Any]) -> None:
        """``server`` is what the answers depend on beside the messages: model, window, configuration.

        Raises DataError if a line other than a cut last one cannot be read.
        """
        self._path = path
        self._server = dict(server)
        self._found: dict[str, dict[str, Any]] = {}
        if path.is_file():
            self._load()

    def __len__(self) -> int:
        return len(self._found)

    def key(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> str:
        """What a generation is found by."""
        whole = {"server": self._server, "messages": list(messages), "max_tokens": max_tokens}
        return hashlib.sha256(msgspec.json.encode(whole, order="sorted")).hexdigest()

    def get(self, key: str) -> Generation | None:
        """The generation, or ``None``."""
        found = self._found.get(key)
        return None if found is None else Generation(**found)

    def put(self, key: str, generation: Generation) -> None:
        """Remembers and writes it."""
        fields = msgspec.to_builtins(generation)
        self._found[key] = fields
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(_Line(key=key, generation=fields)) + b"\n")

    def _load(self) -> None:
        lines = self._path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                decoded = msgspec.json.decode(line, type=_Line)
            except msgspec.DecodeError as error:
                if number == len(lines):
                    return  # the run was ended while it wrote this line
                raise DataError(f"{self._path}, line {number}: {error}") from None
            self._found[decoded.key] = decoded.generation
