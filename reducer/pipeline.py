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
from reducer.canonical import canonical_json
from reducer.clean import clean
from reducer.config import ReducerConfig
from reducer.deadline import Deadline, DeadlineEncoder, select_whole
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
from reducer.ordering import OrderMemory, PrefixKey, make_arrange, passage_key, prefix_key
from reducer.prefix import Prepared, prepare, report_prefix
from reducer.prompt import Budget, Caller, Passage, PromptParts
from reducer.rank import Query, rank
from reducer.receipt import decide_documents, keep_turns
from reducer.result import BudgetReport, PrefixReport, ReductionResult, StageReport
from reducer.selection import SelectionOutcome, select
from reducer.stage import Candidate, Filtered, Selected, whole_spans
from reducer.summary import Summarizer, SummaryCache, SummaryMemory, scope_key
from reducer.template import CLOSING, OPENING, message_text, prepend_documents, render_documents, render_heading
from reducer.tokens import CachedCounter, TokenCounter


@dataclass(slots=True)
class _Run:
    """The working state of one request."""

    prepared: Prepared
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
    memory: SummaryMemory | None = None
    summarizer: Summarizer | None = None
    planned_history: int | None = None
    """Tokens the record of older turns was first made for; less for the rest does not change it."""
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    order_memory: OrderMemory | None = None
    order_scope: str = ""
    order_prefix: PrefixKey | None = None
    """Under which the order of the passages is remembered, if it is."""
    arrange: Callable[[Sequence[Selected]], list[Selected]] = list
    """The order in which passages are written."""
    arranged: Sequence[Selected] = ()
    """What is written, in the order in which it is."""
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
    is_late: bool = False
    """Whether the deadline passed, or would have."""
    reports: list[StageReport] = field(default_factory=list)

    @property
    def parts(self) -> PromptParts:
        """The request, its stable part prepared."""
        return self.prepared.parts

    @property
    def num_tokens(self) -> int:
        """Tokens of passages and history that are still in the running."""
        return self.document_tokens + self.history_tokens


