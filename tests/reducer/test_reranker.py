"""The cross-encoder: what it gives the ranking, and what it must not cost. The model is tiny, with random weights."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from factories_models import model_path, needs_model
from factories_reducer import HashEncoder, WordCounter, make_parts, make_passages

from reducer.config import RankConfig, ReducerConfig
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller
from reducer.rank import Query, rank
from reducer.reranker import CrossEncoderReranker
from reducer.run import make_candidate

QUESTION = "Which unit failed the pressure test?"
FACTS = make_passages("Unit QX-417-KD passed.", "Unit QX-471-KD failed.", "Bread is free.")


class Judge:
    """Finds relevant what holds a word."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.read: list[str] = []

    def score(self, question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        self.read.extend(texts)
        return np.asarray([0.9 if self.word in text else 0.1 for text in texts], dtype=np.float32)


class BrokenJudge:
    def score(self, question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        raise RuntimeError("out of memory")


class SpoiltJudge:
    def score(self, question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.full(len(texts), np.nan, dtype=np.float32)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder folder with the tokenizer of the default encoder."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("cross-encoder")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=1,
        initializer_range=0.5,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config.num_labels = 2
    BertForSequenceClassification(config).save_pretrained(folder / "two")
    tokenizer.save_pretrained(folder / "two")
    return folder


@needs_model
def test_scores_lie_between_0_and_1_and_do_not_follow_the_order(tiny_model: Path) -> None:
    texts = ["The unit failed.", "Bread is free. " * 40, "海底捞的新任首席执行官是杨利娟。", "", "The unit failed."]
    scores = CrossEncoderReranker(tiny_model).score(QUESTION, texts)
    assert scores.shape == (5,)
    assert scores.dtype == np.float32
    assert ((scores >= 0) & (scores <= 1)).all()
    assert scores[0] == scores[4]
    assert len(set(scores.tolist())) == 4
    again = CrossEncoderReranker(tiny_model).score(QUESTION, texts[::-1])
    assert again.tolist() == scores[::-1].tolist()


@needs_model
def test_model_with_several_outputs_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"must have 1 output, .* has 2"):
        CrossEncoderReranker(tiny_model / "two")


def candidates(*texts: str) -> list:
    return [make_candidate(n, passage, WordCounter()) for n, passage in enumerate(make_passages(*texts))]


TEXTS = ("Bread is free.", "The unit failed the test.", "A unit was painted.", "Trees grow in the garden.")


def test_what_the_cross_encoder_finds_relevant_comes_first() -> None:
    plain = rank(candidates(*TEXTS), Query(QUESTION), RankConfig(), HashEncoder())
    assert plain.kept[0].passage.text == TEXTS[1]
    read = rank(candidates(*TEXTS), Query(QUESTION), RankConfig(reranker_weight=1.0), HashEncoder(), Judge("Trees"))
    assert read.kept[0].passage.text == TEXTS[3]
    assert read.degraded is None


def test_only_the_best_passages_are_read_by_their_best_window() -> None:
    judge = Judge("unit")
    long_text = "Nothing is said here. " * 200 + "The unit failed the pressure test."
    rank(candidates(*TEXTS, long_text), Query(QUESTION), RankConfig(max_reranked=2), HashEncoder(), judge)
    assert len(judge.read) == 2
    assert any("pressure test" in text and len(text) < 1500 for text in judge.read)


@pytest.mark.parametrize("judge", [BrokenJudge(), SpoiltJudge()])
def test_failure_costs_only_the_share_of_the_cross_encoder(judge: BrokenJudge | SpoiltJudge) -> None:
    plain = rank(candidates(*TEXTS), Query(QUESTION), RankConfig(), HashEncoder())
    outcome = rank(candidates(*TEXTS), Query(QUESTION), RankConfig(), HashEncoder(), judge)
    assert outcome.degraded is not None
    assert outcome.degraded.startswith("reranker failed (")
    assert [(c.passage.id, c.score) for c in outcome.kept] == [(c.passage.id, c.score) for c in plain.kept]


def test_pipeline_reads_with_it_and_stops_at_the_deadline() -> None:
    judge = Judge("QX-471-KD")
    reducer = Reducer(ReducerConfig(min_prompt_tokens=0), WordCounter(), HashEncoder(), reranker=judge)
    parts = make_parts(QUESTION, passages=FACTS)
    result = reducer.reduce(parts, budget=Budget(1000, "window"), caller=Caller())
    assert judge.read
    assert not result.deadline_expired
    ticks = iter(range(10_000))
    hurried = Reducer(
        ReducerConfig(min_prompt_tokens=0),
        WordCounter(),
        HashEncoder(),
        reranker=Judge("QX-471-KD"),
        clock=lambda: float(next(ticks)),
    )
    late = hurried.reduce(parts, budget=Budget(1000, "window"), caller=Caller(), deadline_s=3.0)
    assert late.deadline_expired or any(stage.degraded for stage in late.stages)
