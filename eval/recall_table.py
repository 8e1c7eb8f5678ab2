"""The committed recall of the default policy over many sets: figures without texts, and the page's table of them."""

from collections.abc import Sequence

import msgspec

from eval.manifest import MachineManifest
from eval.records import AnswerSummary, ArmSummary, Comparison, RecallReport, Score

MARKS = ("<!-- recall table: make eval-committed -->", "<!-- end of the recall table -->")


class RecallCell(msgspec.Struct, frozen=True, kw_only=True):
    """One arm on one set."""

    arm: str
    budget: float | None
    """``None``: no budget given."""
    answer: Score | None
    evidence: Score | None
    tokens_kept: float
    prompt_tokens: float | None
    num_errors: int
    num_empty: int
    reduce_ms_median: float | None
    near_kept: float | None = None
    """Share of the pairs that look alike and state different facts of which both stay."""
    copies_removed: float | None = None
    answer_first: float | None = None
    """The same score of the first passages at no fewer tokens."""
    evidence_first: float | None = None
    versus_first: Comparison | None = None
    """Ours minus the first passages, case by case."""


class LanguageCell(msgspec.Struct, frozen=True, kw_only=True):
    """One language of a set, by arm."""

    language: str
    arm: str
    num_cases: int
    answer: Score | None
    evidence: Score | None


class AnswersCell(msgspec.Struct, frozen=True, kw_only=True):
    """Generated answers from one kind of prompt."""

    arm: str
    num_cases: int
    num_errors: int
    num_does_not_fit: int
    contains: Score
    contains_where_full_fits: Score | None
    f1: Score | None
    prompt_tokens: float | None
    ttft_ms_median: float | None
    versus_full: Comparison | None = None


class CommittedSet(msgspec.Struct, frozen=True, kw_only=True):
    """One data set."""

    name: str
    sha256: str
    """Of the whole file, of which the cases are spread evenly."""
    num_cases: int
    num_cases_in_file: int
    commit: str | None
    date: str
    metric: str
    """``answer`` or ``evidence``: what the table shows."""
    ceiling: Score | None
    """Of the full prompt."""
    cells: list[RecallCell]
    languages: list[LanguageCell] = []
    num_answer_cases: int = 0
    answers: list[AnswersCell] = []


