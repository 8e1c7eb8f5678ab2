"""Scores by language and by length of the full prompt: an average hides the cases that a reduction hurts."""

from collections.abc import Callable, Iterable, Sequence

from eval.intervals import estimate
from eval.lengths import LENGTH_BUCKETS, length_bucket
from eval.metrics import case_values
from eval.records import CaseRecord, GroupKind, GroupSummary, Score


def score_of(values: Iterable[float], seed: int) -> Score | None:
    """Mean with its interval; ``None`` without values."""
    scored = list(values)
    if not scored:
        return None
    found = estimate(scored, seed=seed)
    return Score(
        mean=found.mean,
        low=found.interval.low,
        high=found.interval.high,
        method=found.method,
        num_cases=found.num_values,
    )


def full_prompt_tokens(record: CaseRecord) -> int:
    """Tokens of the unreduced prompt, as far as a compaction told; 0 otherwise."""
    return max((item.fixed_tokens + item.full_tokens for item in record.compactions), default=0)


def group_summaries(arm: str, records: Sequence[CaseRecord], seed: int) -> list[GroupSummary]:
    """One row a language, in order of appearance, and one a length bucket, short to long."""
    languages = list(dict.fromkeys(record.lang or "?" for record in records))
    buckets = [name for name in LENGTH_BUCKETS if any(_bucket(record) == name for record in records)]
    return [
        *(_group("language", name, arm, records, lambda record: record.lang or "?", seed) for name in languages),
        *(_group("length", name, arm, records, _bucket, seed) for name in buckets),
    ]


def _bucket(record: CaseRecord) -> str:
    return length_bucket(full_prompt_tokens(record))


def _group(
    kind: GroupKind,
    name: str,
    arm: str,
    records: Sequence[CaseRecord],
    key: Callable[[CaseRecord], str],
    seed: int,
) -> GroupSummary:
    members = [record for record in records if key(record) == name]
    kept = list(case_values(members, arm, "tokens_kept").values())
    return GroupSummary(
        kind=kind,
        name=name,
        num_cases=len(members),
        answer=score_of(case_values(members, arm, "answer").values(), seed),
        evidence=score_of(case_values(members, arm, "evidence").values(), seed),
        contains=score_of(case_values(members, arm, "contains").values(), seed),
        tokens_kept=sum(kept) / len(kept) if kept else None,
    )
