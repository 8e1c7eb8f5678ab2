"""Stages that fail: what takes their place, what it costs, and what is refused."""

from typing import Any

import msgspec
import pytest
from factories_reducer import WordCounter, make_parts, make_passages, make_reducer
from hypothesis import given, settings
from hypothesis import strategies as st

from reducer.config import FailureConfig, HistoryConfig, ReducerConfig
from reducer.deadline import Deadline
from reducer.errors import StageFailedError
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller, PromptParts
from reducer.result import ReductionResult

pytestmark = pytest.mark.stages_fail

PLACES = {
    "clean": "reducer.stages.clean",
    "dedup": "reducer.stages.deduplicate",
    "rank": "reducer.stages.rank",
    "history": "reducer.stages.reduce_history",
    "select": "reducer.stages.shortlist",
}
SECRET = "heron"
PASSAGES = make_passages(
    *(f"Room {n} holds {n} chairs and a table of oak. Its window faces the yard number {n}." for n in range(20)),
    f"The vault opens with the word {SECRET}.",
)
HISTORY = [
    {"role": role, "content": f"turn {n} about the garden, its trees and the {n} birds in them " * 3}
    for n in range(12)
    for role in ("user", "assistant")
]
PARTS = make_parts("With which word does the vault open?", history=HISTORY, passages=PASSAGES, system="Be short.")


def boom(*_: Any, **__: Any) -> Any:
    raise KeyError(SECRET)


def reduce(parts: PromptParts = PARTS, budget: int = 300, **failure: Any) -> ReductionResult:
    config = ReducerConfig(min_prompt_tokens=0, failure=FailureConfig(**failure))
    return Reducer(config, WordCounter(), None).reduce(parts, budget=Budget(budget, "request"), caller=Caller())


def check(result: ReductionResult, budget: int) -> None:
    assert result.prompt_tokens == WordCounter().count_prompt(result.messages) <= budget
    texts = {f"d{number}": passage.text for number, passage in enumerate(PASSAGES, 1)}
    for document in result.documents:
        if document.action in ("kept", "trimmed"):
            assert "".join(texts[document.id][a:b] for a, b in document.spans)[:20] in result.messages[-1]["content"]
    assert len(result.documents) == len(PASSAGES)
    assert sorted(turn.index for turn in result.turns) == list(range(1, len(HISTORY) + 1))


@pytest.mark.parametrize("stage", PLACES)
@pytest.mark.parametrize("budget", [30, 120, 300, 900])
def test_a_stage_that_fails_is_left_out_and_the_budget_holds(
    monkeypatch: pytest.MonkeyPatch, stage: str, budget: int
) -> None:
    monkeypatch.setattr(PLACES[stage], boom)
    result = reduce(budget=budget)
    check(result, budget)
    reports = {report.stage: report for report in result.stages}
    assert list(reports) == ["access", "clean", "dedup", "rank", "history", "select"]
    assert str(reports[stage].degraded).startswith(f"{stage} failed (KeyError): ")
    assert str(reports[stage].failure).startswith("KeyError at test_failures.py:")
    if stage in ("clean", "dedup", "rank"):
        assert reports[stage].tokens_before == reports[stage].tokens_after
    assert SECRET not in str([(report.degraded, report.failure) for report in result.stages])
    assert all(report.failure is msgspec.UNSET for name, report in reports.items() if name != stage)


def test_everything_fails_and_the_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in PLACES.values():
        monkeypatch.setattr(place, boom)
    for budget in (25, 60, 200, 500, 1500):
        check(reduce(budget=budget), budget)


