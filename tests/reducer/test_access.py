"""Who may read a passage."""

import pytest

from reducer.access import filter_readable
from reducer.prompt import Caller, Passage


@pytest.mark.parametrize(
    ("acl", "groups", "deny_unlabelled", "readable"),
    [
        (("staff",), {"staff", "public"}, False, True),
        (("staff", "board"), {"staff"}, False, True),
        (("board",), {"staff"}, False, False),
        (("Staff",), {"staff"}, False, False),
        ((), {"staff"}, False, False),
        (None, set(), False, True),
        (None, {"staff"}, True, False),
        (("staff",), {"staff"}, True, True),
    ],
)
def test_acl(acl: tuple[str, ...] | None, groups: set[str], deny_unlabelled: bool, readable: bool) -> None:
    caller = Caller(groups=frozenset(groups), deny_unlabelled=deny_unlabelled)
    result = filter_readable([Passage(id="a", text="x", acl=acl)], caller)
    assert len(result.passages) == readable
    assert result.num_denied == (not readable)


def test_places_in_the_request_are_kept() -> None:
    passages = [Passage(id="a", text="x", acl=("board",)), Passage(id="b", text="y")]
    assert filter_readable(passages, Caller()).passages == ((1, passages[1]),)
