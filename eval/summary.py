"""From the records of single cases to the rows of a report: means, intervals, paired comparisons."""

from collections.abc import Iterable, Sequence
from itertools import islice

from eval.datasets import Dataset
from eval.intervals import compare, estimate, percentile
from eval.manifest import Manifest
from eval.recall import FULL, RecallOptions, baseline_of, reduced_arms
from eval.records import (
    AnswerRecord,
    AnswerSummary,
    Arm,
    ArmSummary,
    CaseRecord,
    CaseScore,
    CompactionRecord,
    Comparison,
    RecallReport,
    Redundancy,
    Score,
)
from eval.redundancy import RedundancyCounts, has_redundancy_labels, redundancy_counts

_NUM_FIRST_ERRORS = 5


def make_report(
    manifest: Manifest, dataset: Dataset, records: Sequence[CaseRecord], options: RecallOptions
) -> RecallReport:
    """The whole report. Raises ``ValueError`` if a score is NaN."""
    arms = reduced_arms(options.budgets)
    has_passages = any(not case.is_history for case in dataset.cases)
    rows: list[ArmSummary] = []
    comparisons: list[Comparison] = []
    for arm in arms:
        rows.append(_arm_summary(arm, dataset, records, options.seed))
        if has_passages:
            baseline = baseline_of(arm)
            rows.append(_arm_summary(baseline, dataset, records, options.seed))
            comparisons += _compare_scores(arm, baseline, records, options.seed)
    answers: list[AnswerSummary] = []
    if options.answers:
        answers = [_answer_summary(arm, records, options.seed) for arm in (FULL, *arms)]
        comparisons += [item for arm in arms for item in _compare_answers(arm, records, options.seed)]
    return RecallReport(
        manifest=manifest,
        arms=rows,
        comparisons=comparisons,
        answers=answers,
        num_count_mismatches=sum(_count_mismatches(record) for record in records),
        first_errors=list(islice(_errors(records), _NUM_FIRST_ERRORS)),
    )


def _arm_summary(arm: Arm, dataset: Dataset, records: Sequence[CaseRecord], seed: int) -> ArmSummary:
    scores = [score for record in records for score in record.scores if score.arm == arm.name]
    measured = [item for record in records for item in record.compactions if item.arm == arm.name]
    done = [item for item in measured if item.error is None]
    failed = {record.id for record in records for item in record.compactions if item.arm == arm.name and item.error}
    # A failed case scores 0, but it has no token count that could flatter the arm.
    kept = [
        score.tokens_kept
        for record in records
        for score in record.scores
        if score.arm == arm.name and record.id not in failed
    ]
    gold_text = [score.gold_text for score in scores if score.gold_text is not None]
    times = [item.call_ms for item in done]
    return ArmSummary(
        arm=arm,
        num_cases=len(scores),
        num_errors=len(failed),
        num_unproven=sum(len(item.unproven) for item in done),
        num_degraded=sum(bool(item.degraded) for item in done),
        answer=_score((score.answer for score in scores), seed),
        evidence=_score((score.evidence for score in scores), seed),
        support=_score((score.support for score in scores), seed),
        gold_text=sum(gold_text) / len(gold_text) if gold_text else None,
        tokens_kept=sum(kept) / len(kept) if kept else 0.0,
        prompt_tokens=percentile([item.prompt_tokens for item in done], 0.5) if done else None,
        reduce_ms_median=percentile(times, 0.5) if times else None,
        reduce_ms_p90=percentile(times, 0.9) if times else None,
        redundancy=_redundancy(arm, dataset, records) if arm.kind == "reduced" else None,
    )


def _score(values: Iterable[float | None], seed: int) -> Score | None:
    scored = [value for value in values if value is not None]
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


def _redundancy(arm: Arm, dataset: Dataset, records: Sequence[CaseRecord]) -> Redundancy | None:
    cases = {case.id: case for case in dataset.cases}
    total = RedundancyCounts()
    num_labelled = 0
    for record in records:
        case = cases[record.id]
        for item in record.compactions:
            if item.arm == arm.name and item.error is None and has_redundancy_labels(case):
                total += redundancy_counts(case, item.merged.keys())
                num_labelled += 1
    if not num_labelled:
        return None
    return Redundancy(
        precision=total.precision,
        recall=total.recall,
        near_kept=total.near_kept,
        removed_right=total.removed_right,
        removed_wrong=total.removed_wrong,
        left_in=total.left_in,
        near_pairs=total.near_pairs,
    )


