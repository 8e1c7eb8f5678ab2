"""From results to report pages: recall, load and ablation, each with its plots, definitions and manifest."""

from collections.abc import Callable, Iterator

from eval.ablation import TIMES, AblationReport
from eval.load_records import LoadReport
from eval.load_report import contains_cell, p50_p95_p99, rows_of, stage_rows, totals_line, warnings
from eval.manifest import DataFile, MachineManifest, Manifest
from eval.page import Block, Grid, Heading, Page, Paragraph, Plot
from eval.peers_page import peers_blocks
from eval.peers_records import PeersReport
from eval.plots import (
    PlotsMissingError,
    ablation_ratios,
    hit_rate_over_time,
    latency_cdfs,
    load_points,
    recall_against_tokens,
    recall_points,
    ttft_against_length,
    waterfall,
)
from eval.records import GateVerdict, RecallReport, Score
from eval.report import NOTHING, arm_label, milliseconds, percent
from eval.results_io import Result


def result_page(result: Result) -> Page:
    """The report of one result file."""
    report = result.report
    if isinstance(report, RecallReport):
        page = Page(f"Recall: {report.manifest.data.name}", list(_recall(report, result)))
    elif isinstance(report, LoadReport):
        page = Page(f"Load: {report.name}", list(_load(report, result)))
    elif isinstance(report, PeersReport):
        page = Page("firsttoken against other servers", list(peers_blocks(report)))
    else:
        page = Page(f"Ablation: {report.variable}", list(_ablation(report)))
    data = report.manifest.data if isinstance(report, RecallReport | PeersReport) else report.data
    page.blocks += manifest_blocks(report.manifest, data)
    return page


def _recall(report: RecallReport, result: Result) -> Iterator[Block]:
    data = report.manifest.data
    yield Paragraph(f"{data.num_cases} of {data.num_cases_in_file} cases; 95 % intervals in brackets.")
    yield from _gate(report.gate)
    yield Heading("Recall and tokens")
    yield _plot("Recall against tokens kept", lambda: recall_against_tokens(report))
    yield Grid(
        ("arm", "cases", "answer recall", "evidence recall", "gold text", "tokens kept", "empty", "errors"),
        [
            (
                arm_label(row.arm),
                str(row.num_cases),
                score_cell(row.answer),
                score_cell(row.evidence),
                percent(row.gold_text),
                percent(row.tokens_kept),
                str(row.num_empty),
                str(row.num_errors),
            )
            for row in report.arms
        ],
    )
    for skipped in report.skipped:
        yield Paragraph(f"The baseline {skipped.name} was skipped: {skipped.reason}.", "note")
    if report.answers:
        yield Heading("Generated answers")
        yield Grid(
            (
                "arm",
                "contains",
                "F1",
                "exact",
                "citations valid",
                "judge",
                "kappa",
                "prompt tokens P50",
                "TTFT P50 / P90",
            ),
            [
                (
                    row.arm.name,
                    score_cell(row.contains),
                    score_cell(row.f1),
                    score_cell(row.exact),
                    percent(row.citation_validity),
                    score_cell(row.judge),
                    NOTHING if row.judge_kappa is None else f"{row.judge_kappa:.2f}",
                    NOTHING if row.prompt_tokens is None else f"{row.prompt_tokens:,.0f}",
                    f"{milliseconds(row.ttft_ms_median)} / {milliseconds(row.ttft_ms_p90)}",
                )
                for row in report.answers
            ],
        )
        if points := recall_points(result.cases):
            yield _plot("TTFT against the length of the full prompt", lambda: ttft_against_length(points))
    if report.comparisons:
        yield Heading("Paired differences")
        yield Grid(
            ("metric", "arm", "against", "pairs", "difference", "McNemar p", "pairs needed", "detectable"),
            [
                (
                    row.metric,
                    row.arm,
                    row.baseline,
                    str(row.num_pairs),
                    f"{100 * row.difference:+.1f} [{100 * row.low:+.1f}, {100 * row.high:+.1f}]",
                    f"{row.mcnemar_p:.3g}",
                    NOTHING if row.num_needed is None else f"{row.num_needed:,}",
                    NOTHING if row.detectable is None else f"{100 * row.detectable:.1f}",
                )
                for row in report.comparisons
            ],
        )
        yield Paragraph(
            "In points. Needed: pairs at which a true difference of this size is found four times in five. Detectable: "
            "the smallest difference that the pairs at hand would find; a smaller one is inside the noise.",
            "note",
        )
    groups = [(row.arm.name, group) for row in report.arms if row.arm.kind == "reduced" for group in row.groups]
    if groups:
        yield Heading("By language and length")
        yield Grid(
            ("arm", "group", "cases", "answer recall", "evidence recall", "contains", "tokens kept"),
            [
                (
                    name,
                    group.name,
                    str(group.num_cases),
                    score_cell(group.answer),
                    score_cell(group.evidence),
                    score_cell(group.contains),
                    percent(group.tokens_kept),
                )
                for name, group in groups
            ],
        )
    if report.num_errors:
        yield Paragraph(f"{report.num_errors} requests failed and count as 0: {report.first_errors[0]}", "warning")


