"""Stages that fail in a way that nobody foresaw: left out, or the reason to refuse the request.

A stage that is left out passes on what it got. Behind it the budget holds as it always does; where the stages that keep
it fail themselves, their places are taken by the simplest things that can: the last turns that fit, whole passages that
fit. A failure is logged by its type and place: its message may hold text of the request.
"""

import copy
import dataclasses
import logging
import traceback
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Literal, TypeVar

from msgspec import UNSET, UnsetType

from reducer.budget import split_allowance
from reducer.config import FailureConfig, FailureMode, ReducerConfig
from reducer.encoder import Encoder
from reducer.errors import ReducerError, StageFailedError
from reducer.fitting import Fitted, render_messages
from reducer.history import HistoryOutcome, group_units
from reducer.result import StageReport, TurnDecision
from reducer.run import Run, document_tokens_of, keep_whole
from reducer.selection import SelectionOutcome, cost
from reducer.stage import Candidate, Filtered
from reducer.template import CLOSING, OPENING, render_documents

T = TypeVar("T")
Stage = Callable[[Run, ReducerConfig, Encoder | None], str | None]

FORESEEN = (ReducerError, RecursionError)
"""Mistakes of the request itself, nested too deeply among them: they are told as such."""

Step = Literal["recognise", "template"]
"""What may fail around the stages."""
_LEFT_ALONE: dict[Step, str] = {
    "recognise": "passages inside messages stay as they are",
    "template": "system text and tools as they came",
}
_LOG = logging.getLogger("firsttoken.reducer")


def run_stage(
    name: str, stage: Stage, run: Run, config: ReducerConfig, encoder: Encoder | None
) -> tuple[str | None, str | UnsetType]:
    """Runs a stage: why it fell back to a cheaper method, if it did, and how it failed, if it did.

    Raises ``StageFailedError`` where it fails and is set to ``closed``, or its replacement fails as well.
    """
    before = copy.copy(run)
    before.filtered = list(run.filtered)
    try:
        return stage(run, config, encoder), UNSET
    except FORESEEN:
        raise
    except Exception as error:
        failure = _left_out(name, config.failure, error)
    for field in dataclasses.fields(Run):
        setattr(run, field.name, getattr(before, field.name))
    replacement, what = REPLACEMENTS[name]
    try:
        replacement(run, config)
    except Exception as error:
        raise StageFailedError(name, f"{failure}, and its replacement too") from error
    return f"{name} failed ({failure.partition(' ')[0]}): {what}", failure


def step(
    name: Step,
    failures: list[str],
    config: FailureConfig,
    work: Callable[[], T],
    instead: T,
) -> T:
    """The result of a step around the stages, else ``instead``, with the failure added to ``failures``.

    Raises ``StageFailedError`` where it fails and is set to ``closed``.
    """
    try:
        return work()
    except FORESEEN:
        raise
    except Exception as error:
        failures.append(_left_out(name, config, error))
        return instead


def _left_out(name: str, config: FailureConfig, error: Exception) -> str:
    """How something failed that is left out then. Raises ``StageFailedError`` where it is set to ``closed``."""
    mode: FailureMode = getattr(config, name)
    failure = note_failure(name, mode, error)
    if mode == "closed":
        raise StageFailedError(name, f"{failure}, and it is set to refuse then") from error
    return failure


def step_reports(name: Step, failures: Sequence[str], num_tokens: int) -> list[StageReport]:
    """What is told of failed steps: one report, or none where none failed. ``num_tokens`` is what they left alone."""
    if not failures:
        return []
    why = f"{name} failed ({failures[0].partition(' ')[0]}): {_LEFT_ALONE[name]}"
    report = StageReport(
        stage=name, tokens_before=num_tokens, tokens_after=num_tokens, ms=0.0, degraded=why, failure=failures[0]
    )
    return [report]


