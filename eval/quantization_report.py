"""Prints the result of the quantization gate for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.quantization import BucketResult, NeedleCell, QuantizationReport
from eval.report import percent


def print_quantization(console: Console, report: QuantizationReport) -> None:
    """The tables, the verdict with what broke it, and what the run cannot say."""
    console.print()
    title = f"{report.model}: {report.quantization} against unquantized, {report.dtype}, {report.attention_backend}"
    console.print(_bucket_table(report.buckets, f"{title} | {report.text}"))
    console.print("95 % intervals in brackets, over runs of neighbouring positions; KL in nats.", style="dim")
    if report.needles:
        console.print(_needle_table(report.needles))
    if report.recall is not None:
        change = report.recall
        console.print(
            f"answers that hold an accepted one: {percent(report.recall_reference)} unquantized, "
            f"{percent(report.recall_quantized)} quantized, change {100 * change.mean:+.1f} "
            f"[{100 * change.low:+.1f}, {100 * change.high:+.1f}]; {percent(report.recall_same_text)} word for word",
            highlight=False,
        )
    for note in report.notes:
        console.print(Text(note, style="dim"))
    broken = [figure for figure in report.figures if not figure.is_met]
    for figure in broken:
        line = f"FAILED {figure.name}: {figure.value:.4g}, {figure.bound} {figure.limit:.4g} ({figure.detail})"
        console.print(Text(line, style="red"))
    verdict = f"failed: {len(broken)} of" if broken else "passed: all"
    console.print(Text(f"gate {verdict} {len(report.figures)} figures", style="bold red" if broken else "bold green"))


def _bucket_table(buckets: list[BucketResult], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("prompt tokens", "positions", "perplexity", "quantized", "increase", "KL", "top-1", "max |Δlogit|"):
        table.add_column(heading, justify="right")
    for bucket in buckets:
        nats, kl, same = bucket.nll_increase, bucket.kl, bucket.top1_agreement
        table.add_row(
            bucket.bucket,
            f"{bucket.num_positions:,}",
            f"{bucket.perplexity_reference:.2f}",
            f"{bucket.perplexity_quantized:.2f}",
            f"{100 * nats.mean:+.2f} % [{100 * nats.low:+.2f}, {100 * nats.high:+.2f}]",
            f"{kl.mean:.4f} [{kl.low:.4f}, {kl.high:.4f}]",
            f"{100 * same.mean:.1f} % [{100 * same.low:.1f}, {100 * same.high:.1f}]",
            f"{bucket.mean_max_deviation:.2f}, {bucket.max_deviation:.2f}",
        )
    return table


def _needle_table(cells: list[NeedleCell]) -> Table:
    depths = sorted({cell.depth for cell in cells})
    table = Table(title="needles found, unquantized → quantized", title_justify="left")
    table.add_column("tokens", justify="right")
    for depth in depths:
        table.add_column(f"depth {depth:g}", justify="right")
    for length in sorted({cell.length for cell in cells}):
        row = {cell.depth: cell for cell in cells if cell.length == length}
        counts = [
            f"{row[depth].found_reference} → {row[depth].found_quantized} of {row[depth].num_needles}"
            for depth in depths
        ]
        table.add_row(f"{length:,}", *counts)
    return table
