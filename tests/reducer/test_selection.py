"""Noise, order and budget of the selection."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from factories_reducer import HashEncoder, WordCounter

from reducer.config import RankConfig, SelectionConfig
from reducer.passage_extracts import Extractor
from reducer.prompt import Passage
from reducer.rank import Query
from reducer.selection import SelectionOutcome, budget_freedom, by_gain_per_token, select, shortlist
from reducer.stage import Candidate


def candidate(name: str, score: float, num_words: int = 20, *, is_linked: bool = False) -> Candidate:
    text = " ".join([f"{name}{n}" for n in range(num_words - 1)]) + "."
    return Candidate(
        Passage(id=name, text=text), ord(name) - ord("a"), num_words, 2, (name,), score=score, is_linked=is_linked
    )


def choose(
    ranked: list[Candidate],
    allowance: int,
    rerank: Callable[[Sequence[Candidate]], Sequence[Candidate]] = lambda left: sorted(
        left, key=lambda candidate: -(candidate.score or 0.0)
    ),
    **config: object,
) -> SelectionOutcome:
    extractor = Extractor(Query("zebra"), RankConfig(), WordCounter(), HashEncoder())
    listed = shortlist(ranked, allowance, SelectionConfig(**config), rerank)  # type: ignore[arg-type]
    outcome = select(listed, allowance, 4, extractor, 16)
    return replace(outcome, filtered=(*listed.filtered, *outcome.filtered))


def kept(outcome: SelectionOutcome) -> list[str]:
    return [selected.candidate.passage.id for selected in outcome.selected]


CURVE = [candidate(name, score) for name, score in zip("abcdefgh", (1, 0.8, 0.6, 0.5, 0.3, 0.2, 0.1, 0), strict=True)]


def test_tail_of_the_score_curve_is_dropped_with_budget_to_spare() -> None:
    outcome = choose(CURVE, 10_000, relative_threshold=0.5, min_passages=0)
    assert kept(outcome) == ["a", "b", "c", "d"]
    assert not outcome.is_budget_bound
    assert outcome.filtered[0].reason == "score 0.30 below threshold 0.40"


def test_chain_of_names_keeps_more() -> None:
    linked = [*CURVE[:4], candidate("e", 0.3, is_linked=True), *CURVE[5:]]
    outcome = choose(linked, 10_000, relative_threshold=0.5, linked_threshold=0.2, min_passages=0)
    assert kept(outcome) == ["a", "b", "c", "d", "e", "f"]


def test_few_passages_stay_at_a_lower_score_and_say_so() -> None:
    outcome = choose(CURVE, 10_000, relative_threshold=0.7, min_passages=6, min_passages_threshold=0.3)
    assert kept(outcome) == ["a", "b", "c", "d", "e"]
    assert [item.reason for item in outcome.selected] == ["relevant"] * 3 + ["among the best passages"] * 2


def test_noise_is_judged_again_without_the_noise() -> None:
    rounds: list[list[str]] = []

    def rerank(left: Sequence[Candidate]) -> list[Candidate]:
        rounds.append([candidate.passage.id for candidate in left])
        return [replace(c, score=0.0 if c.passage.id == "d" else c.score) for c in left]

    outcome = choose(CURVE, 10_000, rerank, relative_threshold=0.5, min_passages=0)
    assert rounds == [["a", "b", "c", "d"], ["a", "b", "c"]]
    assert kept(outcome) == ["a", "b", "c"]


def test_tight_budget_decides_instead_of_the_threshold() -> None:
    assert kept(choose(CURVE, 4 + 23 * 4, relative_threshold=1.0)) == ["a", "b", "c", "d"]
    assert budget_freedom(CURVE, 0) == 0
    assert budget_freedom(CURVE, 23 * 4) == 0.0625
    assert budget_freedom(CURVE, 23 * 8) == budget_freedom(CURVE, 10_000) == 1


@pytest.mark.parametrize("factor", [1.0, 0.01])
def test_limits_follow_the_scale_of_the_scores(factor: float) -> None:
    ranked = [candidate(c.passage.id, (c.score or 0) * factor) for c in CURVE]
    assert kept(choose(ranked, 10_000)) == kept(choose(CURVE, 10_000))


def test_best_passage_first_then_gain_per_token() -> None:
    ranked = [candidate("a", 0.9, 400), candidate("b", 0.8, 400), candidate("c", 0.7, 40), candidate("d", 0.1, 40)]
    assert [c.passage.id for c in by_gain_per_token(ranked)] == ["a", "c", "b", "d"]


def test_passage_that_does_not_fit_is_cut_and_a_shorter_one_still_enters() -> None:
    first = candidate("a", 1.0, 30)
    long_text = "The zebra ran. " + "Nothing else is said here at all. " * 20
    long = Candidate(Passage(id="b", text=long_text), 1, 164, 2, ("b",), score=0.9)
    outcome = choose([first, long], 4 + 33 + 3 + 20)
    assert kept(outcome) == ["a", "b"]
    assert not outcome.selected[1].is_whole
    assert outcome.selected[1].num_tokens <= 20
    assert outcome.is_budget_bound


def test_nothing_fits() -> None:
    outcome = choose(CURVE[:7], 4)
    assert kept(outcome) == []
    assert {gone.reason for gone in outcome.filtered} == {"budget"}
