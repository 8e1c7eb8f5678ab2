"""Access: passages the caller may not read leave before any other stage sees them; only their number stays."""

from collections.abc import Sequence
from typing import NamedTuple

from reducer.prompt import Caller, Passage


class Readable(NamedTuple):
    """What the caller may read: ``(place in the request, passage)`` in request order, and how many were denied."""

    passages: tuple[tuple[int, Passage], ...]
    num_denied: int


def can_read(passage: Passage, caller: Caller) -> bool:
    """Whether one of the caller's groups is listed; an empty list admits nobody, no list means unlabelled."""
    if passage.acl is None:
        return not caller.deny_unlabelled
    return not caller.groups.isdisjoint(passage.acl)


def filter_readable(passages: Sequence[Passage], caller: Caller) -> Readable:
    """Keep what the caller may read."""
    readable = tuple((position, passage) for position, passage in enumerate(passages) if can_read(passage, caller))
    return Readable(readable, len(passages) - len(readable))
