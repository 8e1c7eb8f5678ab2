"""Remembers, across the death of the engine process, which requests it had begun to compute.

A request that was only queued can be given to the next process, and nobody notices; one that was computed may be what
killed the engine, and its client may have seen a part of the answer. The process notes each request in a file before
its first step: written with one system call, the note is there however the process ends, and the client reads it then.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec


class StartJournal:
    """The writing side, in the engine process."""

    def __init__(self, path: Path) -> None:
        """Create an empty journal that only this user can read."""
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o600)
        self._is_empty = True

    def note(self, request_ids: Iterable[str]) -> None:
        """These requests are computed from now on."""
        os.write(self._file, b"".join(msgspec.json.encode(request_id) + b"\n" for request_id in request_ids))
        self._is_empty = False

    def clear(self) -> None:
        """No request is unfinished."""
        if not self._is_empty:
            os.ftruncate(self._file, 0)
            self._is_empty = True

    def close(self) -> None:
        """Give the file back; it stays readable."""
        os.close(self._file)


def read_started(path: Path) -> set[str]:
    """The reading side: ids noted by a process that has ended; none where it did not come so far."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return set()
    return {msgspec.json.decode(line, type=str) for line in lines[:-1]}  # the last line is empty, or cut off
