"""The pipeline: access, clean, dedup, rank, history, select; what each stage did, and how long it took.

``STAGES`` is the order as data. A stage is a pure function in its own module; here its input is taken from the run, its
output put back, tokens and time noted. The prompt that comes out is counted exactly, as it is rendered.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reducer.access import filter_readable
from reducer.budget import free_tokens, split_allowance
from reducer.clean import clean
from reducer.config import ReducerConfig
from reducer.dedup import deduplicate
from reducer.encoder import Encoder
from reducer.errors import BudgetExceededError, InvalidPromptError
from reducer.extraction import Extractor
from reducer.fitting import Fitted, fit_documents, render_messages
from reducer.history import (
    Conversation,
    HistoryOutcome,
    count_turns,
    make_query,
    read_conversation,
    reduce_history,
)
from reducer.prompt import Budget, Caller, Passage, PromptParts
from reducer.rank import Query, rank
from reducer.receipt import decide_documents, keep_turns
from reducer.result import BudgetReport, ReductionResult, StageReport
from reducer.selection import select
from reducer.stage import Candidate, Filtered, Selected, whole_spans
from reducer.template import CLOSING, OPENING, render_documents, render_heading
from reducer.tokens import CachedCounter, TokenCounter


@dataclass(slots=True)
class _Run:
    """The working state of one request."""

    parts: PromptParts
    budget: Budget
    conversation: Conversation
    counter: CachedCounter
    candidates: tuple[Candidate, ...]
    unreduced: list[dict[str, Any]]
    """The prompt with every readable passage and turn."""
    original_tokens: int
    num_denied: int
    query: Query
    history: HistoryOutcome
    num_free: int = 0
    """Tokens beside the protected part."""
    turn_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of each history message, its share of the template included."""
    document_tokens: int = 0
    """Tokens of the passages still in the running, labels included."""
    history_tokens: int = 0
    """Tokens of the history still in the running."""
    running: Sequence[Candidate] = ()
    filtered: list[Filtered] = field(default_factory=list)
    fitted: Fitted | None = None
    reports: list[StageReport] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of passages and history that are still in the running."""
        return self.document_tokens + self.history_tokens


class Reducer:
    """Makes prompts as small as their answers allow.

    One instance serves many threads: it keeps nothing of a request but vectors by content hash inside the encoder.
    """

    def __init__(self, config: ReducerConfig, counter: TokenCounter, encoder: Encoder | None) -> None:
        self._config = config
        self._counter = counter
        self._encoder = encoder

    def reduce(self, parts: PromptParts, *, budget: Budget, caller: Caller, bypass: bool = False) -> ReductionResult:
        """Reduce one prompt to at most ``budget.max_input_tokens`` tokens.

        ``bypass`` applies the access filter and nothing else. Raises InvalidPromptError for messages or passages that
        cannot be reduced, BudgetExceededError when what must not be cut does not fit.
        """
        started = time.perf_counter()
        run = self._read(parts, budget, caller)
        run.reports.append(_report("access", run.num_tokens, run, started, None))
        if bypass and run.original_tokens > budget.max_input_tokens:
            raise BudgetExceededError(run.original_tokens, budget.max_input_tokens, budget.source)
        reason = "bypass" if bypass else self._pass_through_reason(run)
        if reason is not None:
            return _pass_through(run, reason)
        for name, stage in STAGES:
            num_before, started = run.num_tokens, time.perf_counter()
            degraded = stage(run, self._config, self._encoder)
            run.reports.append(_report(name, num_before, run, started, degraded))
        assert run.fitted is not None, "the last stage fits the prompt"
        is_same = run.fitted.messages == run.unreduced
        return _result(
            run,
            messages=run.fitted.messages,
            prompt_tokens=run.fitted.prompt_tokens,
            selected=run.fitted.selection.selected,
            pass_through="nothing to remove" if is_same else None,
        )

    def _read(self, parts: PromptParts, budget: Budget, caller: Caller) -> _Run:
        """Check, filter and count what came in. Raises as ``reduce`` does."""
        check_passages(parts.passages)
        conversation = read_conversation(parts.messages)
        readable = filter_readable(parts.passages, caller)
        counter = CachedCounter(self._counter)
        num_protected = counter.count_prompt([parts.messages[i] for i in conversation.protected], parts.tools)
        num_free = free_tokens(budget, num_protected)
        num_messages = num_protected
        if conversation.history:
            num_messages = counter.count_prompt(parts.messages, parts.tools)
        candidates = tuple(make_candidate(position, passage, counter) for position, passage in readable.passages)
        block = render_documents([keep_whole(candidate, "") for candidate in candidates], "input")
        unreduced = render_messages(parts.messages, conversation.history, conversation, block)
        turn_tokens = count_turns(parts.messages, conversation.history, num_messages - num_protected, counter)
        return _Run(
            parts=parts,
            budget=budget,
            conversation=conversation,
            counter=counter,
            candidates=candidates,
            unreduced=unreduced,
            original_tokens=counter.count_prompt(unreduced, parts.tools) if candidates else num_messages,
            num_denied=readable.num_denied,
            query=make_query(parts.messages, conversation),
            history=HistoryOutcome((), ()),
            num_free=num_free,
            turn_tokens=turn_tokens,
            document_tokens=_document_tokens(candidates),
            history_tokens=sum(turn_tokens.values()),
            running=candidates,
        )

    def _pass_through_reason(self, run: _Run) -> str | None:
        """Why reducing would gain nothing, or ``None``."""
        if run.original_tokens > run.budget.max_input_tokens:
            return None
        if run.original_tokens <= self._config.min_prompt_tokens:
            limit = self._config.min_prompt_tokens
            return f"prompt of {run.original_tokens} tokens is not above min_prompt_tokens {limit}"
        if not run.candidates and run.history_tokens <= self._config.history.max_tokens:
            return f"no passages, and history of {run.history_tokens} tokens fits"
        return None


def check_passages(passages: Sequence[Passage]) -> None:
    """Raise InvalidPromptError for a passage without an id, or two with one id."""
    seen: set[str] = set()
    for position, passage in enumerate(passages):
        if not passage.id:
            raise InvalidPromptError(f"documents[{position}].id must not be empty, got {passage.id!r}")
        if passage.id in seen:
            raise InvalidPromptError(f"documents[{position}].id must be unique, got {passage.id!r} twice")
        seen.add(passage.id)


def make_candidate(position: int, passage: Passage, counter: TokenCounter) -> Candidate:
    """The passage as it enters the first stage, its tokens counted once."""
    return Candidate(
        passage=passage,
        position=position,
        num_tokens=counter.count_text(passage.text),
        num_label_tokens=counter.count_text(render_heading(f"[{position + 1}]", passage.title)),
        sources=(passage.id,),
    )


def keep_whole(candidate: Candidate, reason: str) -> Selected:
    """The passage with its whole text."""
    return Selected(candidate, whole_spans(candidate.passage.text), candidate.num_tokens, reason)


def _run_clean(run: _Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    outcome = clean(run.running, run.query.text, config.clean, run.counter)
    run.running = outcome.kept
    run.filtered.extend(outcome.filtered)
    run.document_tokens = _document_tokens(run.running)
    return outcome.degraded


def _run_dedup(run: _Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    outcome = deduplicate(run.running, config.dedup)
    run.running = outcome.kept
    run.filtered.extend(outcome.filtered)
    run.document_tokens = _document_tokens(run.running)
    return outcome.degraded


def _run_rank(run: _Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    outcome = rank(run.running, run.query, config.rank, encoder)
    run.running = outcome.kept
    return outcome.degraded


def _run_history(run: _Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    allowance = split_allowance(run.num_free, run.history_tokens, run.document_tokens, config.history)
    _keep_history(run, allowance.history, config, encoder)
    return run.history.degraded


def _run_select(run: _Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    extractor = Extractor(run.query, config.rank, run.counter, encoder)
    num_block_tokens = run.counter.count_text(OPENING) + run.counter.count_text(CLOSING)
    while True:
        run.fitted = fit_documents(
            lambda allowance: select(run.running, allowance, num_block_tokens, config.selection, extractor),
            lambda selected: render_messages(
                run.parts.messages,
                run.history.kept,
                run.conversation,
                render_documents(selected, config.template.document_order),
            ),
            lambda messages: run.counter.count_prompt(messages, run.parts.tools),
            allowance=run.num_free - run.history_tokens,
            max_tokens=run.budget.max_input_tokens,
        )
        if run.fitted is not None:
            break
        # Turns are counted by their share of the template; where that was too little, one unit less will do.
        assert run.history.kept, "without history and passages the prompt is its protected part, which fits"
        _keep_history(run, run.history_tokens - 1, config, encoder)
    selection = run.fitted.selection
    run.filtered.extend(selection.filtered)
    run.document_tokens = sum(kept.num_tokens + kept.candidate.num_label_tokens for kept in selection.selected)
    return selection.degraded


STAGES: tuple[tuple[str, Callable[[_Run, ReducerConfig, Encoder | None], str | None]], ...] = (
    ("clean", _run_clean),
    ("dedup", _run_dedup),
    ("rank", _run_rank),
    ("history", _run_history),
    ("select", _run_select),
)
"""The stages after access, in order; each returns why it fell back to a cheaper method, if it did."""


def _keep_history(run: _Run, allowance: int, config: ReducerConfig, encoder: Encoder | None) -> None:
    run.history = reduce_history(
        run.parts.messages,
        run.conversation.history,
        run.turn_tokens,
        allowance,
        run.query,
        config.history,
        config.rank,
        encoder,
    )
    run.history_tokens = sum(run.turn_tokens[index] for index in run.history.kept)


def _pass_through(run: _Run, reason: str) -> ReductionResult:
    run.history = HistoryOutcome(run.conversation.history, tuple(keep_turns(run.turn_tokens, reason)))
    return _result(
        run,
        messages=run.unreduced,
        prompt_tokens=run.original_tokens,
        selected=[keep_whole(candidate, reason) for candidate in run.candidates],
        pass_through=reason,
    )


def _result(
    run: _Run,
    *,
    messages: list[dict[str, Any]],
    prompt_tokens: int,
    selected: Sequence[Selected],
    pass_through: str | None,
) -> ReductionResult:
    return ReductionResult(
        messages=messages,
        tools=[dict(tool) for tool in run.parts.tools],
        prompt_tokens=prompt_tokens,
        original_prompt_tokens=run.original_tokens,
        budget=BudgetReport(max_input_tokens=run.budget.max_input_tokens, source=run.budget.source),
        documents=decide_documents(run.candidates, selected, run.filtered),
        denied_documents=run.num_denied,
        turns=list(run.history.decisions),
        stages=run.reports,
        pass_through=pass_through,
    )


def _report(name: str, num_before: int, run: _Run, started: float, degraded: str | None) -> StageReport:
    return StageReport(
        stage=name,
        tokens_before=num_before,
        tokens_after=run.num_tokens,
        ms=round((time.perf_counter() - started) * 1000, 3),
        degraded=degraded,
    )


def _document_tokens(candidates: Sequence[Candidate]) -> int:
    return sum(candidate.num_tokens + candidate.num_label_tokens for candidate in candidates)
