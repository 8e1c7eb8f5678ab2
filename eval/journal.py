"""What a run has finished so far, so that it can be ended and taken up again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from eval.errors import DataError
from eval.records import CaseRecord


class Journal:
    """A file of finished cases; its first line says which run they belong to."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Opens ``path`` or begins it. ``fresh`` leaves out what is there.

        Raises DataError if it belongs to another run: cases of two runs must not be mixed.
        """
        self._path = path
        self.done: dict[str, CaseRecord] = {}
        header = msgspec.json.encode(dict(identity), order="sorted")
        if path.is_file() and not fresh:
            self._load(header)
        else:
            path.write_bytes(header + b"\n")

    def add(self, record: CaseRecord) -> None:
        """One more case is finished."""
        self.done[record.id] = record
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        """The run is complete and its result written: nothing is left to take up."""
        self._path.unlink(missing_ok=True)

    def _load(self, header: bytes) -> None:
        first, *lines = self._path.read_bytes().split(b"\n")
        if first != header:
            raise DataError(f"{self._path} belongs to another run ({_differences(first, header)}); --fresh begins anew")
        whole = len(first) + 1
        for number, line in enumerate(lines, start=2):
            if not line:
                continue
            try:
                record = msgspec.json.decode(line, type=CaseRecord)
            except msgspec.DecodeError as error:
                if number == len(lines) + 1:
                    self._cut(whole)  # ended while it wrote this line
                    return
                raise DataError(f"{self._path}, line {number}: {error}") from None
            whole += len(line) + 1
            self.done[record.id] = record

    def _cut(self, size: int) -> None:
        with self._path.open("r+b") as file:
            file.truncate(size)


def _differences(first: bytes, second: bytes) -> str:
    try:
        one = msgspec.json.decode(first, type=dict[str, Any])
        other = msgspec.json.decode(second, type=dict[str, Any])
    except msgspec.DecodeError:
        return "its first line cannot be read"
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return "other " + ", ".join(names)
