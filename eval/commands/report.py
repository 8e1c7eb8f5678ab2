"""``firsttoken eval report`` and ``compare``: pages of one result, and two results side by side."""

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.commands.recall import check_folder, parse_gate
from eval.comparison import Comparison, Row, compare_results
from eval.errors import EvalError
from eval.gate import Reference, Threshold, has_failed, judge_arm
from eval.page import Block, Grid, Heading, Page, Paragraph
from eval.records import GateVerdict, RecallReport
from eval.report import NOTHING, print_gate
from eval.results_io import Result, read_result

RESULT = click.Path(path_type=Path, exists=True, dir_okay=False)
WRITTEN = click.Path(path_type=Path, dir_okay=False)


@click.command("report")
@click.argument("result", type=RESULT)
@click.option("--html", "html_file", type=WRITTEN, help="One file with everything in it.")
@click.option("--markdown", "markdown_file", type=WRITTEN, help="The same as Markdown.")
def report(result: Path, html_file: Path | None, markdown_file: Path | None) -> None:
    """Pages of a RESULT of recall, load or ablation; without an option, HTML beside it."""
    from eval.pages import result_page

    try:
        check_folder("--html", html_file)
        check_folder("--markdown", markdown_file)
        page = result_page(read_result(result))
    except EvalError as error:
        raise click.UsageError(str(error)) from None
    if html_file is None and markdown_file is None:
        html_file = result.with_suffix(".html")
    _write(page, html_file, markdown_file)


@click.command("compare")
@click.argument("before", type=RESULT)
@click.argument("after", type=RESULT)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--gate", multiple=True, callback=parse_gate, metavar="THRESHOLDS", help="As in recall; AFTER is judged.")
@click.option("--gate-strict", is_flag=True, help="A drop that chance explains fails too.")
@click.option("--html", "html_file", type=WRITTEN)
@click.option("--markdown", "markdown_file", type=WRITTEN)
def compare(
    before: Path,
    after: Path,
    seed: int,
    gate: tuple[Threshold, ...],
    gate_strict: bool,
    html_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Two results of the same kind, case by case: BEFORE against AFTER.

    Exit status: 1 if a threshold failed, 2 for files that cannot be compared.
    """
    console = Console()
    try:
        check_folder("--html", html_file)
        check_folder("--markdown", markdown_file)
        old, new = read_result(before), read_result(after)
        found = compare_results(old, new, seed=seed)
        verdicts = _verdicts(gate, old, new, seed)
    except EvalError as error:
        raise click.UsageError(str(error)) from None
    print_comparison(console, found)
    if verdicts:
        print_gate(console, verdicts)
    _write(comparison_page(found, verdicts), html_file, markdown_file)
    if has_failed(verdicts, strict=gate_strict):
        sys.exit(1)


def _write(page: Page, html_file: Path | None, markdown_file: Path | None) -> None:
    console = Console()
    for file, text in ((html_file, page.html), (markdown_file, page.markdown)):
        if file is not None:
            file.write_text(text(), encoding="utf-8")
            console.print(f"written: {file}", highlight=False)


def _verdicts(gate: tuple[Threshold, ...], old: Result, new: Result, seed: int) -> list[GateVerdict]:
    if not gate:
        return []
    if not isinstance(new.report, RecallReport) or not isinstance(old.report, RecallReport):
        raise EvalError("--gate judges results of recall")
    before = {row.arm.name: row for row in old.report.arms}
    verdicts = []
    for row in new.report.arms:
        if row.arm.kind != "reduced" or row.arm.name not in before:
            continue
        redundancy = before[row.arm.name].redundancy
        reference = Reference(old.cases, row.arm.name, None if redundancy is None else redundancy.near_kept)
        verdicts += [judge_arm(item, row.arm.name, new.cases, reference, summary=row, seed=seed) for item in gate]
    if not verdicts:
        raise EvalError("the two results share no reduced arm to judge")
    return verdicts


def _cells(row: Row) -> tuple[str, ...]:
    form = "{:,.0f}" if row.is_ratio or max(abs(row.before), abs(row.after)) > 10 else "{:.3f}"
    signed = "{:.2f}" if row.is_ratio else "{:+.3f}"
    change = f"{signed.format(row.change)} [{signed.format(row.low)}, {signed.format(row.high)}]"
    return (
        row.metric,
        row.arm,
        form.format(row.before),
        form.format(row.after),
        f"× {change}" if row.is_ratio else change,
        str(row.num_pairs),
        NOTHING if row.num_needed is None else f"{row.num_needed:,}",
    )


_COLUMNS = ("metric", "arm", "before", "after", "change", "pairs", "pairs needed")


def print_comparison(console: Console, found: Comparison) -> None:
    """What was made differently, then every figure; changes that chance does not explain are bold."""
    if found.made_differently:
        table = Table(title="Made differently", title_justify="left")
        for heading in ("what", found.before, found.after):
            table.add_column(heading)
        for row in found.made_differently:
            table.add_row(*row)
        console.print(table)
    if any(what == "data" for what, _, _ in found.made_differently):
        console.print(Text("the data differ: only cases with the same id are compared", "yellow"))
    table = Table(title=f"{found.before} → {found.after}", title_justify="left")
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading in ("metric", "arm") else "right")
    for item in found.rows:
        table.add_row(*_cells(item), style="bold" if item.is_significant else None)
    console.print(table)


def comparison_page(found: Comparison, verdicts: list[GateVerdict]) -> Page:
    """The same as a page."""
    blocks: list[Block] = []
    if verdicts:
        failed = has_failed(verdicts)
        blocks.append(Paragraph("The gate failed." if failed else "The gate passed.", "fail" if failed else "pass"))
        rows = [(item.threshold, item.arm, item.outcome, item.reason) for item in verdicts]
        blocks.append(Grid(("threshold", "arm", "outcome", "why"), rows))
    if found.made_differently:
        blocks += [Heading("Made differently"), Grid(("what", found.before, found.after), found.made_differently)]
    blocks += [Heading("Figures"), Grid(_COLUMNS, [_cells(row) for row in found.rows])]
    return Page(f"{found.before} → {found.after}", blocks)