class CommittedRecall(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result."""

    kind: str = "committed"
    manifest: MachineManifest
    sets: list[CommittedSet]
    skipped: dict[str, str] = {}
    """Set -> why it has no figures."""


def make_set(
    name: str, sha256: str, num_cases_in_file: int, report: RecallReport, answers: RecallReport | None
) -> CommittedSet:
    """What is kept of one set's runs. ``answers``: a run that generated, where there is one."""
    full = next(row for row in report.arms if row.arm.kind == "full")
    has_answer = full.answer is not None and full.answer.num_cases >= report.manifest.data.num_cases / 2
    metric = "answer" if has_answer else "evidence"
    rows = [row for row in report.arms if row.arm.kind == "reduced"]
    first = {row.arm.budget: row for row in report.arms if row.arm.kind == "first"}
    languages = [
        LanguageCell(
            language=group.name,
            arm=row.arm.name,
            num_cases=group.num_cases,
            answer=group.answer,
            evidence=group.evidence,
        )
        for row in rows
        for group in row.groups
        if group.kind == "language"
    ]
    return CommittedSet(
        name=name,
        sha256=sha256,
        num_cases=report.manifest.data.num_cases,
        num_cases_in_file=num_cases_in_file,
        commit=report.manifest.commit,
        date=report.manifest.date,
        metric=metric,
        ceiling=getattr(full, metric),
        cells=[_cell(row, first.get(row.arm.budget), metric, report.comparisons) for row in rows],
        languages=languages if len({item.language for item in languages}) > 1 else [],
        num_answer_cases=0 if answers is None else answers.manifest.data.num_cases,
        answers=[] if answers is None else [_answers(row, answers.comparisons) for row in answers.answers],
    )


def _cell(row: ArmSummary, first: ArmSummary | None, metric: str, comparisons: Sequence[Comparison]) -> RecallCell:
    found = row.redundancy
    title = {"answer": "answer recall", "evidence": "evidence recall"}[metric]
    return RecallCell(
        arm=row.arm.name,
        budget=row.arm.budget,
        answer=row.answer,
        evidence=row.evidence,
        tokens_kept=row.tokens_kept,
        prompt_tokens=row.prompt_tokens,
        num_errors=row.num_errors,
        num_empty=row.num_empty,
        reduce_ms_median=row.reduce_ms_median,
        near_kept=None if found is None else found.near_kept,
        copies_removed=None if found is None else found.recall,
        answer_first=None if first is None or first.answer is None else first.answer.mean,
        evidence_first=None if first is None or first.evidence is None else first.evidence.mean,
        versus_first=None if first is None else _comparison(comparisons, title, row.arm.name, first.arm.name),
    )


def _comparison(comparisons: Sequence[Comparison], metric: str, arm: str, baseline: str) -> Comparison | None:
    return next(
        (item for item in comparisons if (item.metric, item.arm, item.baseline) == (metric, arm, baseline)), None
    )


def _answers(row: AnswerSummary, comparisons: Sequence[Comparison]) -> AnswersCell:
    return AnswersCell(
        arm=row.arm.name,
        num_cases=row.num_cases,
        num_errors=row.num_errors,
        num_does_not_fit=row.num_does_not_fit,
        contains=row.contains,
        contains_where_full_fits=row.contains_where_full_fits,
        f1=row.f1,
        prompt_tokens=row.prompt_tokens,
        ttft_ms_median=row.ttft_ms_median,
        versus_full=_comparison(comparisons, "answer containment", row.arm.name, "full prompt"),
    )


def result_tables(result: CommittedRecall) -> str:
    """What stands between the two marks of the page."""
    lines = _recall_lines(result)
    if any(item.answers for item in result.sets):
        lines += ["", *_answer_lines(result)]
    return "\n".join(lines)


def _recall_lines(result: CommittedRecall) -> list[str]:
    budgets = [cell.budget for cell in result.sets[0].cells if cell.budget is not None]
    shares = [f"{100 * budget:.0f} %" for budget in budgets]
    lines = [
        f"| | cases | recall of | no budget | of tokens | {' | '.join(shares)} | first passages |",
        "| --- " * (6 + len(budgets)) + "|",
    ]
    for item in result.sets:
        cells = {cell.budget: cell for cell in item.cells}
        free = cells[None]
        ours = [_recall(getattr(cells[budget], item.metric)) for budget in budgets]
        first = [getattr(cells[budget], f"{item.metric}_first") for budget in budgets]
        heads = " / ".join("–" if value is None else f"{100 * value:.0f}" for value in first)
        what = {"answer": "answers", "evidence": "evidence"}[item.metric]
        lines.append(
            f"| {item.name} | {item.num_cases} | {what} | {_interval(getattr(free, item.metric))} | "
            f"{100 * free.tokens_kept:.0f} % | {' | '.join(ours)} | {heads} |"
        )
    return lines


def _answer_lines(result: CommittedRecall) -> list[str]:
    lines = [
        "| generated answers | cases | full prompt contains | reduced contains | difference, points | tokens | TTFT |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for item in result.sets:
        if not item.answers:
            continue
        full, reduced = item.answers[0], item.answers[1]
        found = reduced.versus_full
        difference = (
            "–" if found is None else f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        )
        num_pairs = "–" if found is None else str(found.num_pairs)
        lines.append(
            f"| {item.name} | {num_pairs} of {item.num_answer_cases} | {_recall(full.contains_where_full_fits)} | "
            f"{_recall(reduced.contains_where_full_fits)} | {difference} | "
            f"{_ratio(full.prompt_tokens, reduced.prompt_tokens)} | "
            f"{_ratio(full.ttft_ms_median, reduced.ttft_ms_median)} |"
        )
    return lines


def _recall(score: Score | None) -> str:
    return "–" if score is None else f"{100 * score.mean:.0f}"


def _interval(score: Score | None) -> str:
    return "–" if score is None else f"{100 * score.mean:.0f} [{100 * score.low:.0f}, {100 * score.high:.0f}]"


def _ratio(full: float | None, reduced: float | None) -> str:
    return "–" if not full or not reduced else f"1 / {full / reduced:.1f}"
