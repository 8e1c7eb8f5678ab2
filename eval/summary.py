"""From the records of single cases to the rows of a report: means, intervals, paired comparisons."""

from collections.abc import Iterable, Sequence
from itertools import islice

from eval.arms import FULL, baseline_of, matched_arms, method_arm, reduced_arms
from eval.datasets import Dataset
from eval.groups import group_summaries, score_of
from eval.intervals import compare, percentile
from eval.judge import cohen_kappa
from eval.manifest import Manifest
from eval.metrics import case_values
from eval.recall import RecallOptions
from eval.records import (
    AnswerRecord,
    AnswerSummary,
    Arm,
    ArmSummary,
    CaseRecord,
    CompactionRecord,
    Comparison,
    RecallReport,
    Redundancy,
    SkippedArm,
)
from eval.redundancy import RedundancyCounts, has_redundancy_labels, redundancy_counts

_NUM_FIRST_ERRORS = 5


def make_report(
    manifest: Manifest,
    dataset: Dataset,
    records: Sequence[CaseRecord],
    options: RecallOptions,
    *,
    methods: Sequence[str] = (),
    skipped: Sequence[SkippedArm] = (),
    judge_model: str | None = None,
) -> RecallReport:
    """The whole report. ``methods`` are the named baselines that ran. A score that is no number counts as 0."""
    reduced = reduced_arms(options.budgets, options.policies)
    has_passages = any(not case.is_history for case in dataset.cases)
    seed = options.seed
    rows = [_arm_summary(FULL, dataset, records, seed)]
    compared: list[tuple[Arm, Arm]] = []
    methods = methods if has_passages else ()
    baselines = [method_arm(method, arm) for arm in matched_arms(reduced, options.policies) for method in methods]
    for arm in reduced:
        rows.append(_arm_summary(arm, dataset, records, seed))
        if has_passages:
            rows.append(_arm_summary(baseline_of(arm), dataset, records, seed))
            compared.append((arm, baseline_of(arm)))
        own = [method_arm(method, arm) for method in methods]
        rows += [_arm_summary(other, dataset, records, seed) for other in own if other in baselines]
        compared += [(arm, other) for other in own if other in baselines]
    compared += _policy_pairs(reduced, options.policies)
    comparisons = [item for pair in compared for item in _compare_scores(*pair, records, seed)]
    answers: list[AnswerSummary] = []
    if options.answers:
        answers = [_answer_summary(arm, records, seed) for arm in (FULL, *reduced, *baselines)]
        comparisons += [item for arm in reduced for item in _compare_answers(arm, records, seed)]
    return RecallReport(
        manifest=manifest,
        arms=rows,
        comparisons=comparisons,
        answers=answers,
        num_count_mismatches=sum(_count_mismatches(record) for record in records),
        first_errors=list(islice(_errors(records), _NUM_FIRST_ERRORS)),
        skipped=list(skipped),
        judge_model=judge_model,
    )


def _policy_pairs(arms: Sequence[Arm], policies: Sequence[str]) -> list[tuple[Arm, Arm]]:
    """Each further policy against the first one at the same budget."""
    first = {arm.budget: arm for arm in matched_arms(arms, policies)}
    return [(arm, first[arm.budget]) for arm in arms if arm != first[arm.budget]]


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
        num_empty=sum(item.is_empty for item in done),
        answer=score_of(case_values(records, arm.name, "answer").values(), seed),
        evidence=score_of(case_values(records, arm.name, "evidence").values(), seed),
        support=score_of(case_values(records, arm.name, "support").values(), seed),
        gold_text=sum(gold_text) / len(gold_text) if gold_text else None,
        tokens_kept=sum(kept) / len(kept) if kept else 0.0,
        prompt_tokens=percentile([item.prompt_tokens for item in done], 0.5) if done else None,
        reduce_ms_median=percentile(times, 0.5) if times else None,
        reduce_ms_p90=percentile(times, 0.9) if times else None,
        redundancy=_redundancy(arm, dataset, records) if arm.kind == "reduced" else None,
        groups=group_summaries(arm.name, records, seed),
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
    found = []
    for metric in ("answer", "evidence"):
        scored = _pairs(arm, baseline, records, metric)
        if scored:
            found.append(_comparison(f"{metric} recall", arm, baseline, scored, seed))
    return found


def _pairs(arm: Arm, baseline: Arm, records: Sequence[CaseRecord], metric: str) -> list[tuple[float, float]]:
    ours, theirs = case_values(records, arm.name, metric), case_values(records, baseline.name, metric)
    return [(value, theirs[id]) for id, value in ours.items() if id in theirs]


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
        num_needed=paired.num_needed,
        detectable=paired.detectable,
    )


def _answer_summary(arm: Arm, records: Sequence[CaseRecord], seed: int) -> AnswerSummary:
    answers = [answer for record in records for answer in record.answers if answer.arm == arm.name]
    fitting = [record for record in records if _full_fits(record)]
    timed = [answer for answer in _answers_of(arm, fitting) if answer.error is None and not answer.does_not_fit]
    ttft = [answer.ttft_ms for answer in timed if answer.ttft_ms is not None and not answer.from_cache]
    contains = score_of(case_values(records, arm.name, "contains").values(), seed)
    judged = [score for record in records for score in record.answer_scores if score.arm == arm.name]
    verdicts = [score for score in judged if score.judge is not None]
    num_cited = sum(score.num_cited for score in judged)
    assert contains is not None, "answers are generated for at least one case"
    return AnswerSummary(
        arm=arm,
        num_cases=len(answers),
        num_errors=sum(answer.error is not None for answer in answers),
        num_does_not_fit=sum(answer.does_not_fit for answer in answers),
        contains=contains,
        contains_where_full_fits=score_of(case_values(fitting, arm.name, "contains").values(), seed),
        prompt_tokens=percentile([answer.prompt_tokens for answer in timed], 0.5) if timed else None,
        cached_tokens=sum(answer.cached_tokens for answer in timed) / len(timed) if timed else None,
        ttft_ms_median=percentile(ttft, 0.5) if ttft else None,
        ttft_ms_p90=percentile(ttft, 0.9) if ttft else None,
        exact=score_of(case_values(records, arm.name, "exact").values(), seed),
        f1=score_of(case_values(records, arm.name, "f1").values(), seed),
        num_cited=num_cited,
        citation_validity=sum(score.num_cited_valid for score in judged) / num_cited if num_cited else None,
        citation_support=sum(score.num_cited_supporting for score in judged) / num_cited if num_cited else None,
        judge=score_of(case_values(records, arm.name, "judge").values(), seed),
        judge_kappa=cohen_kappa([score.judge or 0.0 for score in verdicts], [score.contains for score in verdicts])
        if verdicts
        else None,
        num_judge_failures=sum(score.judge_error is not None for score in judged),
        num_from_cache=sum(answer.from_cache for answer in answers),
    )


def _compare_answers(arm: Arm, records: Sequence[CaseRecord], seed: int) -> list[Comparison]:
    fitting = [record for record in records if _full_fits(record)]
    found = []
    for metric, title in (("contains", "answer containment"), ("f1", "answer F1")):
        scored = _pairs(arm, FULL, fitting, metric)
        if scored:
            found.append(_comparison(title, arm, FULL, scored, seed))
    return found


def _answers_of(arm: Arm, records: Sequence[CaseRecord]) -> list[AnswerRecord]:
    return [answer for record in records for answer in record.answers if answer.arm == arm.name]


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
