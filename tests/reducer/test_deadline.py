"""The time limit: what is left out when it passes, and that a prompt within the budget comes out in any case."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from factories_reducer import HashEncoder, WordCounter, make_parts, make_passages, reduce_parts

from reducer.config import ReducerConfig
from reducer.deadline import Deadline, DeadlineEncoder, DeadlineExpiredError
from reducer.encoder import Encoder
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller, PromptParts
from reducer.result import ReductionResult

CONFIG = ReducerConfig(min_prompt_tokens=0)
NOISE = [f"House {n} has a canteen that serves soup on day {n} of the week." for n in range(40)]
PARTS = make_parts(
    "With which word does the vault open?", passages=make_passages(*NOISE, "The vault opens with heron.")
)


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


class SlowEncoder(HashEncoder):
    """Takes ``seconds`` for every text on a clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = seconds

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed."""
        self._clock.now += self._seconds * len(texts)
        return super().encode(texts)


class SlowCounter(WordCounter):
    """Takes ``seconds`` for every exact count of a prompt."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = seconds

    def count_text(self, text: str) -> int:
        """Tokens of a text."""
        self._clock.now += self._seconds
        return super().count_text(text)


def reduce_by(
    clock: Clock,
    limit_s: float | None,
    *,
    parts: PromptParts = PARTS,
    budget: int = 200,
    encoder: Encoder | None = None,
    counter: WordCounter | None = None,
) -> ReductionResult:
    reducer = Reducer(CONFIG, counter or WordCounter(), encoder or HashEncoder(), clock=clock)
    return reducer.reduce(parts, budget=Budget(budget, "request"), caller=Caller(), deadline_s=limit_s)


def degraded(result: ReductionResult) -> dict[str, str | None]:
    return {report.stage: report.degraded for report in result.stages}


def test_time_enough_changes_nothing() -> None:
    unlimited, limited = reduce_by(Clock(), None), reduce_by(Clock(), 60.0)
    assert unlimited.messages == limited.messages
    assert not limited.deadline_expired
    assert set(degraded(limited).values()) == {None}


def test_expired_at_once_whole_passages_in_retriever_order_within_the_budget() -> None:
    result = reduce_by(Clock(), 0.0)
    assert result.deadline_expired
    assert 150 < result.prompt_tokens <= 200
    assert result.prompt_tokens == WordCounter().count_prompt(result.messages)
    actions = [document.action for document in result.documents]
    num_kept = actions.count("kept")
    assert actions == ["kept"] * num_kept + ["dropped"] * (41 - num_kept)
    assert all("deadline of 0 ms" in str(why) for stage, why in degraded(result).items() if stage != "access")


def test_slow_model_is_given_up_and_the_answer_is_found_without_it() -> None:
    clock = Clock()
    result = reduce_by(clock, 1.0, encoder=SlowEncoder(clock, 0.2))
    assert clock.now - 100.0 <= 1.0 + 0.2
    assert "DeadlineExpiredError" in str(degraded(result)["rank"])
    assert "heron" in result.messages[-1]["content"]
    assert result.prompt_tokens <= 200


def test_deadline_while_counting_leaves_the_rest_out() -> None:
    clock = Clock()
    result = reduce_by(clock, 0.5, counter=SlowCounter(clock, 0.02))
    assert result.deadline_expired
    assert result.prompt_tokens <= 200
    assert any(document.action == "kept" for document in result.documents)


def test_one_passage_larger_than_the_budget_is_cut_not_lost() -> None:
    text = "Nothing is said here about the matter. " * 400 + "The vault opens with the word heron."
    parts = make_parts("With which word does the vault open?", passages=make_passages(text))
    result = reduce_by(Clock(), 0.0, parts=parts, budget=100)
    assert result.prompt_tokens <= 100
    assert [document.action for document in result.documents] == ["trimmed"]
    assert "heron" in result.messages[-1]["content"]


def test_configured_limit_holds_and_the_request_may_set_its_own() -> None:
    config = ReducerConfig(min_prompt_tokens=0, deadline_s=0.0)
    assert reduce_parts(PARTS, 200, config=config).deadline_expired
    reducer = Reducer(config, WordCounter(), HashEncoder())
    own = reducer.reduce(PARTS, budget=Budget(200, "request"), caller=Caller(), deadline_s=60.0)
    assert not own.deadline_expired


def test_long_history_is_fitted_in_haste() -> None:
    history = [{"role": "user", "content": f"turn {n} about the garden and its trees " * 5} for n in range(40)]
    parts = make_parts("Which unit failed?", history=history, passages=PARTS.passages)
    result = reduce_by(Clock(), 0.0, parts=parts, budget=300)
    assert result.prompt_tokens == WordCounter().count_prompt(result.messages) <= 300
    assert result.deadline_expired


@pytest.mark.parametrize("limit_s", [0.0, 0.001, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("budget", [30, 60, 500])
def test_never_over_budget(limit_s: float, budget: int) -> None:
    clock = Clock()
    result = reduce_by(clock, limit_s, budget=budget, encoder=SlowEncoder(clock, 0.003))
    assert result.prompt_tokens == WordCounter().count_prompt(result.messages) <= budget
    assert {document.id for document in result.documents} == {passage.id for passage in PARTS.passages}


def test_48k_tokens_with_50_ms_still_answer() -> None:
    passages = make_passages(*(f"{number}. " + text * 26 for number, text in enumerate(NOISE * 3)))
    parts = make_parts("With which word does the vault open?", passages=passages)
    clock_free = Reducer(CONFIG, WordCounter(), HashEncoder())
    assert sum(map(WordCounter().count_text, (passage.text for passage in passages))) > 40_000
    result = clock_free.reduce(parts, budget=Budget(2_000, "request"), caller=Caller(), deadline_s=0.05)
    assert result.deadline_expired
    assert 1_000 < result.prompt_tokens <= 2_000


def test_encoder_gives_up_before_a_batch_that_would_end_too_late() -> None:
    clock = Clock()
    encoder = DeadlineEncoder(SlowEncoder(clock, 0.1), Deadline(1.0, clock))
    with pytest.raises(DeadlineExpiredError, match="deadline of 1000 ms"):
        encoder.encode(["text"] * 100)
    assert clock.now - 100.0 <= 1.0


def test_encoder_in_time_gives_the_same_vectors() -> None:
    texts = [f"text {number}" for number in range(37)]
    encoder = DeadlineEncoder(HashEncoder(), Deadline(60.0, Clock()))
    np.testing.assert_array_equal(encoder.encode(texts), HashEncoder().encode(texts))


def test_negative_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="got -1"):
        Deadline(-1.0)
    with pytest.raises(ValueError, match="got -1"):
        ReducerConfig(deadline_s=-1.0)


def test_passage_too_long_to_be_read_in_time_is_left_for_those_that_fit() -> None:
    passages = make_passages("The widget is blue. " * 50_000, "The widget is made in Ghent.")
    parts = make_parts("Where is the widget made?", passages=passages)
    result = reduce_by(Clock(), 0.05, parts=parts)
    assert [document.action for document in result.documents] == ["dropped", "kept"]
    assert "deadline of 50 ms" in str(degraded(result)["select"])
