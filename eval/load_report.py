"""Prints a load test as tables for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.load_records import BucketSummary, Distribution, LoadReport
from eval.report import NOTHING, milliseconds, percent

_LATENCIES = ("ttft", "tpot", "itl", "e2el")


def print_load(console: Console, report: LoadReport) -> None:
    """Latencies by length, totals, refusals, and how each figure is defined."""
    console.print()
    console.print(_latency_table(report))
    console.print(_split_table(report))
    if report.overall.stages_ms:
        console.print(_stage_table(report))
    console.print(Text(totals_line(report)))
    for name in ("ttft", "tpot", "itl", "e2el", "goodput", "hit_rate", "bucket", "status"):
        console.print(Text(f"{name}: {report.definitions[name]}"), style="dim")
    for warning in warnings(report):
        console.print(Text(warning, style="yellow"))


def p50_p95_p99(found: Distribution | None) -> str:
    """The three percentiles of a table cell, in ms."""
    if found is None:
        return NOTHING
    return " / ".join(milliseconds(value) for value in (found.p50, found.p95, found.p99))


def rows_of(report: LoadReport) -> list[BucketSummary]:
    """The buckets, and all together where there are several."""
    return [*report.buckets, report.overall] if len(report.buckets) > 1 else list(report.buckets)


def _latency_table(report: LoadReport) -> Table:
    table = Table(title=f"{report.name}: ms, P50 / P95 / P99", title_justify="left")
    for heading in ("prompt", "requests", "completed", "TTFT", "TPOT", "ITL", "E2EL"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for row in rows_of(report):
        cells = [p50_p95_p99(getattr(row, f"{name}_ms")) for name in _LATENCIES]
        table.add_row(row.bucket, str(row.num_requests), str(row.completed), *cells)
    return table


def _split_table(report: LoadReport) -> Table:
    table = Table(title="Where the time to the first token goes, ms, P50 / P95 / P99", title_justify="left")
    for heading in (
        "prompt",
        "reduce",
        "queue",
        "prefill",
        "tokens sent P50",
        "tokens seen P50",
        "hit rate",
        "contains",
    ):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for row in rows_of(report):
        table.add_row(
            row.bucket,
            p50_p95_p99(row.reduce_ms),
            p50_p95_p99(row.queue_ms),
            p50_p95_p99(row.prefill_ms),
            NOTHING if row.input_tokens is None else f"{row.input_tokens.p50:,.0f}",
            NOTHING if row.prompt_tokens is None else f"{row.prompt_tokens.p50:,.0f}",
            percent(row.hit_rate),
            contains_cell(row),
        )
    return table


def stage_rows(report: LoadReport) -> list[tuple[str, ...]]:
    """One row a stage, longest first: its name and its mean in each bucket, in ms; the last row is their sum."""
    rows = rows_of(report)
    names = sorted(report.overall.stages_ms, key=lambda name: -report.overall.stages_ms[name])
    cells = [
        (name, *(milliseconds(row.stages_ms[name]) if name in row.stages_ms else NOTHING for row in rows))
        for name in names
    ]
    return [*cells, ("sum", *(milliseconds(sum(row.stages_ms.values())) for row in rows))]


def _stage_table(report: LoadReport) -> Table:
    table = Table(title="Time to the first token by stage, ms, mean", title_justify="left")
    for heading in ("stage", *(row.bucket for row in rows_of(report))):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for cells in stage_rows(report):
        table.add_row(*cells)
    return table


def contains_cell(row: BucketSummary) -> str:
    """Share of answers that contain an accepted one, with its interval."""
    if row.contains is None or row.contains_low is None or row.contains_high is None:
        return NOTHING
    return f"{100 * row.contains:.1f} % [{100 * row.contains_low:.1f}, {100 * row.contains_high:.1f}]"


def totals_line(report: LoadReport) -> str:
    """Throughput, goodput and watermark in a line."""
    parts = [
        f"{report.completed} of {report.completed + report.failed} requests in {report.duration:.1f} s",
        f"{report.request_throughput:.2f} requests/s",
        f"{report.total_input_tokens / report.duration:,.0f} input tokens/s",
        f"{report.output_throughput:,.1f} output tokens/s",
    ]
    if report.request_goodput is not None:
        named = ", ".join(f"{name} {limit:g} ms" for name, limit in report.objectives.items())
        parts.append(
            f"goodput {report.request_goodput:.2f} requests/s ({percent(report.slo_attainment)} within {named})"
        )
    if report.kv_usage_max is not None:
        parts.append(f"KV blocks in use at most {percent(report.kv_usage_max)}")
    return "; ".join(parts)


def warnings(report: LoadReport) -> list[str]:
    """What a reader must know before he believes the figures."""
    found = []
    reasons = {**report.overall.refused, **report.overall.failed}
    if reasons:
        named = ", ".join(f"{count} x {reason}" for reason, count in reasons.items())
        found.append(f"{report.failed} requests have no latency: {named}")
    if report.num_out_of_memory:
        found.append(f"{report.num_out_of_memory} requests ran out of memory")
    if report.num_preemptions:
        found.append(f"{report.num_preemptions:.0f} sequences were preempted")
    if report.num_without_usage:
        found.append(f"{report.num_without_usage} answers came without usage; their token counts are the client's")
    if report.client_lag_ms_p99 is not None and report.client_lag_ms_p99 > 50.0:
        found.append(
            f"the client itself sent late: {report.client_lag_ms_p99:.0f} ms at P99, which is in every latency"
        )
    return found
