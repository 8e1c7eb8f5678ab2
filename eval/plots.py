"""Plots of results as SVG texts that stand inside a page. matplotlib is imported with the first plot."""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.ablation import AblationReport
from eval.groups import full_prompt_tokens
from eval.lengths import LENGTH_BUCKETS
from eval.load_records import BucketSummary, LoadReport, RequestRecord
from eval.records import ArmSummary, CaseRecord, RecallReport

_COLOURS = ("#1f5fa8", "#d1701c", "#3d8c40", "#b03060", "#6b4fa0", "#7a7a7a", "#008b8b", "#a0522d")
_SIZE = (7.2, 4.0)
_DECODE = "first to last token"
_LEAST_SHARE = 0.01
"""Of the time to the first token: smaller stages are drawn as one."""
_PROLOGUE = re.compile(r"^.*?(?=<svg)", re.DOTALL)


class PlotsMissingError(Exception):
    """matplotlib is not installed."""


def recall_against_tokens(report: RecallReport) -> str:
    """Answer recall (evidence recall where there are no answers) by share of tokens kept, a line for every method."""
    figure, axes = _figure()
    metric = "answer" if any(row.answer for row in report.arms) else "evidence"
    lines: dict[str, list[ArmSummary]] = {}
    for row in report.arms:
        if getattr(row, metric) is not None:
            lines.setdefault(_line_of(row), []).append(row)
    for colour, (name, rows) in zip(_cycle(len(lines)), lines.items(), strict=True):
        ordered = sorted(rows, key=lambda row: row.tokens_kept)
        scores = [getattr(row, metric) for row in ordered]
        means = [100 * score.mean for score in scores]
        below = [100 * (score.mean - score.low) for score in scores]
        above = [100 * (score.high - score.mean) for score in scores]
        axes.errorbar(
            [100 * row.tokens_kept for row in ordered],
            means,
            yerr=[below, above],
            marker="o",
            capsize=3,
            label=name,
            color=colour,
            linewidth=2.2 if name.startswith("firsttoken") else 1.2,
        )
    axes.set_xlabel("tokens kept, %")
    axes.set_ylabel(f"{metric} recall, %")
    axes.set_ylim(-2, 102)
    axes.legend(fontsize=8)
    return _svg(figure, "recall-tokens")


def ttft_against_length(points: dict[str, Sequence[tuple[int, float]]]) -> str:
    """Time to the first token in ms by prompt tokens; one series a name."""
    figure, axes = _figure()
    for colour, (name, series) in zip(_cycle(len(points)), points.items(), strict=True):
        axes.scatter(
            [tokens for tokens, _ in series], [ms for _, ms in series], s=14, alpha=0.7, label=name, color=colour
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, position: f"{value:,.0f}")
        axis.set_minor_formatter(lambda value, position: "")
    axes.set_xlabel("tokens of the prompt as sent by the application")
    axes.set_ylabel("TTFT, ms")
    for limit in (512, 2048, 8192):
        axes.axvline(limit, color="#cccccc", linewidth=0.8, zorder=0)
    axes.legend(fontsize=8)
    return _svg(figure, "ttft-length")


def latency_cdfs(records: Sequence[RequestRecord], metric: str) -> str:
    """Share of requests that were at least so fast, a curve for every length bucket."""
    figure, axes = _figure()
    buckets = [name for name in LENGTH_BUCKETS if any(record.bucket == name for record in records)]
    for colour, name in zip(_cycle(len(buckets)), buckets, strict=True):
        members = [record for record in records if record.bucket == name and record.status == "ok"]
        values = sorted(value for record in members if (value := getattr(record, metric)) is not None)
        if values:
            shares = np.arange(1, len(values) + 1) / len(values) * 100
            axes.step(values, shares, where="post", label=f"{name} ({len(values)})", color=colour)
    axes.set_xlabel(f"{metric.removesuffix('_ms').upper()}, ms")
    axes.set_ylabel("requests, %")
    axes.set_ylim(0, 102)
    axes.legend(fontsize=8)
    return _svg(figure, f"cdf-{metric}")


def waterfall(report: LoadReport) -> str:
    """Mean time to the first token by where it goes: every stage that the gateway told and that is long enough to be
    seen; of other servers reduce, queue, prefill and the rest. Behind it the time to the last token."""
    figure, axes = _figure()
    rows = [row for row in report.buckets if row.e2el_ms is not None and row.ttft_ms is not None]
    parts = _parts(rows)
    left = np.zeros(len(rows))
    for colour, (part, values) in zip(_cycle(len(parts)), parts.items(), strict=True):
        axes.barh([row.bucket for row in rows], values, left=left, label=part, color=colour)
        left += np.array(values)
    axes.invert_yaxis()
    axes.set_xlabel("ms, mean")
    figure.legend(fontsize=8, loc="outside lower center", ncols=5)
    return _svg(figure, "waterfall")


