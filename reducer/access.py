"""Access: passages the caller may not read leave before any other stage sees them; only their number stays."""

from collections.abc import Sequence
from typing import NamedTuple

from reducer.prompt import AccessRule, Caller, Passage


class Readable(NamedTuple):
    """What the caller may read: ``(place in the request, passage)`` in request order, and how many were denied."""

    passages: tuple[tuple[int, Passage], ...]
    num_denied: int


def can_read(passage: Passage, caller: Caller) -> bool:
    """Whether the passage's rule admits the caller's groups; a plain list is ``any_of``. A denied group goes first."""
    acl = passage.acl
    rule = acl if isinstance(acl, AccessRule) else AccessRule(any_of=acl)
    if not caller.groups.isdisjoint(rule.deny):
        return False
    if rule.any_of is None and not rule.all_of:
        return not caller.deny_unlabelled
    has_one = rule.any_of is None or not caller.groups.isdisjoint(rule.any_of)
    return has_one and caller.groups.issuperset(rule.all_of)


def filter_readable(passages: Sequence[Passage], caller: Caller) -> Readable:
    """Keep what the caller may read."""
    readable = tuple((position, passage) for position, passage in enumerate(passages) if can_read(passage, caller))
    return Readable(readable, len(passages) - len(readable))
