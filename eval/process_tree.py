"""Processes below another one, as ``/proc`` knows them."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> Iterator[int]:
    """The processes that ``pid`` started, by any of its threads; none where it is gone or there is no ``/proc``."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())


def descendants(pid: int) -> Iterator[int]:
    """The processes that ``pid`` started, directly or not, each before those below it."""
    for child in children(pid):
        yield child
        yield from descendants(child)
