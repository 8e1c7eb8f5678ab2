"""Recall of a reduction: how much of the answer and the evidence is still in the prompt, and at how many tokens.

A run is: for every case, compact it without a limit and under every budget, look at the messages that came back, score
them; then, with answers, generate from the full prompt and from every reduced one. Scores come from the text in the
messages. What the gateway reports about itself is checked against them.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from eval.datasets import Dataset
from eval.errors import ContextLengthError, GatewayError
from eval.gateway import Compaction, GatewayClient, Generation, PromptRequest, timed
from eval.prompts import bypassing, fixed_request, full_request, max_input_tokens, prove_documents, sent_context
from eval.records import AnswerRecord, AnswerScore, Arm, CaseRecord, CaseScore, CompactionRecord
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

FULL = Arm(name="full prompt", kind="full")


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
    policy: str | None = None
    answers: bool = False
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
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


def reduced_arms(budgets: Sequence[float]) -> list[Arm]:
    """The arm without a limit, then one per budget."""
    return [
        Arm(name="no budget", kind="reduced"),
        *(Arm(name=f"budget {budget:.4g}", kind="reduced", budget=budget) for budget in budgets),
    ]


def baseline_of(arm: Arm) -> Arm:
    """The first whole passages in the retriever's order, until they have at least as many tokens as ``arm`` kept."""
    return Arm(name=f"first passages, {arm.name}", kind="first", budget=arm.budget)


class _Measured(NamedTuple):
    record: CompactionRecord
    score: CaseScore
    baseline: CaseScore | None


@dataclass(slots=True)
class RecallRun:
    """One run over a data set. ``full_client`` generates from full prompts; as another tenant its cache is its own."""

    client: GatewayClient
    full_client: GatewayClient
    dataset: Dataset
    options: RecallOptions
    progress: Progress = field(default_factory=Silent)

    def warm_up(self) -> None:
        """Lets the gateway load what it loads on first use, so that no measured request pays for it."""
        self.progress.step("warming up")
        documents = [{"id": "a", "text": "Copper melts at 1,085 °C."}, {"id": "b", "text": "Tin melts at 232 °C."}]
        messages = [{"role": "user", "content": "Which one melts first?"}]
        request = PromptRequest(messages=messages, documents=documents, max_tokens=2)
        self.client.compact(request)
        if self.options.answers:
            self.client.chat(request)

    def cases(self) -> Iterator[CaseRecord]:
        """Measures and scores case by case."""
        for case in self.dataset.cases:
            record = self._compacted(case)
            if self.options.answers:
                record = self._answered(case, record)
            yield record
            self.progress.case_done()

    def _compacted(self, case: Case) -> CaseRecord:
        compactions: list[CompactionRecord] = []
        scores: list[CaseScore] = []
        for measured in self._compact_arms(case):
            compactions.append(measured.record)
            scores.append(measured.score)
            if measured.baseline is not None:
                scores.append(measured.baseline)
        return CaseRecord(id=case.id, lang=case.lang, compactions=compactions, scores=scores)

    def _compact_arms(self, case: Case) -> Iterator[_Measured]:
        arms = reduced_arms(self.options.budgets)
        policy, max_tokens = self.options.policy, self.options.max_tokens
        try:
            self.progress.step(f"{case.id}: counting the prompt without passages")
            fixed = self.client.compact(fixed_request(case, policy=policy, max_tokens=max_tokens))
            self.progress.step(f"{case.id}: reducing, {arms[0].name}")
            unlimited, call_ms = timed(self.client.compact, full_request(case, policy=policy, max_tokens=max_tokens))
        except GatewayError as error:
            for arm in arms:
                yield _failed(case, CompactionRecord(arm=arm.name, error=str(error)))
            return
        full_tokens = unlimited.original_prompt_tokens - fixed.original_prompt_tokens
        base = CompactionRecord(arm=arms[0].name, fixed_tokens=fixed.prompt_tokens, full_tokens=full_tokens)
        if full_tokens <= 0:
            problem = f"case {case.id}: passages and history have {full_tokens} tokens, there is nothing to reduce"
            for arm in arms:
                yield _failed(case, replace(base, arm=arm.name, error=problem))
            return
        yield _measured(case, base, unlimited, call_ms)
        for arm in arms[1:]:
            assert arm.budget is not None, "only the first arm has no budget"
            limit = max_input_tokens(arm.budget, fixed_tokens=fixed.prompt_tokens, full_tokens=full_tokens)
            base = replace(base, arm=arm.name, max_input_tokens=limit)
            self.progress.step(f"{case.id}: reducing, {arm.name} ({limit:,} tokens)")
            try:
                request = full_request(case, policy=policy, max_input_tokens=limit, max_tokens=max_tokens)
                compaction, call_ms = timed(self.client.compact, request)
            except GatewayError as error:
                yield _failed(case, replace(base, error=str(error)))
            else:
                yield _measured(case, base, compaction, call_ms)

    def _answered(self, case: Case, record: CaseRecord) -> CaseRecord:
        full_tokens = max((item.fixed_tokens + item.full_tokens for item in record.compactions), default=0)
        limits = {item.arm: item for item in record.compactions}
        arms = [FULL, *reduced_arms(self.options.budgets)]
        # The order is drawn anew for every case, so no arm always finds the prefixes that another one left behind.
        random.Random(f"{self.options.seed}/{case.id}").shuffle(arms)
        answers: list[AnswerRecord] = []
        for arm in arms:
            compaction = limits.get(arm.name)
            if compaction is not None and compaction.error is not None:
                answers.append(AnswerRecord(arm=arm.name, error=compaction.error))
                continue
            num_tokens = full_tokens if compaction is None else compaction.prompt_tokens
            self.progress.step(f"{case.id}: answering, {arm.name} ({num_tokens:,} prompt tokens)")
            answers.append(self._answer(case, arm, None if compaction is None else compaction.max_input_tokens))
        scores = [AnswerScore(arm=answer.arm, contains=_contains(case, answer)) for answer in answers]
        return CaseRecord(
            id=record.id,
            lang=record.lang,
            compactions=record.compactions,
            scores=record.scores,
            answers=answers,
            answer_scores=scores,
        )

    def _answer(self, case: Case, arm: Arm, limit: int | None) -> AnswerRecord:
        options = self.options
        request = full_request(case, policy=options.policy, max_input_tokens=limit, max_tokens=options.max_tokens)
        try:
            if arm.kind == "full":
                generation = self.full_client.stream(bypassing(request))
            else:
                generation = self.client.stream(request)
        except ContextLengthError:
            return AnswerRecord(arm=arm.name, does_not_fit=True)
        except GatewayError as error:
            return AnswerRecord(arm=arm.name, error=str(error))
        return answer_record(arm.name, generation)


