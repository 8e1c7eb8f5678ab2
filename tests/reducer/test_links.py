"""Passages reached through names and sources."""

from collections.abc import Sequence

import numpy as np
import pytest
from factories_reducer import HashEncoder

from reducer.config import RankConfig
from reducer.links import link_gains, mentions, named_in, read_names, subject
from reducer.prompt import Passage
from reducer.rank import Query, rank
from reducer.stage import Candidate

JAWS = Passage(id="jaws", title="Jaws (film)", text="Jaws is a thriller directed by Steven Spielberg.", source="w:jaws")
SPIELBERG = Passage(id="s", title="Steven Spielberg", text="He was born in Cincinnati, Ohio.", source="w:spielberg")
OTHERS = tuple(
    Passage(id=f"o{n}", title=f"Town {n}", text=f"Town number {n} was founded and born in {1800 + n}.", source=f"w:{n}")
    for n in range(8)
)


def candidates(passages: Sequence[Passage]) -> list[Candidate]:
    return [Candidate(passage, position, 10, 1, (passage.id,)) for position, passage in enumerate(passages)]


@pytest.mark.parametrize(
    ("title", "text", "name"),
    [
        ("Jaws (film)", "x", "jaws"),
        (None, "Steven Spielberg is a director.", "steven spielberg"),
        (None, "# Oral Argument\nYou would need", "oral argument"),
        (None, "nothing begins with a name", ""),
        (None, "The river is long", ""),
        ("1990", "x", ""),
        ("It", "x", ""),
        ("故宫", "x", "故宫"),
        ("x" * 200, "y", ""),
    ],
)
def test_subject(title: str | None, text: str, name: str) -> None:
    assert subject(title, text) == name


def test_names_are_found_as_whole_words() -> None:
    assert mentions("directed by steven spielberg.", "steven spielberg")
    assert not mentions("the jawsome shark", "jaws")
    assert mentions("the jawsome shark of jaws", "jaws")
    assert mentions("我昨天去了故宫博物院", "故宫")


def test_passage_named_by_the_best_one_comes_second() -> None:
    outcome = rank(
        candidates((*OTHERS, SPIELBERG, JAWS)), Query("Where was the director of the film Jaws born?"), RankConfig(),
        HashEncoder(),
    )  # fmt: skip
    assert [c.passage.id for c in outcome.kept[:2]] == ["jaws", "s"]
    assert {c.passage.id for c in outcome.kept if c.is_linked} == {"jaws", "s"}


def test_link_gains_go_forward_in_full_and_backward_by_half() -> None:
    both = candidates((JAWS, SPIELBERG, OTHERS[0]))
    config = RankConfig(link_weight=0.5, num_link_sources=1)
    forward = link_gains(both, read_names(both), np.asarray([1.0, 0.2, 0.1], dtype=np.float32), config)
    np.testing.assert_allclose(forward.scores, [0, 0.5, 0])
    backward = link_gains(both, read_names(both), np.asarray([0.2, 1.0, 0.1], dtype=np.float32), config)
    np.testing.assert_allclose(backward.scores, [0.25, 0, 0])


def test_heading_shared_by_sources_is_no_name() -> None:
    passages = candidates(
        [Passage(id=str(n), title="Results", text="Results are shown.", source=f"paper {n}") for n in range(3)]
    )
    assert set(read_names(passages).subjects) == {""}


def test_name_mentioned_everywhere_does_not_link() -> None:
    england = Passage(id="e", title="England", text="A country.", source="w:e")
    passages = candidates([england, *(Passage(id=str(n), text=f"in england {n}", source=str(n)) for n in range(6))])
    gains = link_gains(passages, read_names(passages), np.asarray([0.1, *[1.0] * 6], dtype=np.float32), RankConfig())
    assert not any(gains.is_linked)


def test_few_siblings_of_one_source_gain() -> None:
    passages = candidates(
        [Passage(id=str(n), text=f"text {n}", source="paper" if n < 2 else f"other {n}") for n in range(6)]
    )
    scores = np.asarray([1.0, 0.1, 0.1, 0.1, 0.1, 0.1], dtype=np.float32)
    gains = link_gains(passages, read_names(passages), scores, RankConfig(sibling_weight=0.4, num_link_sources=1))
    np.testing.assert_allclose(gains.scores, [0, 0.4, 0, 0, 0, 0])
    assert not any(gains.is_linked)


def test_one_source_of_everything_links_nothing() -> None:
    passages = candidates([Passage(id=str(n), text=f"text {n}", source="paper") for n in range(6)])
    gains = link_gains(passages, read_names(passages), np.ones(6, dtype=np.float32), RankConfig())
    np.testing.assert_allclose(gains.scores, np.zeros(6))


def test_subject_named_in_the_question() -> None:
    passages = candidates((JAWS, SPIELBERG))
    np.testing.assert_array_equal(named_in("Who directed JAWS?", read_names(passages)), [1, 0])


@pytest.mark.parametrize(
    "text",
    ["Professor D: Mm - hmm .\nPhD A: Um, the net.", "Anna: I think so.", "经理：我同意。\n员工：好的。"],
)
def test_who_speaks_is_no_subject(text: str) -> None:
    assert subject(None, text) == ""