def _compare_scores(arm: Arm, baseline: Arm, records: Sequence[CaseRecord], seed: int) -> list[Comparison]:
    pairs = [
        (by_arm[arm.name], by_arm[baseline.name])
        for record in records
        if {arm.name, baseline.name} <= (by_arm := {score.arm: score for score in record.scores}).keys()
    ]
    found = []
    for metric in ("answer", "evidence"):
        both = [(_value(ours, metric), _value(theirs, metric)) for ours, theirs in pairs]
        scored = [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None]
        if scored:
            found.append(_comparison(f"{metric} recall", arm, baseline, scored, seed))
    return found


def _value(score: CaseScore, metric: str) -> float | None:
    return score.answer if metric == "answer" else score.evidence


def _comparison(metric: str, arm: Arm, baseline: Arm, scored: Sequence[tuple[float, float]], seed: int) -> Comparison:
    paired = compare([ours for ours, _ in scored], [theirs for _, theirs in scored], seed=seed)
    return Comparison(
        metric=metric,
        arm=arm.name,
        baseline=baseline.name,
        num_pairs=paired.num_pairs,
        difference=paired.difference,
        low=paired.interval.low,
        high=paired.interval.high,
        only_arm=paired.only_arm,
        only_baseline=paired.only_baseline,
        mcnemar_p=paired.mcnemar_p,
    )


def _answer_summary(arm: Arm, records: Sequence[CaseRecord], seed: int) -> AnswerSummary:
    answers = [answer for record in records for answer in record.answers if answer.arm == arm.name]
    fitting = [record for record in records if _full_fits(record)]
    timed = [answer for answer in _answers_of(arm, fitting) if answer.error is None and not answer.does_not_fit]
    ttft = [answer.ttft_ms for answer in timed if answer.ttft_ms is not None]
    contains = _score((_contains(record, arm) for record in records), seed)
    assert contains is not None, "answers are generated for at least one case"
    return AnswerSummary(
        arm=arm,
        num_cases=len(answers),
        num_errors=sum(answer.error is not None for answer in answers),
        num_does_not_fit=sum(answer.does_not_fit for answer in answers),
        contains=contains,
        contains_where_full_fits=_score((_contains(record, arm) for record in fitting), seed),
        prompt_tokens=percentile([answer.prompt_tokens for answer in timed], 0.5) if timed else None,
        cached_tokens=sum(answer.cached_tokens for answer in timed) / len(timed) if timed else None,
        ttft_ms_median=percentile(ttft, 0.5) if ttft else None,
        ttft_ms_p90=percentile(ttft, 0.9) if ttft else None,
    )


def _compare_answers(arm: Arm, records: Sequence[CaseRecord], seed: int) -> list[Comparison]:
    scored = [(_contains(record, arm), _contains(record, FULL)) for record in records if _full_fits(record)]
    return [_comparison("answer containment", arm, FULL, scored, seed)] if scored else []


def _answers_of(arm: Arm, records: Sequence[CaseRecord]) -> list[AnswerRecord]:
    return [answer for record in records for answer in record.answers if answer.arm == arm.name]


def _contains(record: CaseRecord, arm: Arm) -> float:
    return next(score.contains for score in record.answer_scores if score.arm == arm.name)


def _full_fits(record: CaseRecord) -> bool:
    return any(answer.arm == FULL.name and not answer.does_not_fit for answer in record.answers)


def _count_mismatches(record: CaseRecord) -> int:
    announced = {item.arm: item.prompt_tokens for item in record.compactions if item.error is None}
    return sum(
        answer.prompt_tokens != announced[answer.arm]
        for answer in record.answers
        if answer.arm in announced and answer.error is None and not answer.does_not_fit
    )


def _errors(records: Sequence[CaseRecord]) -> Iterable[str]:
    for record in records:
        items: list[CompactionRecord | AnswerRecord] = [*record.compactions, *record.answers]
        for item in items:
            if item.error is not None:
                yield f"{record.id}, {item.arm}: {item.error}"