def answer_record(arm: str, generation: Generation) -> AnswerRecord:
    """A generation as it is written down."""
    return AnswerRecord(
        arm=arm,
        text=generation.text,
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=generation.cached_tokens,
        completion_tokens=generation.completion_tokens,
        ttft_ms=generation.ttft_ms,
        total_ms=generation.total_ms,
        finish_reason=generation.finish_reason,
    )


def can_be_answered(case: Case) -> bool:
    """Whether a generated answer can be judged: there is a short accepted one."""
    return bool(case.answers)


def _contains(case: Case, answer: AnswerRecord) -> float:
    return answer_score(case, SearchText(answer.text)) if answer.error is None and not answer.does_not_fit else 0.0


def _measured(case: Case, base: CompactionRecord, compaction: Compaction, call_ms: float) -> _Measured:
    context = SearchText(sent_context(compaction, case))
    documents = prove_documents(compaction, case, context)
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
    )
    kept_tokens = max(0, compaction.prompt_tokens - base.fixed_tokens)
    score = score_context(case, record.arm, context, documents.kept, kept_tokens / base.full_tokens)
    if case.is_history:
        return _Measured(record, score, None)
    lengths = {decision.id: decision.tokens_before for decision in compaction.documents}
    return _Measured(record, score, _first_passages(case, record, kept_tokens, lengths))


def _first_passages(case: Case, record: CompactionRecord, num_kept: int, lengths: dict[str, int]) -> CaseScore:
    # The passage that crosses the line is taken whole: the comparison is rounded in the baseline's favour.
    taken: list[Chunk] = []
    num_tokens = 0
    for chunk in case.chunks:
        if num_tokens >= num_kept:
            break
        num_tokens += lengths.get(chunk.id, 0)
        taken.append(chunk)
    context = SearchText("\n".join(f"{chunk.title or ''}\n{chunk.text}" for chunk in taken))
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
    return _Measured(record, score_context(case, record.arm, SearchText(""), {}, 0.0), None)