def hit_rate_over_time(report: LoadReport) -> str:
    """Hit rate and KV use in windows of the test."""
    figure, axes = _figure()
    for colour, (name, attribute) in zip(
        _COLOURS, (("hit rate", "hit_rate"), ("KV blocks in use, most", "kv_usage_max")), strict=False
    ):
        known = [window for window in report.windows if getattr(window, attribute) is not None]
        if known:
            middles = [(window.start_s + window.end_s) / 2 for window in known]
            axes.plot(
                middles, [100 * getattr(window, attribute) for window in known], marker="o", label=name, color=colour
            )
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("%")
    axes.set_ylim(-2, 102)
    axes.legend(fontsize=8)
    return _svg(figure, "hits")


def ablation_ratios(report: AblationReport) -> str:
    """Times of every arm against the baseline with intervals; left of 1 is faster."""
    figure, axes = _figure()
    metrics = ("ttft_ms", "tpot_ms", "e2el_ms")
    arms = [arm for arm in report.arms if arm.ratios]
    for number, (colour, metric) in enumerate(zip(_COLOURS, metrics, strict=False)):
        for place, arm in enumerate(arms):
            for ratio in (item for item in arm.ratios if item.metric == metric):
                error = [[ratio.ratio - ratio.low], [ratio.high - ratio.ratio]]
                axes.errorbar(
                    [ratio.ratio],
                    [place + 0.2 * (number - 1)],
                    xerr=error,
                    marker="o",
                    capsize=3,
                    color=colour,
                    label=metric.removesuffix("_ms").upper() if place == 0 else None,
                )
    axes.axvline(1.0, color="#999999", linewidth=0.8)
    axes.set_yticks(range(len(arms)), [arm.name for arm in arms])
    axes.invert_yaxis()
    axes.set_xlabel(f"times {report.baseline}")
    axes.legend(fontsize=8)
    return _svg(figure, "ratios")


def recall_points(records: Sequence[CaseRecord]) -> dict[str, Sequence[tuple[int, float]]]:
    """Points of ``ttft_against_length`` for the answers of a recall run."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for answer in record.answers:
            if answer.ttft_ms is not None and not answer.from_cache:
                points.setdefault(answer.arm, []).append((full_prompt_tokens(record), answer.ttft_ms))
    return dict(points)


def load_points(name: str, records: Sequence[RequestRecord]) -> dict[str, Sequence[tuple[int, float]]]:
    """Points of ``ttft_against_length`` for a load test."""
    return {
        name: [
            (record.input_tokens, record.ttft_ms)
            for record in records
            if record.status == "ok" and record.ttft_ms is not None and record.input_tokens > 0
        ]
    }


def _line_of(row: ArmSummary) -> str:
    if row.arm.kind == "reduced":
        return "firsttoken" if row.arm.policy is None else f"firsttoken, {row.arm.policy}"
    if row.arm.kind == "first":
        return "first passages"
    return row.arm.method or row.arm.name


def _parts(rows: Sequence[BucketSummary]) -> dict[str, list[float]]:
    """Label -> one value a row, in the order in which they are drawn; the values of a row sum to its mean E2EL."""
    if not any(row.stages_ms for row in rows):
        names = ("reduce", "queue", "prefill", "other to first token", _DECODE)
        return {name: [_part(row, name) for row in rows] for name in names}
    told = list(dict.fromkeys(stage for row in rows for stage in row.stages_ms))
    totals = [max(sum(row.stages_ms.values()), 1e-9) for row in rows]
    found: dict[str, list[float]] = {}
    small = [0.0] * len(rows)
    for stage in told:
        values = [row.stages_ms.get(stage, 0.0) for row in rows]
        if max(value / total for value, total in zip(values, totals, strict=True)) < _LEAST_SHARE:
            small = [a + b for a, b in zip(small, values, strict=True)]
        else:
            found[stage] = values
    found["smaller stages"] = small
    found[_DECODE] = [_part(row, _DECODE) for row in rows]
    return found


def _part(row: Any, part: str) -> float:
    named = {
        name: 0.0 if getattr(row, f"{name}_ms") is None else getattr(row, f"{name}_ms").mean
        for name in ("reduce", "queue", "prefill")
    }
    if part in named:
        return float(named[part])
    ttft: float = row.ttft_ms.mean
    if part == _DECODE:
        return float(row.e2el_ms.mean - ttft)
    return max(0.0, ttft - sum(named.values()))


def _cycle(number: int) -> list[str]:
    return [_COLOURS[place % len(_COLOURS)] for place in range(number)]


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsMissingError("plots need the package matplotlib") from None
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.grid(visible=True, color="#eeeeee")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Any, name: str) -> str:
    """The same figure gives the same bytes: no date, and ids that depend on the name alone."""
    import matplotlib

    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is not None and not legend.get_texts():
            legend.remove()
    target = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    return _PROLOGUE.sub("", target.getvalue(), count=1)
