"""Per-case values by name: what gates, comparisons and plots are computed from.

A case that failed has a value of 0, as has one whose value is no number: a gap would flatter the arm.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.records import AnswerRecord, AnswerScore, CaseRecord, CaseScore, CompactionRecord


@dataclass(frozen=True, slots=True)
class Found:
    """All that a record says of one arm."""

    score: CaseScore | None
    answer: AnswerRecord | None
    answer_score: AnswerScore | None
    compaction: CompactionRecord | None


Extract = Callable[[Found], float | None]

QUALITY: dict[str, Extract] = {
    "answer": lambda found: found.score.answer if found.score else None,
    "evidence": lambda found: found.score.evidence if found.score else None,
    "support": lambda found: found.score.support if found.score else None,
    "contains": lambda found: found.answer_score.contains if found.answer_score else None,
    "exact": lambda found: found.answer_score.exact if found.answer_score else None,
    "f1": lambda found: found.answer_score.f1 if found.answer_score else None,
    "judge": lambda found: found.answer_score.judge if found.answer_score else None,
    "citations": lambda found: (
        found.answer_score.num_cited_valid / found.answer_score.num_cited
        if found.answer_score and found.answer_score.num_cited
        else None
    ),
}
"""Higher is better, 0 to 1. ``None``: the case has nothing to score by."""

COSTS: dict[str, Extract] = {
    "tokens_kept": lambda found: found.score.tokens_kept if found.score else None,
    "prompt_tokens": lambda found: float(found.compaction.prompt_tokens) if found.compaction else None,
    "reduce_ms": lambda found: found.compaction.call_ms if found.compaction else None,
    "ttft_ms": lambda found: found.answer.ttft_ms if found.answer is not None and not found.answer.from_cache else None,
}
"""Lower is better. A failed case has no cost."""

NAMES = (*QUALITY, *COSTS)


def find(record: CaseRecord, arm: str) -> Found:
    """What ``record`` holds of ``arm``."""
    return Found(
        score=next((item for item in record.scores if item.arm == arm), None),
        answer=next((item for item in record.answers if item.arm == arm), None),
        answer_score=next((item for item in record.answer_scores if item.arm == arm), None),
        compaction=next((item for item in record.compactions if item.arm == arm), None),
    )


def case_values(records: Sequence[CaseRecord], arm: str, metric: str) -> dict[str, float]:
    """Case id -> value, of the cases that have one. Raises ``ValueError`` for an unknown metric."""
    extract = QUALITY.get(metric) or COSTS.get(metric)
    if extract is None:
        raise ValueError(f"no metric is called {metric!r}; known: {', '.join(NAMES)}")
    values: dict[str, float] = {}
    for record in records:
        found = find(record, arm)
        if metric in COSTS and has_failed(found):
            continue
        value = extract(found)
        if value is not None:
            values[record.id] = value if math.isfinite(value) else 0.0
    return values


def has_failed(found: Found) -> bool:
    """A request of the arm failed in this case."""
    return any(item is not None and item.error is not None for item in (found.compaction, found.answer))


def num_failures(records: Sequence[CaseRecord], arm: str) -> int:
    """Cases of the arm with a failed request, an empty context, or a score that is no number."""
    return sum(_is_failure(find(record, arm)) for record in records)


def _is_failure(found: Found) -> bool:
    if has_failed(found) or (found.compaction is not None and found.compaction.is_empty):
        return True
    if found.answer_score is not None and found.answer_score.judge_error is not None:
        return True
    values = [extract(found) for extract in QUALITY.values()]
    return any(value is not None and not math.isfinite(value) for value in values)