class Reducer:
    """Makes prompts as small as their answers allow.

    One instance serves many threads: it keeps nothing of a request but vectors by content hash inside the encoder, and
    digests of what it served inside ``order_memory`` and summaries of earlier turns inside ``summary_cache``, which
    both outlive it.
    """

    def __init__(
        self,
        config: ReducerConfig,
        counter: TokenCounter,
        encoder: Encoder | None,
        *,
        summary_cache: SummaryCache | None = None,
        summarizer: Summarizer | None = None,
        order_memory: OrderMemory | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._counter = counter
        self._encoder = encoder
        self._summary_cache = summary_cache
        self._summarizer = summarizer
        self._order_memory = order_memory
        self._clock = clock

    def reduce(
        self,
        parts: PromptParts,
        *,
        budget: Budget,
        caller: Caller,
        bypass: bool = False,
        cache_scope: str = "",
        deadline_s: float | None = None,
    ) -> ReductionResult:
        """Reduce one prompt to at most ``budget.max_input_tokens`` tokens.

        ``cache_scope`` names who may share cached summaries: tenant, access version and served model; the caller's
        groups are added. An empty one shares and keeps nothing. The order of documents is remembered under it too.
        ``deadline_s`` limits the time, in seconds, instead of the configured limit: when it passes, what is left to do
        is done by the cheapest method, and the result says so; the budget holds in any case.
        ``bypass`` applies the access filter and nothing else. Raises InvalidPromptError for messages or passages that
        cannot be reduced, BudgetExceededError when what must not be cut does not fit.
        """
        started = time.perf_counter()
        deadline = Deadline(self._config.deadline_s if deadline_s is None else deadline_s, self._clock)
        run = self._read(parts, budget, caller, is_raw=bypass)
        run.deadline = deadline
        if cache_scope.strip():
            run.order_memory = self._order_memory
            run.order_scope = "\x1f".join((cache_scope, *sorted(caller.groups)))
        run.summarizer = self._summarizer
        if self._summary_cache is not None and cache_scope.strip():
            run.memory = SummaryMemory(self._summary_cache, scope_key(cache_scope, caller))
        run.reports.append(_report("access", run.num_tokens, run, started, None))
        if bypass and run.original_tokens > budget.max_input_tokens:
            raise BudgetExceededError(run.original_tokens, budget.max_input_tokens, budget.source)
        reason = "bypass" if bypass else self._pass_through_reason(run)
        if reason is not None:
            block_size = self._config.template.block_size
            prefix = None if bypass else report_prefix(run.prepared, self._counter, block_size)
            return _pass_through(run, reason, prefix)
        encoder = self._encoder
        if encoder is not None and deadline.limit_s is not None:
            encoder = DeadlineEncoder(encoder, deadline)
        for name, stage in STAGES:
            num_before, started = run.num_tokens, time.perf_counter()
            if not deadline.allows(_expected_s(name, run)):
                stage, run.is_late = IN_HASTE[name], True
            degraded = stage(run, self._config, encoder)
            run.reports.append(_report(name, num_before, run, started, degraded))
        assert run.fitted is not None, "the last stage fits the prompt"
        if run.order_memory is not None and run.order_prefix is not None:
            run.order_memory.remember(run.order_prefix, [passage_key(item) for item in run.arranged])
        is_same = run.fitted.messages == run.unreduced
        return _result(
            run,
            messages=run.fitted.messages,
            prompt_tokens=run.fitted.prompt_tokens,
            selected=run.arranged,
            prefix=None
            if run.is_late
            else report_prefix(run.prepared, self._counter, self._config.template.block_size),
            pass_through="nothing to remove" if is_same else None,
        )

    def _read(self, received: PromptParts, budget: Budget, caller: Caller, *, is_raw: bool) -> _Run:
        """Check, filter and count what came in; ``is_raw`` leaves tools and system text alone. Raises as ``reduce``."""
        check_passages(received.passages)
        conversation = read_conversation(received.messages)
        query = make_query(received.messages, conversation)
        prepared = Prepared(received) if is_raw else prepare(received, conversation, self._config.template)
        parts, question = prepared.parts, conversation.question
        readable = filter_readable(parts.passages, caller)
        counter = CachedCounter(self._counter)
        protected = [
            prepend_documents(parts.messages[i], prepared.moved_text) if i == question else parts.messages[i]
            for i in conversation.protected
        ]
        num_protected = counter.count_prompt(protected, parts.tools)
        num_free = free_tokens(budget, num_protected)
        num_messages = num_protected
        if conversation.history:
            whole = [*parts.messages[:question], *protected[conversation.protected.index(question) :]]
            num_messages = counter.count_prompt(whole, parts.tools)
        candidates = tuple(make_candidate(position, passage, counter) for position, passage in readable.passages)
        block = render_documents([keep_whole(candidate, "") for candidate in candidates]) + prepared.moved_text
        unreduced = render_messages(parts.messages, HistoryOutcome(conversation.history, ()), conversation, block)
        turn_tokens = count_turns(parts.messages, conversation.history, num_messages - num_protected, counter)
        return _Run(
            prepared=prepared,
            budget=budget,
            conversation=conversation,
            counter=counter,
            candidates=candidates,
            unreduced=unreduced,
            original_tokens=counter.count_prompt(unreduced, parts.tools) if candidates else num_messages,
            num_denied=readable.num_denied,
            query=query,
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

    def choose(allowance: int, num_block_tokens: int) -> SelectionOutcome:
        if run.deadline.is_expired:
            return _choose_in_haste(run, allowance, num_block_tokens, config)
        return select(run.running, allowance, num_block_tokens, config.selection, extractor)

    return _fit(run, config, encoder, choose)


def _fit(
    run: _Run, config: ReducerConfig, encoder: Encoder | None, choose: Callable[[int, int], SelectionOutcome]
) -> str | None:
    """Fit the prompt into the budget with passages chosen by ``choose(allowance, tokens of the empty block)``."""
    num_block_tokens = run.counter.count_text(OPENING) + run.counter.count_text(CLOSING)
    while True:
        run.arrange = _make_arrange(run, config)
        run.fitted = fit_documents(
            lambda allowance: choose(allowance, num_block_tokens),
            lambda selected: render_messages(
                run.parts.messages,
                run.history,
                run.conversation,
                render_documents(run.arrange(selected)) + run.prepared.moved_text,
            ),
            lambda messages: run.counter.count_prompt(messages, run.parts.tools),
            allowance=run.num_free - run.history_tokens,
            max_tokens=run.budget.max_input_tokens,
        )
        if run.fitted is not None:
            break
        # Turns and blocks are counted piece by piece; where that was too little, the history gives up the excess.
        assert run.history_tokens > 0, "without history and passages the prompt is its protected part, which fits"
        messages = render_messages(run.parts.messages, run.history, run.conversation, run.prepared.moved_text)
        excess = run.counter.count_prompt(messages, run.parts.tools) - run.budget.max_input_tokens
        _keep_history(run, run.history_tokens - max(excess, 1), config, encoder)
    selection = run.fitted.selection
    run.arranged = run.arrange(selection.selected)
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


def _skip(run: _Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    return f"{run.deadline}: passages stay as they are"


def _rank_in_haste(run: _Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    return f"{run.deadline}: passages stay in retriever order"


def _history_in_haste(run: _Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    run.summarizer = None
    degraded = _run_history(run, config, None)
    return f"{run.deadline}: {degraded or 'no model for the history'}"


def _select_in_haste(run: _Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    return _fit(run, config, None, lambda allowance, num_block: _choose_in_haste(run, allowance, num_block, config))


def _choose_in_haste(run: _Run, allowance: int, num_block_tokens: int, config: ReducerConfig) -> SelectionOutcome:
    run.is_late = True
    extractor = Extractor(run.query, config.rank, run.counter, None)
    why = f"{run.deadline}: whole passages in order while they fit"
    return select_whole(run.running, allowance, num_block_tokens, extractor, why)


IN_HASTE: dict[str, Callable[[_Run, ReducerConfig, Encoder | None], str | None]] = {
    "clean": _skip,
    "dedup": _skip,
    "rank": _rank_in_haste,
    "history": _history_in_haste,
    "select": _select_in_haste,
}
"""What each stage does instead when the deadline does not leave it its time."""

SECONDS_PER_CHAR = {"clean": 0.3e-6, "dedup": 1e-6, "rank": 0.5e-6}
"""Least time of a stage without its model; with less than that left it is not begun."""


def _expected_s(name: str, run: _Run) -> float:
    if run.deadline.limit_s is None:
        return 0.0
    return SECONDS_PER_CHAR.get(name, 0.0) * sum(len(candidate.passage.text) for candidate in run.running)


def _make_arrange(run: _Run, config: ReducerConfig) -> Callable[[Sequence[Selected]], list[Selected]]:
    """How this request writes its passages; what was served before is looked up once."""
    order, max_rank_loss = config.template.document_order, config.template.max_rank_loss
    if order != "cache" or run.order_memory is None:
        return make_arrange(order, (), max_rank_loss)
    messages = render_messages(run.parts.messages, run.history, run.conversation, OPENING)
    question = next(i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") == "user")
    front = message_text(messages[question]).partition(OPENING)[0]
    run.order_prefix = prefix_key(run.order_scope, canonical_json([messages[:question], run.parts.tools, front]))
    return make_arrange(order, run.order_memory.recent(run.order_prefix), max_rank_loss)


def _keep_history(run: _Run, allowance: int, config: ReducerConfig, encoder: Encoder | None) -> None:
    planned = allowance if run.planned_history is None else run.planned_history
    run.planned_history = planned
    run.history = reduce_history(
        run.parts.messages,
        run.conversation.history,
        run.turn_tokens,
        max(allowance, 0),
        run.query,
        config.history,
        config.rank,
        encoder,
        counter=run.counter,
        memory=run.memory,
        summarizer=run.summarizer,
        fill=not run.running,
        planned_allowance=planned,
    )
    run.history_tokens = run.history.num_tokens


def _pass_through(run: _Run, reason: str, prefix: PrefixReport | None) -> ReductionResult:
    run.history = HistoryOutcome(run.conversation.history, tuple(keep_turns(run.turn_tokens, reason)))
    return _result(
        run,
        messages=run.unreduced,
        prompt_tokens=run.original_tokens,
        selected=[keep_whole(candidate, reason) for candidate in run.candidates],
        prefix=prefix,
        pass_through=reason,
    )


def _result(
    run: _Run,
    *,
    messages: list[dict[str, Any]],
    prompt_tokens: int,
    selected: Sequence[Selected],
    prefix: PrefixReport | None,
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
        prefix=prefix,
        deadline_expired=run.is_late,
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
