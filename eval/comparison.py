"""Compares two results of the same kind: what differs in how they were made, and what in what came out.

Cases and requests are compared in pairs by their id, so both results must come from the same data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from eval.errors import DataError
from eval.intervals import compare
from eval.load_records import LoadReport, RequestRecord
from eval.metrics import case_values
from eval.peers_records import PeersReport
from eval.records import RecallReport
from eval.results_io import Result

_METRICS = ("answer", "evidence", "support", "contains", "f1", "judge", "tokens_kept")
_NUM_RESAMPLES = 2000
_IGNORED = {"date", "command", "data"}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both results."""

    metric: str
    arm: str
    before: float
    after: float
    change: float
    """A difference, or for times a ratio after / before."""
    low: float
    high: float
    num_pairs: int
    is_ratio: bool = False
    num_needed: int | None = None

    @property
    def is_significant(self) -> bool:
        """Whether the interval holds no "nothing changed"."""
        unchanged = 1.0 if self.is_ratio else 0.0
        return not self.low <= unchanged <= self.high


@dataclass(slots=True)
class Comparison:
    """Two results side by side."""

    before: str
    after: str
    made_differently: list[tuple[str, str, str]] = field(default_factory=list)
    """What, before, after."""
    rows: list[Row] = field(default_factory=list)


def compare_results(before: Result, after: Result, *, seed: int = 0) -> Comparison:
    """All that can be compared. Raises DataError for results of two kinds or without records."""
    if type(before.report) is not type(after.report):
        raise DataError(f"{before.name} is a {before.report.kind} result and {after.name} a {after.report.kind} result")
    found = Comparison(before.name, after.name, _made_differently(before, after))
    if isinstance(before.report, RecallReport):
        found.rows = _recall_rows(before, after, seed)
    elif isinstance(before.report, LoadReport):
        found.rows = _load_rows(before, after, seed)
    else:
        raise DataError(f"{before.report.kind} results hold their own comparison; compare results of recall or of load")
    if not found.rows:
        raise DataError(f"{before.name} and {after.name} have no case or request in common")
    return found


def _made_differently(before: Result, after: Result) -> list[tuple[str, str, str]]:
    one, other = (_flat(msgspec.to_builtins(result.report.manifest)) for result in (before, after))
    data = [_data_sha256(result) for result in (before, after)]
    rows = [
        (name, str(one.get(name, "–")), str(other.get(name, "–")))
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name) and name.split(".")[0] not in _IGNORED
    ]
    if data[0] != data[1]:
        rows.insert(0, ("data", data[0], data[1]))
    return rows


def _data_sha256(result: Result) -> str:
    report = result.report
    data = report.manifest.data if isinstance(report, RecallReport | PeersReport) else report.data
    return "–" if data is None else f"{data.name} {data.sha256[:12]}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _recall_rows(before: Result, after: Result, seed: int) -> list[Row]:
    _check_records(before, before.cases)
    _check_records(after, after.cases)
    assert isinstance(before.report, RecallReport), "checked by the caller"
    assert isinstance(after.report, RecallReport), "both are of one kind"
    named = {row.arm.name for row in after.report.arms} | {row.arm.name for row in after.report.answers}
    arms = [row.arm.name for row in before.report.arms if row.arm.name in named]
    rows = []
    for arm in arms:
        for metric in _METRICS:
            old, new = case_values(before.cases, arm, metric), case_values(after.cases, arm, metric)
            both = [id for id in old if id in new]
            if both:
                rows.append(_mean_row(metric, arm, [(old[id], new[id]) for id in both], seed))
    return rows


def _load_rows(before: Result, after: Result, seed: int) -> list[Row]:
    _check_records(before, before.requests)
    _check_records(after, after.requests)
    old = {record.id: record for record in before.requests if record.status == "ok"}
    new = {record.id: record for record in after.requests if record.status == "ok"}
    both = [id for id in old if id in new]
    rows = []
    for metric in ("ttft_ms", "tpot_ms", "e2el_ms"):
        pairs = _pairs(metric, both, old, new)
        if pairs:
            rows += [_quantile_row(f"{metric} P{100 * share:.0f}", pairs, share, seed) for share in (0.5, 0.95, 0.99)]
    for metric in ("prompt_tokens", "cached_tokens", "contains"):
        pairs = _pairs(metric, both, old, new)
        if pairs:
            rows.append(_mean_row(metric, "all", pairs, seed))
    return rows


def _pairs(
    metric: str, ids: Sequence[str], old: Mapping[str, RequestRecord], new: Mapping[str, RequestRecord]
) -> list[tuple[float, float]]:
    values = [(getattr(old[id], metric), getattr(new[id], metric)) for id in ids]
    return [(float(a), float(b)) for a, b in values if a is not None and b is not None]


def _mean_row(metric: str, arm: str, pairs: Sequence[tuple[float, float]], seed: int) -> Row:
    """Difference of the means after - before."""
    paired = compare([after for _, after in pairs], [before for before, _ in pairs], seed=seed)
    return Row(
        metric=metric,
        arm=arm,
        before=float(np.mean([before for before, _ in pairs])),
        after=float(np.mean([after for _, after in pairs])),
        change=paired.difference,
        low=paired.interval.low,
        high=paired.interval.high,
        num_pairs=len(pairs),
        num_needed=paired.num_needed,
    )


def _quantile_row(name: str, pairs: Sequence[tuple[float, float]], share: float, seed: int) -> Row:
    """Ratio of a quantile after / before; requests are drawn anew in pairs for the interval."""
    table = np.asarray(pairs, dtype=np.float64)
    rng = np.random.default_rng(seed)
    drawn = table[rng.integers(0, len(table), size=(_NUM_RESAMPLES, len(table)))]
    quantiles = np.quantile(drawn, share, axis=1)
    low, high = np.percentile(quantiles[:, 1] / quantiles[:, 0], [2.5, 97.5])
    before, after = np.quantile(table, share, axis=0)
    return Row(
        metric=name,
        arm="all",
        before=float(before),
        after=float(after),
        change=float(after / before),
        low=float(low),
        high=float(high),
        num_pairs=len(pairs),
        is_ratio=True,
    )


def _check_records(result: Result, records: Sequence[Any]) -> None:
    if not records:
        raise DataError(f"{result.name}: the records that belong beside it are missing, so nothing can be paired")
