"""Scores and their fusion."""

from collections.abc import Sequence

import numpy as np
import pytest
from factories_reducer import BrokenEncoder, HashEncoder, make_passages

from reducer.config import RankConfig
from reducer.encoder import Encoder, FloatArray
from reducer.lexical import words
from reducer.prompt import Passage
from reducer.rank import Query, rank, weigh
from reducer.stage import Candidate


def ranked(
    passages: tuple[Passage, ...], question: str, *, encoder: Encoder | None = None, config: RankConfig | None = None,
    context: str = "",
) -> list[str]:  # fmt: skip
    outcome = rank(as_candidates(passages), Query(question, context), config or RankConfig(), encoder)
    return [c.passage.id for c in outcome.kept]


def as_candidates(passages: tuple[Passage, ...]) -> list[Candidate]:
    return [Candidate(passage, position, 1, 1, (passage.id,)) for position, passage in enumerate(passages)]


def test_identifier_is_found_exactly() -> None:
    passages = make_passages("Unit QX-417-KD passed the test.", "Unit QX-471-KD failed the test.")
    assert ranked(passages, "What about QX-471-KD?", encoder=HashEncoder())[0] == "d2"


def test_without_encoder_bm25_ranks_and_says_so() -> None:
    outcome = rank(as_candidates(make_passages("dogs bark", "cats purr")), Query("cats"), RankConfig(), None)
    assert outcome.kept[0].passage.id == "d2"
    assert outcome.degraded == "no encoder: ranked by BM25"


def test_failing_encoder_costs_only_its_share() -> None:
    outcome = rank(as_candidates(make_passages("dogs bark", "cats purr")), Query("cats"), RankConfig(), BrokenEncoder())
    assert outcome.kept[0].passage.id == "d2"
    assert outcome.degraded == "encoder failed (RuntimeError): ranked by BM25"


@pytest.mark.parametrize(("low", "high"), [(-10.0, 3.0), (0.0, 1.0), (200.0, 900.0)])
def test_scale_of_the_retriever_does_not_matter(low: float, high: float) -> None:
    shares = (0.2, 1.0, 0.0, 0.7)
    passages = tuple(
        Passage(id=str(n), text=f"text number {n}", score=low + share * (high - low)) for n, share in enumerate(shares)
    )
    outcome = rank(as_candidates(passages), Query("something else"), RankConfig(), HashEncoder())
    assert outcome.kept[0].passage.id == "1"
    np.testing.assert_allclose(
        [c.score for c in outcome.kept],
        [c.score for c in rank(as_candidates(tuple(
            Passage(id=str(n), text=f"text number {n}", score=share) for n, share in enumerate(shares)
        )), Query("something else"), RankConfig(), HashEncoder()).kept],
        atol=1e-5,
    )  # fmt: skip


def test_scores_lie_between_0_and_1_and_ties_keep_the_order() -> None:
    outcome = rank(as_candidates(make_passages("same", "same", "same")), Query("other"), RankConfig(), HashEncoder())
    assert [c.passage.id for c in outcome.kept] == ["d1", "d2", "d3"]
    assert all(0 <= (c.score or 0) <= 1 for c in outcome.kept)


def test_long_passage_counts_as_much_as_its_best_window() -> None:
    filler = "Nothing of interest is said in this sentence at all. " * 200
    passages = make_passages(filler, filler + "The zebra ate the violin.", filler)
    encoder = HashEncoder()
    assert ranked(passages, "What did the zebra eat?", encoder=encoder)[0] == "d2"
    assert max(map(len, encoder.texts)) <= 1200


def test_short_follow_up_leans_on_the_turn_before() -> None:
    passages = make_passages("Paris is the capital of France.", "Rome is the capital of Italy.")
    assert ranked(passages, "And its population?", context="Tell me about Italy and Rome")[0] == "d2"


def test_no_candidates() -> None:
    assert rank([], Query("x"), RankConfig(), None).kept == ()


def test_only_the_lexically_best_of_very_many_are_embedded() -> None:
    class CountingEncoder(HashEncoder):
        num_texts = 0

        def encode(self, texts: Sequence[str]) -> FloatArray:
            self.num_texts += len(texts)
            return super().encode(texts)

    encoder = CountingEncoder()
    passages = make_passages(*(f"Filler number {i} says nothing." for i in range(40)), "The heron opens the vault.")
    ranked = rank(
        as_candidates(passages), Query("Which word opens the vault?"), RankConfig(max_embedded=5), encoder
    ).kept
    assert ranked[0].passage.id == "d41"
    assert len(ranked) == 41
    assert encoder.num_texts == 5 + 1  # and the question


def test_words_count_half_among_code() -> None:
    plain, code = (
        weigh(Query("how to sort a list"), RankConfig()),
        weigh(Query("how to sort a list"), RankConfig(), is_code=True),
    )
    assert code.lexical_weight == plain.lexical_weight / 2
    assert code.lexical_weight + code.semantic_weight == pytest.approx(plain.lexical_weight + plain.semantic_weight)


def test_a_request_reads_the_words_of_a_passage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr("reducer.rank.words", lambda text: read.append(text) or words(text))
    query = Query("Where is the harbour?")
    candidates = as_candidates(make_passages("The harbour is in Oslo.", "The market is open."))
    first = rank(candidates, query, RankConfig(), None)
    assert rank(candidates, query, RankConfig(), None) == first
    assert len(read) == len(set(read)) > 0


def test_words_count_less_where_passages_hold_few_of_the_question() -> None:
    query = Query("how to sort a list")
    full, half, none = (weigh(query, RankConfig(), coverage=share) for share in (0.4, 0.3, 0.1))
    assert full == weigh(query, RankConfig())
    assert half.lexical_weight == pytest.approx(full.lexical_weight / 2)
    assert none.lexical_weight == 0
    assert none.lexical_weight + none.semantic_weight == pytest.approx(full.lexical_weight + full.semantic_weight)


def test_a_question_that_no_passage_words_alike_is_answered_by_meaning() -> None:
    class Meaning:
        """Takes the second passage for what is asked, the first one for something near it."""

        def encode(self, texts: Sequence[str]) -> FloatArray:
            return np.asarray([[0.7, 0.7141] if "lunch" in text else [1.0, 0.0] for text in texts], np.float32)

    passages = make_passages("the talk came to the weather and to lunch.", "they chose rubber for the case.")
    long_question = "Summarise the talk concerning components, materials, shapes, colours and ergonomics"
    assert ranked(passages, long_question, encoder=Meaning()) == ["d2", "d1"]
    assert ranked(passages, "What about the talk?", encoder=Meaning()) == ["d1", "d2"]
