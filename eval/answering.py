"""Generates the answers of a recall run and scores them; prompts that were answered before come from the cache."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from eval.answer_quality import citations, exact_match, f1
from eval.arms import FULL
from eval.errors import ContextLengthError, GatewayError
from eval.gateway import Compaction, GatewayClient, Generation, PromptRequest
from eval.generation_cache import GenerationCache
from eval.judge import Judge
from eval.records import AnswerRecord, AnswerScore, CaseRecord, CompactionRecord
from eval.samples import Case
from eval.scoring import SearchText, answer_score

Arms = Sequence[tuple[CompactionRecord, PromptRequest | None, Compaction | None]]


@dataclass(slots=True)
class Answerer:
    """Asks for answers. ``full_client`` generates from full prompts; as another tenant its prefix cache is its own."""

    client: GatewayClient
    full_client: GatewayClient
    max_tokens: int
    seed: int
    cache: GenerationCache | None = None
    judge: Judge | None = None

    def answer(
        self, case: Case, record: CaseRecord, full: PromptRequest, arms: Arms, step: Callable[[str], None]
    ) -> CaseRecord:
        """``record`` with an answer for the full prompt and for every arm, and their scores."""
        tasks: list[tuple[CompactionRecord, PromptRequest | None, Compaction | None]] = [
            (CompactionRecord(arm=FULL.name), full, None),
            *arms,
        ]
        # The order is drawn anew for every case, so no arm always finds the prefixes that another one left behind.
        random.Random(f"{self.seed}/{case.id}").shuffle(tasks)
        full_tokens = max((item.fixed_tokens + item.full_tokens for item in record.compactions), default=0)
        answers: list[AnswerRecord] = []
        for compacted, request, compaction in tasks:
            if request is None:
                answers.append(AnswerRecord(arm=compacted.arm, error=compacted.error))
                continue
            num_tokens = compacted.prompt_tokens or full_tokens
            step(f"{case.id}: answering, {compacted.arm} ({num_tokens:,} prompt tokens)")
            client = self.full_client if compacted.arm == FULL.name else self.client
            answers.append(self._generate(client, compacted.arm, request, compaction))
        labels = {item.arm: item.labels for item in record.compactions}
        labels[FULL.name] = {f"[{place}]": [chunk.id] for place, chunk in enumerate(case.chunks, start=1)}
        scores = [self._score(case, answer, labels.get(answer.arm, {})) for answer in answers]
        return replace(record, answers=answers, answer_scores=scores)

    def _generate(
        self, client: GatewayClient, arm: str, request: PromptRequest, compaction: Compaction | None
    ) -> AnswerRecord:
        try:
            if self.cache is None:
                return answer_record(arm, client.stream(request))
            compaction = compaction or client.compact(request)
            key = self.cache.key(compaction.messages, self.max_tokens)
            if (found := self.cache.get(key)) is not None:
                return replace(answer_record(arm, found), from_cache=True)
            generation = client.stream(request)
            self.cache.put(key, generation)
            return answer_record(arm, generation)
        except ContextLengthError:
            return AnswerRecord(arm=arm, does_not_fit=True)
        except GatewayError as error:
            return AnswerRecord(arm=arm, error=str(error))

    def _score(self, case: Case, answer: AnswerRecord, labels: Mapping[str, list[str]]) -> AnswerScore:
        score = score_answer(case, answer, labels)
        if self.judge is None or answer.error is not None or answer.does_not_fit:
            return score if self.judge is None else replace(score, judge=0.0)
        verdict = self.judge.verdict(case, answer.text)
        return replace(score, judge=verdict.score, judge_error=verdict.error)


def score_answer(case: Case, answer: AnswerRecord, labels: Mapping[str, list[str]]) -> AnswerScore:
    """Scores without a judge. A failed answer, and one that could not be asked for, scores 0 throughout."""
    if answer.error is not None or answer.does_not_fit:
        return AnswerScore(arm=answer.arm, contains=0.0)
    cited = citations(case, answer.text, labels)
    return AnswerScore(
        arm=answer.arm,
        contains=answer_score(case, SearchText(answer.text)),
        exact=exact_match(case, answer.text),
        f1=f1(case, answer.text),
        num_cited=cited.num_cited,
        num_cited_valid=cited.num_valid,
        num_cited_supporting=cited.num_supporting,
    )


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