def _load(report: LoadReport, result: Result) -> Iterator[Block]:
    yield Paragraph(totals_line(report))
    for warning in warnings(report):
        yield Paragraph(warning, "warning")
    yield Heading("Latency by length of the prompt")
    yield Grid(
        ("prompt", "requests", "completed", "TTFT P50 / P95 / P99", "TPOT", "ITL", "E2EL"),
        [
            (
                row.bucket,
                str(row.num_requests),
                str(row.completed),
                *(p50_p95_p99(getattr(row, f"{name}_ms")) for name in ("ttft", "tpot", "itl", "e2el")),
            )
            for row in rows_of(report)
        ],
    )
    if result.requests:
        points = load_points(report.name, result.requests)
        yield _plot("TTFT against prompt length", lambda: ttft_against_length(points))
        yield _plot("TTFT by length bucket", lambda: latency_cdfs(result.requests, "ttft_ms"))
        yield _plot("End-to-end latency by length bucket", lambda: latency_cdfs(result.requests, "e2el_ms"))
    yield Heading("Where the time goes")
    yield _plot("Mean time of a request", lambda: waterfall(report))
    yield Grid(
        ("prompt", "reduce P50 / P95 / P99", "queue", "prefill", "tokens sent P50", "tokens seen P50", "contains"),
        [
            (
                row.bucket,
                *(p50_p95_p99(getattr(row, f"{name}_ms")) for name in ("reduce", "queue", "prefill")),
                NOTHING if row.input_tokens is None else f"{row.input_tokens.p50:,.0f}",
                NOTHING if row.prompt_tokens is None else f"{row.prompt_tokens.p50:,.0f}",
                contains_cell(row),
            )
            for row in rows_of(report)
        ],
    )
    if report.overall.stages_ms:
        yield Heading("Time to the first token by stage, ms, mean")
        yield Grid(("stage", *(row.bucket for row in rows_of(report))), stage_rows(report))
    yield Heading("Prefix cache")
    yield Paragraph(
        f"Hit rate {percent(report.overall.hit_rate)}; KV blocks in use at most {percent(report.kv_usage_max)}."
    )
    yield _plot("Hit rate over time", lambda: hit_rate_over_time(report))
    yield Heading("Definitions")
    yield Grid(("figure", "definition"), list(report.definitions.items()))


def _ablation(report: AblationReport) -> Iterator[Block]:
    yield Paragraph(f"{report.num_rounds} rounds; every arm is compared with {report.baseline}.")
    if report.is_believable:
        yield Paragraph("Self-check: the identical arm ties with the baseline.", "pass")
    for problem in report.self_check:
        yield Paragraph(f"Self-check failed, do not believe this run: the identical arm's {problem}", "fail")
    yield _plot("Times against the baseline", lambda: ablation_ratios(report))
    yield Grid(
        (
            *("arm", "setting", "completed", "TTFT P50 / P95 / P99", "TPOT"),
            *(f"{name} ratio" for name in TIMES),
            *("contains", "hit rate"),
        ),
        [
            (
                arm.name,
                NOTHING if arm.setting is None else f"{arm.setting} = {arm.value}",
                f"{arm.overall.completed} of {arm.overall.num_requests}",
                p50_p95_p99(arm.overall.ttft_ms),
                p50_p95_p99(arm.overall.tpot_ms),
                *(ratios.get(name, NOTHING) for name in TIMES),
                contains_cell(arm.overall),
                percent(arm.overall.hit_rate),
            )
            for arm in report.arms
            for ratios in [{r.metric: f"{r.ratio:.2f} [{r.low:.2f}, {r.high:.2f}]" for r in arm.ratios}]
        ],
    )
    yield Heading("Order of the arms")
    yield Grid(("round", "arms"), [(str(place), ", ".join(arms)) for place, arms in enumerate(report.order, start=1)])


def _gate(verdicts: list[GateVerdict]) -> Iterator[Block]:
    if not verdicts:
        return
    failed = [verdict for verdict in verdicts if verdict.outcome == "fail"]
    yield Paragraph("The gate failed." if failed else "The gate passed.", "fail" if failed else "pass")
    yield Grid(
        ("threshold", "arm", "outcome", "value", "why"),
        [
            (
                item.threshold,
                item.arm,
                item.outcome,
                NOTHING if item.value is None else f"{item.value:.4g}",
                item.reason,
            )
            for item in verdicts
        ],
    )


def _plot(title: str, draw: Callable[[], str]) -> Block:
    try:
        return Plot(title, draw())
    except PlotsMissingError as error:
        return Paragraph(f"{title}: not drawn, {error}.", "note")


def score_cell(score: Score | None) -> str:
    """``95.0 % [91.2, 97.3]``."""
    if score is None:
        return NOTHING
    return f"{100 * score.mean:.1f} % [{100 * score.low:.1f}, {100 * score.high:.1f}]"


def manifest_blocks(manifest: Manifest | MachineManifest, data: DataFile | None) -> list[Block]:
    """Everything that is needed to run it again."""
    rows = [
        ("date", manifest.date),
        ("command", " ".join(manifest.command)),
        ("commit", f"{manifest.commit or NOTHING}{' with local changes' if manifest.has_local_changes else ''}"),
        ("seed", str(manifest.seed)),
        ("device", f"{manifest.device.processor}, {manifest.device.num_cores} cores, {manifest.device.memory_gib} GiB"),
        ("system", f"{manifest.device.system}, Python {manifest.python}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        *((f"setting {name}", str(value)) for name, value in manifest.settings.items()),
    ]
    if isinstance(manifest, Manifest):
        rows += [("model", manifest.model), ("configuration", manifest.config_sha256 or "default")]
    if data is not None:
        rows.append(("data", f"{data.name}, SHA-256 {data.sha256}"))
    return [Heading("Manifest"), Grid(("what", "value"), rows)]