def note_failure(stage: str, mode: FailureMode, error: Exception) -> str:
    """Logs a failure; its type and place, e.g. ``KeyError at rank.py:71``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
    failure = f"{type(error).__name__} at {place}"
    trail = " < ".join(f"{PurePath(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-6:]))
    _LOG.error("the stage %s failed (%s): %s [%s]", stage, mode, failure, trail)
    return failure


def keep_recent(run: Run, allowance: int) -> None:
    """Keeps the last turns that have at most ``allowance`` tokens, from one of the user on."""
    messages, kept, num_tokens = run.parts.messages, list[tuple[int, ...]](), 0
    for unit in reversed(group_units(messages, run.conversation.history)):
        num_tokens += sum(run.turn_tokens[index] for index in unit)
        if num_tokens > allowance:
            break
        kept.insert(0, unit)
    while kept and messages[kept[0][0]].get("role") != "user":
        del kept[0]
    indices = {index for unit in kept for index in unit}
    run.history = HistoryOutcome(
        kept=tuple(sorted(indices)),
        decisions=tuple(
            TurnDecision(
                index=index,
                action="kept" if index in indices else "dropped",
                reason="recent turn" if index in indices else f"history is limited to {allowance} tokens",
                tokens_before=run.turn_tokens[index],
                tokens_after=run.turn_tokens[index] if index in indices else 0,
            )
            for index in run.conversation.history
        ),
        num_tokens=sum(run.turn_tokens[index] for index in indices),
    )
    run.history_tokens = run.history.num_tokens
    run.keeps_recent = True


def _stay_as_they_are(run: Run, config: ReducerConfig) -> None:
    """What came in goes on."""


def _leave_unranked(run: Run, config: ReducerConfig) -> None:
    run.is_unranked = True


def _keep_share(run: Run, config: ReducerConfig) -> None:
    keep_recent(run, split_allowance(run.num_free, run.history_tokens, run.document_tokens, config.history).history)


def _fit_whole(run: Run, config: ReducerConfig) -> None:
    """Whole passages, best first, while the rendered prompt fits; then fewer turns, until it does."""
    best_first = sorted(run.running, key=lambda candidate: -(candidate.score or 0.0))
    left = run.num_free - run.history_tokens - run.counter.count_text(OPENING) - run.counter.count_text(CLOSING)
    chosen: list[Candidate] = []
    for candidate in best_first:
        if candidate.passage.text.strip() and cost(candidate) <= left:
            chosen.append(candidate)
            left -= cost(candidate)
    while True:
        chosen_positions = {candidate.position for candidate in chosen}
        selected = tuple(
            keep_whole(candidate, "whole passages while they fit")
            for candidate in sorted(chosen, key=lambda candidate: candidate.position)
        )
        block = render_documents(selected) + run.prepared.moved_text
        messages = render_messages(run.parts.messages, run.history, run.conversation, block)
        prompt_tokens = run.counter.count_prompt(messages, run.parts.tools)
        excess = prompt_tokens - run.budget.max_input_tokens
        if excess <= 0:
            break
        if not chosen:
            assert run.history_tokens > 0, "without history and passages the prompt is its protected part, which fits"
            keep_recent(run, run.history_tokens - excess)
        while chosen and excess > 0:
            excess -= cost(chosen.pop())
    gone = tuple(
        Filtered(candidate, "dropped", "budget" if candidate.passage.text.strip() else "empty")
        for candidate in run.running
        if candidate.position not in chosen_positions
    )
    run.fitted = Fitted(SelectionOutcome(selected, gone, is_budget_bound=True), messages, prompt_tokens)
    run.arranged, run.order_prefix = selected, None
    run.filtered.extend(gone)
    run.document_tokens = document_tokens_of(chosen)


REPLACEMENTS: dict[str, tuple[Callable[[Run, ReducerConfig], None], str]] = {
    "clean": (_stay_as_they_are, "passages stay as they are"),
    "dedup": (_stay_as_they_are, "passages stay as they are"),
    "rank": (_leave_unranked, "passages stay in retriever order"),
    "history": (_keep_share, "the last turns that fit"),
    "select": (_fit_whole, "whole passages while they fit"),
}
"""What takes the place of a stage that failed, and how that is told."""
