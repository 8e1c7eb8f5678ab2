"""The pipeline: access, clean, dedup, rank, history, select; what each stage did, and how long it took.

Reads like this: read and filter the request, run the stages in order with an eye on the deadline, explain the outcome.
The prompt that comes out is counted exactly, as it is rendered.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from reducer.access import Readable, filter_readable
from reducer.budget import free_tokens
from reducer.config import ReducerConfig
from reducer.deadline import Deadline, DeadlineEncoder, DeadlineReranker
from reducer.embedded_passages import recognise_passages, reduce_in_place
from reducer.encoder import Encoder, ScopedEncoder
from reducer.errors import BudgetExceededError, InvalidPromptError, StageFailedError
from reducer.failures import FORESEEN, note_failure, run_stage, step, step_reports
from reducer.fitting import render_messages
from reducer.history import HistoryOutcome, count_turns, make_query, read_conversation
from reducer.ordering import OrderMemory, passage_key
from reducer.prefix import Prepared, prepare, report_prefix
from reducer.prompt import Budget, Caller, Passage, PromptParts
from reducer.receipt import decide_documents, keep_turns
from reducer.reranker import Reranker, ScopedReranker
from reducer.result import BudgetReport, PrefixReport, ReductionResult, StageReport
from reducer.run import Run, document_tokens_of, keep_whole, make_candidate
from reducer.stage import Selected
from reducer.stages import IN_HASTE, STAGES, expected_s
from reducer.summary import Summarizer, SummaryCache, SummaryMemory, scope_key
from reducer.template import prepend_documents, render_documents
from reducer.tokens import CachedCounter, TokenCounter


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
        reranker: Reranker | None = None,
        summary_cache: SummaryCache | None = None,
        summarizer: Summarizer | None = None,
        order_memory: OrderMemory | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._counter = counter
        self._encoder = encoder
        self._reranker = reranker
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

        ``cache_scope`` names who may share what is cached, summaries, vectors and scores: tenant, access version and
        served model; for summaries the caller's groups are added. Under an empty one nothing but vectors is kept. The
        order of documents is remembered under it too.
        ``deadline_s`` limits the time, in seconds, instead of the configured limit: when it passes, what is left to do
        is done by the cheapest method, and the result says so; the budget holds in any case.
        ``bypass`` applies the access filter and nothing else. Raises InvalidPromptError for messages or passages that
        cannot be reduced, BudgetExceededError when what must not be cut does not fit.
        """
        scope, config = cache_scope, self._config
        # One for all that is tried: a prompt reduced in place may need several rounds.
        deadline = Deadline(config.deadline_s if deadline_s is None else deadline_s, self._clock)
        if bypass:
            return self._reduce(parts, budget, caller, deadline, bypass=True, cache_scope=scope)
        failures: list[str] = []
        recognise = partial(recognise_passages, parts, config.recognise)
        if (found := step("recognise", failures, config.failure, recognise, None)) is not None:
            # The caller's own message has no access labels and needs none.
            everyone = replace(caller, deny_unlabelled=False)
            below = partial(self._for_messages()._reduce, caller=everyone, deadline=deadline, cache_scope=scope)
            in_place = partial(reduce_in_place, parts, found, budget, below, CachedCounter(self._counter))
            if (result := step("recognise", failures, config.failure, in_place, None)) is not None:
                return result
        result = self._reduce(parts, budget, caller, deadline, cache_scope=scope)
        reports = step_reports("recognise", failures, result.original_prompt_tokens)
        return msgspec.structs.replace(result, stages=[*reports, *result.stages]) if reports else result

    def _reduce(
        self,
        parts: PromptParts,
        budget: Budget,
        caller: Caller,
        deadline: Deadline,
        *,
        bypass: bool = False,
        cache_scope: str = "",
    ) -> ReductionResult:
        """Reduces documents and history; messages are not looked into. As ``reduce``."""
        started = time.perf_counter()
        run = self._read(parts, budget, caller, is_raw=bypass)
        run.deadline = deadline
        if cache_scope.strip():
            run.order_memory = self._order_memory
            run.order_scope = "\x1f".join((cache_scope, *sorted(caller.groups)))
        run.summarizer = self._summarizer
        encoder, reranker = self._encoder, self._reranker
        if cache_scope.strip():
            encoder = encoder.for_scope(cache_scope) if isinstance(encoder, ScopedEncoder) else encoder
            reranker = reranker.for_scope(cache_scope) if isinstance(reranker, ScopedReranker) else reranker
        run.reranker = reranker
        if run.reranker is not None and deadline.limit_s is not None:
            run.reranker = DeadlineReranker(run.reranker, deadline)
        if self._summary_cache is not None and cache_scope.strip():
            run.memory = SummaryMemory(self._summary_cache, scope_key(cache_scope, caller))
        run.reports.append(_report("access", run.num_tokens, run, started, None))
        if bypass and run.original_tokens > budget.max_input_tokens:
            raise BudgetExceededError(run.original_tokens, budget.max_input_tokens, budget.source)
        reason = "bypass" if bypass else self._pass_through_reason(run)
        if reason is not None:
            prefix = None if bypass else self._report_prefix(run)
            return _pass_through(run, reason, prefix)
        if encoder is not None and deadline.limit_s is not None:
            encoder = DeadlineEncoder(encoder, deadline)
        for name, stage in STAGES:
            num_before, started = run.num_tokens, time.perf_counter()
            if not deadline.allows(expected_s(name, run)):
                stage, run.is_late = IN_HASTE[name], True
            degraded, failure = run_stage(name, stage, run, self._config, encoder)
            run.reports.append(_report(name, num_before, run, started, degraded, failure))
        assert run.fitted is not None, "the last stage fits the prompt"
        step("template", run.template_failures, self._config.failure, lambda: _remember_order(run), None)
        prefix = None if run.is_late else self._report_prefix(run)
        is_same = run.fitted.messages == run.unreduced
        return _result(
            run,
            messages=run.fitted.messages,
            prompt_tokens=run.fitted.prompt_tokens,
            selected=run.arranged,
            prefix=prefix,
            pass_through="nothing to remove" if is_same else None,
        )

    def _for_messages(self) -> "Reducer":
        """The same for passages inside messages: they are cut at sentences only, and stay in their places."""
        config = msgspec.structs.replace(
            self._config,
            clean=msgspec.structs.replace(self._config.clean, enabled=False),
            dedup=msgspec.structs.replace(self._config.dedup, stitch=False),
            template=msgspec.structs.replace(self._config.template, document_order="input"),
        )
        return Reducer(
            config,
            self._counter,
            self._encoder,
            reranker=self._reranker,
            summary_cache=self._summary_cache,
            summarizer=self._summarizer,
            order_memory=self._order_memory,
            clock=self._clock,
        )

    def _report_prefix(self, run: Run) -> PrefixReport | None:
        block_size = self._config.template.block_size
        work = partial(report_prefix, run.prepared, self._counter, block_size)
        return step("template", run.template_failures, self._config.failure, work, None)

    def _read(self, received: PromptParts, budget: Budget, caller: Caller, *, is_raw: bool) -> Run:
        """Check, filter and count what came in; ``is_raw`` leaves tools and system text alone. Raises as ``reduce``."""
        check_passages(received.passages)
        conversation = read_conversation(received.messages)
        query = make_query(received.messages, conversation)
        prepared, failures = Prepared(received), list[str]()
        if not is_raw:
            work = partial(prepare, received, conversation, self._config.template)
            prepared = step("template", failures, self._config.failure, work, prepared)
        parts, question = prepared.parts, conversation.question
        readable = readable_passages(parts.passages, caller)
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
        return Run(
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
            document_tokens=document_tokens_of(candidates),
            history_tokens=sum(turn_tokens.values()),
            running=candidates,
            template_failures=failures,
        )

    def _pass_through_reason(self, run: Run) -> str | None:
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


