"""Prints results as tables for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.records import AnswerSummary, Arm, ArmSummary, Comparison, GateVerdict, RecallReport, Score

NOTHING = "–"

_RECALL_NOTE = (
    "95 % intervals in brackets. Recall is judged on the text in the compacted messages. 'gold text': how much of the "
    "kept gold passages was not trimmed. 'first passages': the first whole passages in the retriever's order, at "
    "least as many tokens as the arm above kept. 'no budget' runs first on every case and embeds its passages; the "
    "arms after it find the embeddings cached. Baselines named by their method have the same budget, or the tokens "
    "that the arm kept."
)
_COMPARISON_NOTE = (
    "'needed': pairs at which a true difference of this size is found four times in five. 'detectable': the smallest "
    "difference that the pairs at hand would find; below it 'no difference' means 'not seen'."
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
        if report.judge_model is not None:
            console.print(_judge_table(report.answers, report.judge_model))
        if any(row.num_cited for row in report.answers):
            console.print(_citation_table(report.answers))
    if report.comparisons:
        console.print(_comparison_table(report.comparisons))
        console.print(_COMPARISON_NOTE, style="dim")
    if any(len(row.groups) > 2 for row in report.arms):
        console.print(_group_table(report.arms))
    if report.gate:
        print_gate(console, report.gate)
    _print_warnings(console, report)


def print_gate(console: Console, verdicts: Sequence[GateVerdict]) -> None:
    """What every threshold said."""
    console.print(_gate_table(verdicts))


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


def arm_label(arm: Arm) -> str:
    """The arm's name in a table, where baselines stand indented under the arm that they are compared with."""
    if arm.kind == "first":
        return "  first passages"
    return f"  {arm.method}" if arm.kind == "baseline" else arm.name


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
        is_baseline = row.arm.kind != "reduced"
        times = f"{milliseconds(row.reduce_ms_median)} / {milliseconds(row.reduce_ms_p90)}"
        table.add_row(
            arm_label(row.arm),
            str(row.num_cases),
            _score(row.answer),
            _score(row.evidence),
            *([_score(row.support)] if has_support else []),
            percent(row.gold_text),
            percent(row.tokens_kept),
            NOTHING if is_baseline else times,
            NOTHING if row.arm.kind in ("first", "full") else str(row.num_errors),
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
    table.add_column("F1", justify="right")
    table.add_column("exact", justify="right")
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
            percent(row.f1.mean if row.f1 else None),
            percent(row.exact.mean if row.exact else None),
            NOTHING if row.prompt_tokens is None else f"{row.prompt_tokens:,.0f}",
            NOTHING if row.cached_tokens is None else f"{row.cached_tokens:,.0f}",
            f"{milliseconds(row.ttft_ms_median)} / {milliseconds(row.ttft_ms_p90)}",
            str(row.num_errors),
        )
    return table


def _judge_table(rows: Sequence[AnswerSummary], model: str) -> Table:
    table = Table(title=f"Judge model {model}", title_justify="left")
    for heading in ("arm", "agrees", "kappa with containment", "failed verdicts"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in rows:
        kappa = NOTHING if row.judge_kappa is None else f"{row.judge_kappa:.2f}"
        table.add_row(row.arm.name, _score(row.judge), kappa, str(row.num_judge_failures))
    return table


def _citation_table(rows: Sequence[AnswerSummary]) -> Table:
    table = Table(title="Citations", title_justify="left")
    for heading in ("arm", "labels cited", "in the prompt", "support the answer"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in rows:
        shares = (percent(row.citation_validity), percent(row.citation_support))
        table.add_row(row.arm.name, str(row.num_cited), *shares)
    return table


def _group_table(rows: Sequence[ArmSummary]) -> Table:
    table = Table(title="By language and by length of the full prompt", title_justify="left")
    for heading in ("arm", "group", "cases", "answer recall", "evidence recall", "contains", "tokens kept"):
        table.add_column(heading, justify="left" if heading in ("arm", "group") else "right")
    for row in rows:
        if row.arm.kind != "reduced":
            continue
        for group in row.groups:
            table.add_row(
                row.arm.name,
                group.name,
                str(group.num_cases),
                _score(group.answer),
                _score(group.evidence),
                _score(group.contains),
                percent(group.tokens_kept),
            )
    return table


def _gate_table(rows: Sequence[GateVerdict]) -> Table:
    table = Table(title="Gate", title_justify="left")
    for heading in ("threshold", "arm", "outcome", "value", "95 % interval", "why"):
        table.add_column(heading)
    styles = {"pass": "green", "fail": "bold red", "undecided": "yellow"}
    for row in rows:
        interval = NOTHING if row.low is None or row.high is None else f"[{row.low:+.3f}, {row.high:+.3f}]"
        value = NOTHING if row.value is None else f"{row.value:.4g}"
        table.add_row(row.threshold, row.arm, Text(row.outcome, styles[row.outcome]), value, interval, row.reason)
    return table


def _comparison_table(rows: Sequence[Comparison]) -> Table:
    table = Table(title="Paired differences", title_justify="left")
    for heading in ("metric", "arm", "against"):
        table.add_column(heading)
    for heading in ("pairs", "difference", "only arm", "only other", "McNemar p", "needed", "detectable"):
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
            NOTHING if row.num_needed is None else f"{row.num_needed:,}",
            NOTHING if row.detectable is None else f"{100 * row.detectable:.1f}",
        )
    return table


def _print_warnings(console: Console, report: RecallReport) -> None:
    warnings = []
    if unproven := sum(row.num_unproven for row in report.arms):
        warnings.append(f"{unproven} passages were reported as kept, but their text is not in the messages")
    if report.num_count_mismatches:
        warnings.append(f"{report.num_count_mismatches} answers had another prompt_tokens than compaction announced")
    if num_empty := sum(row.num_empty for row in report.arms):
        warnings.append(f"{num_empty} prompts hold nothing of their passages; they count as failures")
    if cached := sum(row.num_from_cache for row in report.answers):
        warnings.append(f"{cached} answers come from the cache of generations; their times are left out")
    warnings += [f"baseline {skipped.name} was skipped: {skipped.reason}" for skipped in report.skipped]
    if degraded := sum(row.num_degraded for row in report.arms):
        warnings.append(f"{degraded} reductions fell back to a cheaper method")
    if report.num_errors:
        warnings.append(f"{report.num_errors} requests failed and count as 0; the first ones:")
        warnings += [f"  {error}" for error in report.first_errors]
    for warning in warnings:
        console.print(Text(warning, style="yellow"))
