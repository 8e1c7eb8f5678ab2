"""Noise, order and budget of the selection."""

import pytest
from factories_reducer import HashEncoder, WordCounter

from reducer.config import RankConfig, SelectionConfig
from reducer.extraction import Extractor
from reducer.prompt import Passage
from reducer.rank import Query
from reducer.selection import SelectionOutcome, by_gain_per_token, noise_limits, select
from reducer.stage import Candidate


def candidate(name: str, score: float, num_words: int = 20, *, is_linked: bool = False) -> Candidate:
    text = " ".join([f"{name}{n}" for n in range(num_words - 1)]) + "."
    return Candidate(
        Passage(id=name, text=text), ord(name) - ord("a"), num_words, 2, (name,), score=score, is_linked=is_linked
    )


def choose(ranked: list[Candidate], allowance: int, **config: object) -> SelectionOutcome:
    extractor = Extractor(Query("zebra"), RankConfig(), WordCounter(), HashEncoder())
    return select(ranked, allowance, 4, SelectionConfig(**config), extractor)  # type: ignore[arg-type]


def kept(outcome: SelectionOutcome) -> list[str]:
    return [selected.candidate.passage.id for selected in outcome.selected]


CURVE = [candidate(name, score) for name, score in zip("abcdefgh", (1, 0.8, 0.6, 0.5, 0.3, 0.2, 0.1, 0), strict=True)]


def test_tail_of_the_score_curve_is_dropped_with_budget_to_spare() -> None:
    outcome = choose(CURVE, 10_000, relative_threshold=0.5, max_free_share=1.0)
    assert kept(outcome) == ["a", "b", "c", "d"]
    assert not outcome.is_budget_bound
    assert outcome.filtered[0].reason == "score 0.30 below threshold 0.40"


def test_chain_of_names_keeps_more() -> None:
    linked = [*CURVE[:4], candidate("e", 0.3, is_linked=True), *CURVE[5:]]
    outcome = choose(linked, 10_000, relative_threshold=0.5, linked_threshold=0.2, max_free_share=1.0)
    assert kept(outcome) == ["a", "b", "c", "d", "e", "f"]


def test_beyond_the_free_share_only_strong_passages_stay() -> None:
    strong = [candidate(name, 0.9 - 0.01 * n) for n, name in enumerate("abcdef")]
    weak = [candidate(name, 0.6) for name in "ghij"]
    outcome = choose([*strong, *weak], 10_000, max_free_share=0.3)
    assert kept(outcome) == list("abcdef")


def test_tight_budget_decides_instead_of_the_threshold() -> None:
    assert kept(choose(CURVE, 4 + 23 * 4, relative_threshold=1.0)) == ["a", "b", "c", "d"]
    assert noise_limits(CURVE, 0, SelectionConfig()).threshold == 0


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