def readable_passages(passages: Sequence[Passage], caller: Caller) -> Readable:
    """The access stage. Raises ``StageFailedError`` where it fails: no passage goes on unchecked."""
    try:
        return filter_readable(passages, caller)
    except FORESEEN:
        raise
    except Exception as error:
        failure = note_failure("access", "closed", error)
        raise StageFailedError("access", f"{failure}, and what nobody checked goes to nobody") from error


def _remember_order(run: Run) -> None:
    if run.order_memory is not None and run.order_prefix is not None:
        run.order_memory.remember(run.order_prefix, [passage_key(item) for item in run.arranged])


def _pass_through(run: Run, reason: str, prefix: PrefixReport | None) -> ReductionResult:
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
    run: Run,
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
        stages=[*run.reports, *step_reports("template", run.template_failures, run.num_tokens)],
        prefix=prefix,
        deadline_expired=run.is_late,
        pass_through=pass_through,
    )


def _report(
    name: str,
    num_before: int,
    run: Run,
    started: float,
    degraded: str | None,
    failure: str | msgspec.UnsetType = msgspec.UNSET,
) -> StageReport:
    return StageReport(
        stage=name,
        tokens_before=num_before,
        tokens_after=run.num_tokens,
        ms=round((time.perf_counter() - started) * 1000, 3),
        degraded=degraded,
        failure=failure,
    )
