"""Embeddings propose pairs; the fact guard decides."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from factories_reducer import BrokenEncoder, HashEncoder, make_parts, make_passages, make_reducer

from reducer.config import DedupConfig, RankConfig, ReducerConfig
from reducer.prompt import Budget, Caller, Passage
from reducer.result import ReductionResult
from reducer.semantic import merge_similar, propose_similar
from reducer.stage import Candidate, Filtered, StageOutcome

NUMERALS = ("到场人数三百二十人，二〇二五年五月三日，耗资一万二千元。", "到场人数320人，2025年5月3日，耗资12000元。")


class SameEncoder:
    """Every text has the same vector, so every pair is proposed."""

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed texts, shape (n, 2)."""
        return np.tile(np.asarray([[1.0, 0.0]], dtype=np.float32), (len(texts), 1))


class NanEncoder:
    """An encoder that returns no numbers."""

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed texts, shape (n, 2)."""
        return np.full((len(texts), 2), np.nan, dtype=np.float32)


def candidates(passages: Sequence[Passage]) -> list[Candidate]:
    return [Candidate(passage, position, 1, 1, (passage.id,)) for position, passage in enumerate(passages)]


def merged(outcome: StageOutcome[Candidate]) -> dict[str, str | None]:
    return {gone.candidate.passage.id: gone.merged_into for gone in outcome.filtered}


def test_same_statement_in_other_characters_is_merged() -> None:
    outcome = merge_similar(candidates(make_passages(*NUMERALS)), DedupConfig(), RankConfig(), SameEncoder())
    assert merged(outcome) == {"d2": "d1"}
    assert outcome.kept[0].sources == ("d1", "d2")
    assert outcome.degraded is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Enable two-factor login in the settings.", "Disable two-factor login in the settings."),
        ("The plan costs 240 dollars a year.", "The plan costs 480 dollars a year."),
        ("The contract is valid.", "The contract is not valid."),
        ("Anna Weber leads the project.", "Dana Weber leads the project."),
    ],
)
def test_neighbours_that_state_something_else_stay(first: str, second: str) -> None:
    outcome = merge_similar(candidates(make_passages(first, second)), DedupConfig(), RankConfig(), SameEncoder())
    assert merged(outcome) == {}


def test_a_passage_takes_along_what_it_stands_for_only_if_the_survivor_states_that_too() -> None:
    first, second = candidates(make_passages(*NUMERALS))
    standing = replace(second, sources=("d2", "x"))
    for text, expected in (("到场人数320人", {"d2": "d1"}), (NUMERALS[1] + "天气很好。", {"d1": "d2"})):
        gone = Filtered(Candidate(Passage(id="x", text=text), 2, 1, 1, ("x",)), "merged", "", "d2")
        outcome = merge_similar([first, standing], DedupConfig(), RankConfig(), SameEncoder(), earlier=[gone])
        assert merged(outcome) == expected
        assert set(outcome.kept[0].sources) == {"d1", "d2", "x"}


@pytest.mark.parametrize("encoder", [BrokenEncoder(), NanEncoder()])
def test_a_failing_encoder_costs_only_its_pairs(encoder: BrokenEncoder | NanEncoder) -> None:
    outcome = merge_similar(candidates(make_passages(*NUMERALS)), DedupConfig(), RankConfig(), encoder)
    assert len(outcome.kept) == 2
    assert outcome.degraded is not None
    assert "copies found by their characters only" in outcome.degraded


def test_a_missing_encoder_is_said() -> None:
    outcome = merge_similar(candidates(make_passages(*NUMERALS)), DedupConfig(), RankConfig(), None)
    assert outcome.degraded == "no encoder: copies found by their characters only"


@pytest.mark.parametrize(
    ("dedup", "rank"),
    [
        (DedupConfig(semantic=False), RankConfig()),
        (DedupConfig(enabled=False), RankConfig()),
        (DedupConfig(), RankConfig(semantic_weight=0.0)),
    ],
)
def test_switched_off_embeds_nothing(dedup: DedupConfig, rank: RankConfig) -> None:
    encoder = HashEncoder()
    outcome = merge_similar(candidates(make_passages(*NUMERALS)), dedup, rank, encoder)
    assert (len(outcome.kept), outcome.degraded, encoder.texts) == (2, None, [])


def test_long_passages_are_left_to_the_characters() -> None:
    long = " ".join(f"Sentence number {n} says {n}." for n in range(2000))
    outcome = merge_similar(candidates(make_passages(long, *NUMERALS)), DedupConfig(), RankConfig(), SameEncoder())
    assert merged(outcome) == {"d3": "d2"}
    assert outcome.degraded == "1 long passages compared by their characters only"
    many = candidates(make_passages(*NUMERALS))
    assert merged(merge_similar(many, DedupConfig(), RankConfig(max_embedded=1), SameEncoder())) == {}


def test_pairs_are_similar_enough_and_ordered() -> None:
    vectors = np.asarray([[1, 0], [0, 1], [0.8, 0.6], [1, 0]], dtype=np.float32)
    assert propose_similar(vectors, DedupConfig(min_similarity=0.7)) == [(0, 3), (0, 2), (2, 3)]
    assert propose_similar(vectors[:1], DedupConfig()) == []


def reduce_with(encoder: HashEncoder, *, semantic: bool) -> ReductionResult:
    texts = [f"House {n} has a canteen that serves soup on day {n} of the week." for n in range(30)]
    windows = [
        Passage(id="w1", text="The vault opens with the word heron. It was built in 1912 by the council.", source="s"),
        Passage(id="w2", text="It was built in 1912 by the council. " + "It holds gold. " * 120, source="s"),
    ]
    reducer = make_reducer(
        ReducerConfig(min_prompt_tokens=0, dedup=DedupConfig(semantic=semantic, min_overlap_chars=20)), encoder=encoder
    )
    parts = make_parts("Which word opens the vault?", passages=[*make_passages(*texts), *windows])
    return reducer.reduce(parts, budget=Budget(2000, "request"), caller=Caller())


def test_nothing_is_embedded_that_ranking_does_not_embed_anyway() -> None:
    with_pairs, without = HashEncoder(), HashEncoder()
    first, second = reduce_with(with_pairs, semantic=True), reduce_with(without, semantic=False)
    assert set(with_pairs.texts) == set(without.texts)
    assert first.messages == second.messages