@settings(max_examples=40, deadline=None)
@given(budget=st.integers(22, 1200), failing=st.sets(st.sampled_from(sorted(PLACES)), min_size=1))
def test_no_failure_lets_a_prompt_over_its_budget(budget: int, failing: set[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for stage in failing:
            patch.setattr(PLACES[stage], boom)
        check(reduce(budget=budget), budget)


@pytest.mark.parametrize("stage", PLACES)
def test_a_closed_stage_refuses_and_names_itself_and_no_text(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    monkeypatch.setattr(PLACES[stage], boom)
    with pytest.raises(StageFailedError) as caught:
        reduce(**{stage: "closed"})
    assert caught.value.stage == stage
    assert f"The {stage} stage" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_what_a_stage_had_changed_before_it_failed_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dedup writes its removals down, then fails: no passage may be both removed and kept."""
    copies = make_passages("The vault opens with the word heron. " * 3, "The vault opens with the word heron. " * 3)
    parts = make_parts("With which word does the vault open?", passages=copies)
    monkeypatch.setattr("reducer.stages.document_tokens_of", boom)  # the last thing that clean and dedup do
    result = reduce(parts, 400)
    assert [document.action for document in result.documents] == ["kept", "kept"]
    assert [report.stage for report in result.stages if report.failure] == ["clean", "dedup"]


@pytest.mark.parametrize("mode", ["open", "closed"])
def test_access_is_always_closed(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr("reducer.access.can_read", boom)
    with pytest.raises(StageFailedError, match="The access stage"):
        reduce(clean=mode)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"access": "open"}, FailureConfig)


def test_template_is_closed_unless_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reducer.pipeline.prepare", boom)
    with pytest.raises(StageFailedError, match="The template stage"):
        reduce()
    result = reduce(template="open")
    check(result, 300)
    assert result.messages[0] == {"role": "system", "content": "Be short."}
    assert (result.stages[-1].stage, str(result.stages[-1].degraded).split(":")[0]) == (
        "template",
        "template failed (KeyError)",
    )


def test_a_prompt_that_cannot_be_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = WordCounter()
    reducer = Reducer(ReducerConfig(min_prompt_tokens=0), counter, None)
    count = counter.count_prompt

    def fail_later(*args: Any) -> int:
        if counter.num_prompt_counts >= 3:
            raise KeyError(SECRET)
        return count(*args)

    monkeypatch.setattr(counter, "count_prompt", fail_later)
    with pytest.raises(StageFailedError, match=r"The select stage .* and its replacement too"):
        reducer.reduce(PARTS, budget=Budget(300, "request"), caller=Caller())


def test_the_log_has_type_and_place_and_no_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PLACES["rank"], boom)
    reduce()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "firsttoken.reducer"]
    assert line.startswith("the stage rank failed (open): KeyError at test_failures.py:")
    assert "stages.py:" in line
    assert SECRET not in line
    assert all(record.exc_info is None for record in caplog.records)


def test_a_failing_history_keeps_the_last_turns_from_one_of_the_user_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLACES["history"], boom)
    config = ReducerConfig(min_prompt_tokens=0, history=HistoryConfig(max_share=0.9))
    result = make_reducer(config=config).reduce(PARTS, budget=Budget(250, "request"), caller=Caller())
    kept = [turn.index for turn in result.turns if turn.action == "kept"]
    assert kept
    assert kept == list(range(kept[0], len(HISTORY) + 1))
    assert PARTS.messages[kept[0]]["role"] == "user"
    assert {turn.action for turn in result.turns} == {"kept", "dropped"}


QUOTED = make_parts(
    "Context:\n"
    + "".join(f"<document>{passage.text} {passage.text}</document>\n" for passage in PASSAGES)
    + "Which word?",
    system="Be short.",
)


@pytest.mark.parametrize("place", ["recognise_passages", "reduce_in_place"])
def test_messages_stay_whole_where_the_passages_in_them_cannot_be_recognised(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    whole = reduce(QUOTED, 2000)
    assert len(whole.documents) == len(PASSAGES)
    monkeypatch.setattr(f"reducer.pipeline.{place}", boom)
    result = reduce(QUOTED, 2000)
    assert result.messages == list(QUOTED.messages)
    report = result.stages[0]
    assert report.stage == "recognise"
    assert report.degraded == "recognise failed (KeyError): passages inside messages stay as they are"
    assert SECRET not in str(result.stages)
    with pytest.raises(StageFailedError, match="The recognise stage") as caught:
        reduce(QUOTED, 2000, recognise="closed")
    assert SECRET not in str(caught.value)


def test_bypass_looks_for_no_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reducer.pipeline.recognise_passages", boom)
    reducer = Reducer(ReducerConfig(failure=FailureConfig(recognise="closed")), WordCounter(), None)
    result = reducer.reduce(QUOTED, budget=Budget(2000, "request"), caller=Caller(), bypass=True)
    assert result.messages == list(QUOTED.messages)


def test_what_is_tried_again_has_no_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float | None] = []

    class Noted(Deadline):
        def __init__(self, limit_s: float | None, *args: Any) -> None:
            made.append(limit_s)
            super().__init__(limit_s, *args)

    monkeypatch.setattr("reducer.pipeline.Deadline", Noted)
    monkeypatch.setattr("reducer.pipeline.reduce_in_place", boom)
    Reducer(ReducerConfig(), WordCounter(), None).reduce(
        QUOTED, budget=Budget(2000, "request"), caller=Caller(), deadline_s=3.0
    )
    assert made == [3.0]
