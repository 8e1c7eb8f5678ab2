"""Recall of a reduction: how much of the answer and the evidence is still in the prompt, and at how many tokens.

A run is: for every case, compact it without a limit and under every budget, by every policy, send what the named
baselines would choose, look at the messages that came back, score them; then, with answers, generate from the full
prompt and from every other one. Scores come from the text in the messages. What the gateway reports about itself is
checked against them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from eval.answering import Answerer, answer_record, can_be_answered
from eval.arms import FULL, baseline_of, matched_arms, method_arm, reduced_arms
from eval.datasets import Dataset
from eval.errors import GatewayError
from eval.gateway import Compaction, GatewayClient, PromptRequest, timed
from eval.generation_cache import GenerationCache
from eval.judge import Judge
from eval.prompts import bypassing, fixed_request, full_request, max_input_tokens, prove_documents, sent_context
from eval.records import Arm, CaseRecord, CaseScore, CompactionRecord
from eval.samples import Case, Chunk
from eval.scoring import (
    KeptText,
    SearchText,
    answer_score,
    evidence_score,
    gold_text_share,
    has_scored_answer,
    probe_score,
    support_score,
    turns_score,
)
from eval.selectors import Selector

__all__ = (
    "FULL",
    "Progress",
    "RecallOptions",
    "RecallRun",
    "Silent",
    "answer_record",
    "baseline_of",
    "can_be_answered",
    "reduced_arms",
    "score_context",
)


class Progress(Protocol):
    """Hears what goes on."""

    def step(self, what: str) -> None:
        """A new piece of work begins."""

    def case_done(self) -> None:
        """One more case is finished."""


class Silent:
    """Progress that nobody watches."""

    def step(self, what: str) -> None:
        """Nothing."""

    def case_done(self) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class RecallOptions:
    """What to measure."""

    budgets: Sequence[float] = ()
    policies: Sequence[str] = ()
    """Policies of the reduction, each with arms of its own; without one, the tenant's."""
    answers: bool = False
    citations: bool = False
    """Ask the model to cite its documents by their numbers."""
    max_tokens: int = 32
    """Most output tokens of an answer. Compactions name it too, so that their window is the same."""
    seed: int = 0
    """Order of the arms when answers are generated, and the intervals."""

    def __post_init__(self) -> None:
        for budget in self.budgets:
            if not 0.0 < budget <= 1.0:
                raise ValueError(f"a budget must be above 0 and at most 1, got {budget}")
        if len(set(self.budgets)) != len(self.budgets):
            raise ValueError(f"a budget is named twice: {', '.join(map(str, self.budgets))}")
        if len(set(self.policies)) != len(self.policies):
            raise ValueError(f"a policy is named twice: {', '.join(self.policies)}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


class _Measured(NamedTuple):
    record: CompactionRecord
    score: CaseScore
    request: PromptRequest | None = None
    """What the arm's answer is asked with; ``None`` where the compaction failed."""
    compaction: Compaction | None = None
    first: CaseScore | None = None
    """Score of the first passages at as many tokens."""


@dataclass(slots=True)
class RecallRun:
    """One run over a data set. ``full_client`` generates from full prompts; as another tenant its cache is its own."""

    client: GatewayClient
    full_client: GatewayClient
    dataset: Dataset
    options: RecallOptions
    progress: Progress = field(default_factory=Silent)
    selectors: Sequence[Selector] = ()
    cache: GenerationCache | None = None
    judge: Judge | None = None

    def warm_up(self) -> None:
        """Lets the gateway load what it loads on first use, so that no measured request pays for it."""
        self.progress.step("warming up")
        documents = [{"id": "a", "text": "Copper melts at 1,085 °C."}, {"id": "b", "text": "Tin melts at 232 °C."}]
        messages = [{"role": "user", "content": "Which one melts first?"}]
        request = PromptRequest(messages=messages, documents=documents, max_tokens=2)
        self.client.compact(request)
        if self.options.answers:
            self.client.chat(request)

    def cases(self, done: Mapping[str, CaseRecord] | None = None) -> Iterator[CaseRecord]:
        """Measures and scores case by case; takes those that are ``done`` as they are."""
        options = self.options
        answerer = Answerer(self.client, self.full_client, options.max_tokens, options.seed, self.cache, self.judge)
        for case in self.dataset.cases:
            record = (done or {}).get(case.id)
            if record is None:
                measured = list(self._arms(case))
                record = _case_record(case, measured)
                if options.answers:
                    arms = [(item.record, item.request, item.compaction) for item in measured]
                    record = answerer.answer(case, record, bypassing(self._request(case)), arms, self.progress.step)
            yield record
            self.progress.case_done()

    def _arms(self, case: Case) -> Iterator[_Measured]:
        arms = reduced_arms(self.options.budgets, self.options.policies)
        reduced = list(self._reduced(case, arms))
        yield from reduced
        if case.is_history:
            return
        by_arm = {item.record.arm: item for item in reduced}
        for arm in matched_arms(arms, self.options.policies):
            found = by_arm[arm.name]
            for selector in self.selectors:
                yield self._selected(case, method_arm(selector.name, arm), selector, found)

    def _reduced(self, case: Case, arms: Sequence[Arm]) -> Iterator[_Measured]:
        """The reduced arms in order; the first arm of a policy has no limit and says how long everything is."""
        base = CompactionRecord(arm=arms[0].name)
        is_known = False
        for arm in arms:
            if arm.budget is None or not is_known:
                measured = self._unlimited(case, arm)
                is_known = measured.compaction is not None
                base = measured.record
                yield measured if arm.budget is None else _failed(case, replace(base, arm=arm.name))
                continue
            limit = max_input_tokens(arm.budget, fixed_tokens=base.fixed_tokens, full_tokens=base.full_tokens)
            record = CompactionRecord(
                arm=arm.name, fixed_tokens=base.fixed_tokens, full_tokens=base.full_tokens, max_input_tokens=limit
            )
            self.progress.step(f"{case.id}: reducing, {arm.name} ({limit:,} tokens)")
            yield self._compacted(case, record, self._request(case, arm.policy, limit))

    def _unlimited(self, case: Case, arm: Arm) -> _Measured:
        options = self.options
        record = CompactionRecord(arm=arm.name)
        self.progress.step(f"{case.id}: counting the prompt without passages")
        fixed_only = fixed_request(case, policy=arm.policy, max_tokens=options.max_tokens, citations=options.citations)
        try:
            fixed = self.client.compact(fixed_only)
            self.progress.step(f"{case.id}: reducing, {arm.name}")
            request = self._request(case, arm.policy)
            compaction, call_ms = timed(self.client.compact, request)
        except GatewayError as error:
            return _failed(case, replace(record, error=str(error)))
        full_tokens = compaction.original_prompt_tokens - fixed.original_prompt_tokens
        record = replace(record, fixed_tokens=fixed.prompt_tokens, full_tokens=full_tokens)
        if full_tokens <= 0:
            problem = f"case {case.id}: passages and history have {full_tokens} tokens, there is nothing to reduce"
            return _failed(case, replace(record, error=problem))
        return _measured(case, record, request, compaction, call_ms)

    def _compacted(self, case: Case, record: CompactionRecord, request: PromptRequest) -> _Measured:
        try:
            compaction, call_ms = timed(self.client.compact, request)
        except GatewayError as error:
            return _failed(case, replace(record, error=str(error)))
        return _measured(case, record, request, compaction, call_ms)

    def _selected(self, case: Case, arm: Arm, selector: Selector, reduced: _Measured) -> _Measured:
        """What a baseline chooses in the tokens of a reduced arm, sent as it is."""
        base = reduced.record
        record = CompactionRecord(arm=arm.name, full_tokens=base.full_tokens)
        if reduced.compaction is None:
            return _failed(case, replace(record, error=f"not compared: {base.error}"))
        kept = max(0, base.prompt_tokens - base.fixed_tokens)
        room = kept if arm.budget is None else int(arm.budget * base.full_tokens)
        self.progress.step(f"{case.id}: selecting, {arm.name} ({room:,} tokens)")
        lengths = {item.id: item.tokens_before for item in reduced.compaction.documents}
        try:
            documents = selector.choose(case, lengths, room)
        except Exception as error:  # a case that a third-party compressor fails on is a result too
            return _failed(case, replace(record, error=f"{selector.name}: {type(error).__name__}: {error}"))
        request = bypassing(dataclasses.replace(self._request(case), documents=documents))
        record = replace(record, fixed_tokens=base.fixed_tokens)
        measured = self._compacted(case, record, request)._replace(first=None)
        if selector.is_verbatim:
            return measured
        score = replace(measured.score, evidence=None, gold_text=None)
        return measured._replace(score=score, record=replace(measured.record, unproven=[]))

    def _request(self, case: Case, policy: str | None = None, limit: int | None = None) -> PromptRequest:
        return full_request(
            case,
            policy=policy,
            max_input_tokens=limit,
            max_tokens=self.options.max_tokens,
            citations=self.options.citations,
        )


def _case_record(case: Case, measured: Sequence[_Measured]) -> CaseRecord:
    scores: list[CaseScore] = []
    for item in measured:
        scores.append(item.score)
        if item.first is not None:
            scores.append(item.first)
    scores.append(_full_score(case))
    return CaseRecord(id=case.id, lang=case.lang, compactions=[item.record for item in measured], scores=scores)


def _full_score(case: Case) -> CaseScore:
    """Of everything there is: what a reduction can lose at most."""
    texts = [turn.content for turn in case.history] if case.is_history else [_whole(chunk) for chunk in case.chunks]
    kept = {chunk.id: [(0, len(chunk.text))] for chunk in case.chunks}
    return score_context(case, FULL.name, SearchText("\n".join(texts)), kept, 1.0)


def _whole(chunk: Chunk) -> str:
    return f"{chunk.title or ''}\n{chunk.text}"


def _measured(
    case: Case, base: CompactionRecord, request: PromptRequest, compaction: Compaction, call_ms: float
) -> _Measured:
    text = sent_context(compaction, case)
    context = SearchText(text)
    documents = prove_documents(compaction, case, context)
    labels: dict[str, list[str]] = {}
    for decision in compaction.documents:
        if decision.label and decision.action != "dropped":
            labels.setdefault(decision.label, []).append(decision.id)
    record = replace(
        base,
        prompt_tokens=compaction.prompt_tokens,
        call_ms=call_ms,
        stage_ms=sum(stage.ms for stage in compaction.stages),
        kept=documents.kept,
        merged=documents.merged,
        dropped=documents.dropped,
        unproven=documents.unproven,
        degraded={stage.stage: stage.degraded for stage in compaction.stages if stage.degraded},
        labels=labels,
        is_empty=not text.strip(),
    )
    kept_tokens = max(0, compaction.prompt_tokens - base.fixed_tokens)
    score = score_context(case, record.arm, context, documents.kept, kept_tokens / base.full_tokens)
    if case.is_history:
        return _Measured(record, score, request, compaction)
    lengths = {decision.id: decision.tokens_before for decision in compaction.documents}
    first = _first_passages(case, record, kept_tokens, lengths)
    return _Measured(record, score, request, compaction, first)


def _first_passages(case: Case, record: CompactionRecord, num_kept: int, lengths: dict[str, int]) -> CaseScore:
    # The passage that crosses the line is taken whole: the comparison is rounded in the baseline's favour.
    taken: list[Chunk] = []
    num_tokens = 0
    for chunk in case.chunks:
        if num_tokens >= num_kept:
            break
        num_tokens += lengths.get(chunk.id, 0)
        taken.append(chunk)
    context = SearchText("\n".join(_whole(chunk) for chunk in taken))
    kept = {chunk.id: [(0, len(chunk.text))] for chunk in taken}
    arm = baseline_of(Arm(name=record.arm, kind="reduced"))
    return score_context(case, arm.name, context, kept, num_tokens / record.full_tokens)


def score_context(case: Case, arm: str, context: SearchText, kept: KeptText, tokens_kept: float) -> CaseScore:
    """Scores of the text that an arm left in the prompt. An empty text scores 0 wherever there is something to find."""
    if case.is_history:
        return CaseScore(
            arm=arm,
            answer=probe_score(case, context),
            evidence=turns_score(case, context),
            support=None,
            gold_text=None,
            tokens_kept=tokens_kept,
        )
    return CaseScore(
        arm=arm,
        answer=answer_score(case, context) if has_scored_answer(case) else None,
        evidence=evidence_score(case, kept),
        support=support_score(case, context),
        gold_text=gold_text_share(case, kept),
        tokens_kept=tokens_kept,
    )


def _failed(case: Case, record: CompactionRecord) -> _Measured:
    return _Measured(record, score_context(case, record.arm, SearchText(""), {}, 0.0))
