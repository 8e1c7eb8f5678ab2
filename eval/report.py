"""Prints results as tables for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.records import AnswerSummary, ArmSummary, Comparison, RecallReport, Score

NOTHING = "–"

_RECALL_NOTE = (
    "95 % intervals in brackets. Recall is judged on the text in the compacted messages. 'gold text': how much of the "
    "kept gold passages was not trimmed. 'first passages': the first whole passages in the retriever's order, at "
    "least as many tokens as the arm above kept. 'no budget' runs first on every case and embeds its passages; the "
    "arms after it find the embeddings cached."
)
_ANSWER_NOTE = (
    "'contains': the answer contains an accepted one; a prompt that does not fit counts as no answer. Tokens and times "
    "are over the cases whose full prompt fits. TTFT counts from the request sent."
)


def print_recall(console: Console, report: RecallReport) -> None:
    """The tables of a recall run, and what a reader must know to read them."""
    data = report.manifest.data
    of_all = "" if data.num_cases == data.num_cases_in_file else f" of {data.num_cases_in_file}"
    console.print()
    console.print(_recall_table(report.arms, f"{data.name}: {data.num_cases}{of_all} cases"))
    console.print(_RECALL_NOTE, style="dim")
    if any(row.redundancy for row in report.arms):
        console.print(_redundancy_table(report.arms))
    if report.answers:
        console.print(_answer_table(report.answers))
        console.print(_ANSWER_NOTE, style="dim")
    if report.comparisons:
        console.print(_comparison_table(report.comparisons))
    _print_warnings(console, report)


def percent(value: float | None) -> str:
    """``0.1234`` as ``12.3 %``."""
    return NOTHING if value is None else f"{100 * value:.1f} %"


def milliseconds(value: float | None) -> str:
    """Whole milliseconds from 100 on, one decimal below."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def bar(share: float, width: int) -> str:
    """A bar of ``share`` (0 to 1) of ``width`` characters, in steps of an eighth."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def _score(score: Score | None) -> str:
    if score is None:
        return NOTHING
    return f"{100 * score.mean:.1f} % [{100 * score.low:.1f}, {100 * score.high:.1f}]"


def _recall_table(rows: Sequence[ArmSummary], title: str) -> Table:
    has_support = any(row.support for row in rows)
    table = Table(title=title, title_justify="left")
    table.add_column("arm")
    table.add_column("cases", justify="right")
    table.add_column("answer recall", justify="right")
    table.add_column("evidence recall", justify="right")
    if has_support:
        table.add_column("support sentences", justify="right")
    table.add_column("gold text", justify="right")
    table.add_column("tokens kept", justify="right")
    table.add_column("reduce ms p50 / p90", justify="right")
    table.add_column("errors", justify="right")
    for row in rows:
        is_baseline = row.arm.kind == "first"
        times = f"{milliseconds(row.reduce_ms_median)} / {milliseconds(row.reduce_ms_p90)}"
        table.add_row(
            "  first passages" if is_baseline else row.arm.name,
            str(row.num_cases),
            _score(row.answer),
            _score(row.evidence),
            *([_score(row.support)] if has_support else []),
            percent(row.gold_text),
            percent(row.tokens_kept),
            NOTHING if is_baseline else times,
            NOTHING if is_baseline else str(row.num_errors),
            style="dim" if is_baseline else None,
        )
    return table


def _redundancy_table(rows: Sequence[ArmSummary]) -> Table:
    table = Table(title="Copies", title_justify="left")
    for heading in ("arm", "precision", "recall", "near pairs kept", "right", "wrong", "left in", "near pairs"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in rows:
        if (found := row.redundancy) is not None:
            table.add_row(
                row.arm.name,
                percent(found.precision),
                percent(found.recall),
                percent(found.near_kept),
                *(str(count) for count in (found.removed_right, found.removed_wrong, found.left_in, found.near_pairs)),
            )
    return table


def _answer_table(rows: Sequence[AnswerSummary]) -> Table:
    table = Table(title="Generated answers", title_justify="left")
    table.add_column("arm")
    table.add_column("cases", justify="right")
    table.add_column("does not fit", justify="right")
    table.add_column("contains", justify="right")
    table.add_column("contains, full fits", justify="right")
    table.add_column("prompt tokens p50", justify="right")
    table.add_column("cached mean", justify="right")
    table.add_column("TTFT ms p50 / p90", justify="right")
    table.add_column("errors", justify="right")
    for row in rows:
        table.add_row(
            row.arm.name,
            str(row.num_cases),
            str(row.num_does_not_fit),
            _score(row.contains),
            _score(row.contains_where_full_fits),
            NOTHING if row.prompt_tokens is None else f"{row.prompt_tokens:,.0f}",
            NOTHING if row.cached_tokens is None else f"{row.cached_tokens:,.0f}",
            f"{milliseconds(row.ttft_ms_median)} / {milliseconds(row.ttft_ms_p90)}",
            str(row.num_errors),
        )
    return table


def _comparison_table(rows: Sequence[Comparison]) -> Table:
    table = Table(title="Paired differences", title_justify="left")
    for heading in ("metric", "arm", "against"):
        table.add_column(heading)
    for heading in ("pairs", "difference", "only arm", "only other", "McNemar p"):
        table.add_column(heading, justify="right")
    for row in rows:
        difference = f"{100 * row.difference:+.1f} [{100 * row.low:+.1f}, {100 * row.high:+.1f}]"
        table.add_row(
            row.metric,
            row.arm,
            "first passages" if row.baseline.startswith("first passages") else row.baseline,
            str(row.num_pairs),
            difference,
            str(row.only_arm),
            str(row.only_baseline),
            f"{row.mcnemar_p:.3g}",
        )
    return table


def _print_warnings(console: Console, report: RecallReport) -> None:
    warnings = []
    if unproven := sum(row.num_unproven for row in report.arms):
        warnings.append(f"{unproven} passages were reported as kept, but their text is not in the messages")
    if report.num_count_mismatches:
        warnings.append(f"{report.num_count_mismatches} answers had another prompt_tokens than compaction announced")
    if degraded := sum(row.num_degraded for row in report.arms):
        warnings.append(f"{degraded} reductions fell back to a cheaper method")
    if report.num_errors:
        warnings.append(f"{report.num_errors} requests failed and count as 0; the first ones:")
        warnings += [f"  {error}" for error in report.first_errors]
    for warning in warnings:
        console.print(Text(warning, style="yellow"))
