"""The comparison with other servers as a page and as tables in the terminal."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.load_records import BucketSummary
from eval.load_report import contains_cell, p50_p95_p99
from eval.page import Block, Grid, Heading, Paragraph
from eval.peers_records import PeerArm, PeersReport
from eval.report import NOTHING, milliseconds, percent

MARKS = ("<!-- peers table: make bench-peers -->", "<!-- end of the peers table -->")
_SERVERS = (
    *("server", "stage", "answered", "TTFT P50 / P95 / P99", "TPOT P50", "prompt tokens P50", "hit rate"),
    *("contains", "memory MiB"),
)
_RATIOS = (
    *("peer", "requests", "TTFT P50 ratio", "TTFT P95 ratio", "ratio without load"),
    *("contains, firsttoken", "contains, peer", "difference, points", "McNemar p"),
)


def peers_blocks(report: PeersReport) -> Iterator[Block]:
    """Everything that the result holds."""
    yield Paragraph(workload_line(report))
    for item in report.requirements:
        verdict = "met" if item.is_met else "NOT met"
        yield Paragraph(f"{item.text}: {item.value:.3g}, {verdict}.", "pass" if item.is_met else "fail")
    for arm in report.arms:
        if arm.missing is not None:
            yield Paragraph(f"{arm.name} was not measured: {arm.missing}.", "warning")
    yield Heading("Against firsttoken")
    yield Grid(_RATIOS, ratio_rows(report))
    yield Heading("Servers")
    yield Grid(_SERVERS, server_rows(report))
    yield Paragraph(
        "TTFT in ms. Alone: one request at a time, other passages. Passes: open-loop arrivals, each on a fresh server. "
        f"Order: {'; '.join(', '.join(servers) for servers in report.order)}.",
        "note",
    )
    yield Heading("Settings")
    rows = [
        (f"{arm.name} {arm.version}".strip(), ", ".join(f"{name}: {value}" for name, value in arm.settings.items()))
        for arm in report.arms
    ]
    yield Grid(("server", "settings"), rows)
    yield Heading("Definitions")
    yield Grid(("figure", "definition"), list(report.definitions.items()))


def ratio_rows(report: PeersReport) -> list[tuple[str, ...]]:
    """One row a peer."""
    return [
        (
            item.peer,
            str(item.num_requests),
            str(item.ttft_p50),
            str(item.ttft_p95),
            NOTHING if item.low_ttft_p50 is None else f"{item.low_ttft_p50:.1f}",
            percent(item.contains_ours),
            percent(item.contains_peer),
            f"{100 * item.contains_difference:+.1f} [{100 * item.contains_low:+.1f}, {100 * item.contains_high:+.1f}]",
            f"{item.mcnemar_p:.3g}",
        )
        for item in report.comparisons
    ]


def result_table(report: PeersReport) -> str:
    """What stands between the two marks of RESULTS.md: servers under load, then the ratios."""
    lines = [
        "| | TTFT P50 / P95, ms | alone, P50 | prompt tokens | hit rate | contains | failed | memory, GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm in report.arms:
        name = f"{arm.name} {arm.version}".strip()
        found = arm.both
        if found is None or found.ttft_ms is None:
            lines.append(f"| {name} | not measured | | | | | | |")
            continue
        alone = None if arm.low is None or arm.low.ttft_ms is None else arm.low.ttft_ms.p50
        memory = NOTHING if arm.peak_memory_mib is None else f"{arm.peak_memory_mib / 1024:.1f}"
        tokens = NOTHING if found.prompt_tokens is None else f"{found.prompt_tokens.p50:,.0f}"
        lines.append(
            f"| {name} | {found.ttft_ms.p50:,.0f} / {found.ttft_ms.p95:,.0f} | {milliseconds(alone)} | {tokens} | "
            f"{percent(found.hit_rate)} | {percent(found.contains)} | {found.num_requests - found.completed} | "
            f"{memory} |"
        )
    lines += [
        "",
        "| against | TTFT P50 | TTFT P95 | answers that contain an accepted one, points |",
        "| --- | --- | --- | --- |",
    ]
    for item in report.comparisons:
        points = [100 * value for value in (item.contains_difference, item.contains_low, item.contains_high)]
        lines.append(
            f"| {item.peer} | {item.ttft_p50} times | {item.ttft_p95} times | "
            f"{points[0]:+.1f} [{points[1]:+.1f}, {points[2]:+.1f}] |"
        )
    return "\n".join([*lines, "", workload_line(report)])


def workload_line(report: PeersReport) -> str:
    """What was sent."""
    figures = report.workload
    return (
        f"{figures['num_requests']:.0f} requests a pass at {report.rate:.3f} a second, "
        f"{100 * report.utilisation:.0f} % of what the slowest server can do; {figures['num_questions']:.0f} questions "
        f"on {figures['num_passages']:.0f} passages under {figures['num_system_prompts']:.0f} system prompts, "
        f"{figures['num_repeated']:.0f} requests are word for word as before; unreduced prompts of "
        f"{figures['prompt_tokens_median']:,.0f} tokens (median), at most {figures['prompt_tokens_max']:,.0f}."
    )


def server_rows(report: PeersReport) -> list[tuple[str, ...]]:
    """A row for every server and stage."""
    return [_row(arm, found) for arm in report.arms for found in (arm.low, *arm.passes, arm.both) if found is not None]


def _row(arm: PeerArm, found: BucketSummary) -> tuple[str, ...]:
    lost = [*found.refused.items(), *found.failed.items()]
    answered = f"{found.completed} of {found.num_requests}"
    return (
        arm.name,
        found.bucket,
        answered + (f" ({', '.join(f'{count} x {reason}' for reason, count in lost)})" if lost else ""),
        p50_p95_p99(found.ttft_ms),
        NOTHING if found.tpot_ms is None else milliseconds(found.tpot_ms.p50),
        NOTHING if found.prompt_tokens is None else f"{found.prompt_tokens.p50:,.0f}",
        percent(found.hit_rate),
        contains_cell(found),
        NOTHING if arm.peak_memory_mib is None else f"{arm.peak_memory_mib:,.0f}",
    )


def print_peers(console: Console, report: PeersReport) -> None:
    """The two tables and what had to be shown."""
    for columns, rows in ((_SERVERS, server_rows(report)), (_RATIOS, ratio_rows(report))):
        table = Table()
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for item in report.requirements:
        style = "green" if item.is_met else "red"
        console.print(Text(f"{'met' if item.is_met else 'NOT met'}: {item.text}: {item.value:.3g}", style))
    for arm in report.arms:
        if arm.missing is not None:
            console.print(Text(f"{arm.name} was not measured: {arm.missing}", "yellow"))
