"""Thresholds that fail a pipeline when a change hurts answers.

    answer>=0.95              the arm's mean must reach it
    tokens_kept<=0.4          a cost must not exceed it
    failures<=0               failed requests, empty contexts and scores that are no number
    near_kept>=0.98           pairs that look alike and state different facts, both kept
    answer_drop<=0.01         the arm may lose at most so much against the reference, on the same cases

A drop fails only if it is above the limit *and* its 95 % interval holds no 0: what chance explains is ``undecided``,
with the number of cases that would decide it. Undecided passes unless the gate is strict.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eval.arms import FULL
from eval.intervals import compare
from eval.metrics import COSTS, QUALITY, case_values, num_failures
from eval.records import ArmSummary, CaseRecord, GateVerdict

_THRESHOLD = re.compile(r"\s*([a-z0-9_]+)\s*(>=|<=)\s*([0-9.]+)\s*")
_SUMMED = ("near_kept", "copies_removed", "copies_precision")
_DROP = "_drop"

Operator = Literal[">=", "<="]


@dataclass(frozen=True, slots=True)
class Threshold:
    """One condition on one metric."""

    metric: str
    operator: Operator
    limit: float

    @property
    def is_drop(self) -> bool:
        """Compares with the reference instead of with a fixed value."""
        return self.metric.endswith(_DROP)

    def __str__(self) -> str:
        return f"{self.metric}{self.operator}{self.limit:g}"


def parse_threshold(text: str) -> Threshold:
    """Reads ``answer>=0.95``. Raises ``ValueError`` for another form or an unknown metric.

    >>> parse_threshold("answer_drop <= 0.01").limit
    0.01
    """
    found = _THRESHOLD.fullmatch(text)
    if found is None:
        raise ValueError(f"a threshold looks like answer>=0.95 or answer_drop<=0.01, got {text!r}")
    metric, operator = found[1], found[2]
    known = {*QUALITY, *COSTS, *_SUMMED, "failures", *(f"{name}{_DROP}" for name in (*QUALITY, "near_kept"))}
    if metric not in known:
        raise ValueError(f"no metric is called {metric!r}; known: {', '.join(sorted(known))}")
    if metric.endswith(_DROP) and operator != "<=":
        raise ValueError(f"a drop has an upper limit: {metric}<=…, got {text!r}")
    return Threshold(metric, ">=" if operator == ">=" else "<=", float(found[3]))


@dataclass(frozen=True, slots=True)
class Reference:
    """What drops are measured against: an arm of the same records, or of another run's."""

    records: Sequence[CaseRecord]
    arm: str = FULL.name
    near_kept: float | None = None
    """Share of the near pairs that the reference kept."""


def judge_arm(
    threshold: Threshold,
    arm: str,
    records: Sequence[CaseRecord],
    reference: Reference,
    *,
    summary: ArmSummary | None,
    seed: int,
) -> GateVerdict:
    """What one threshold says of one arm. A metric without any value fails: nothing was proven."""
    if threshold.metric == "failures":
        return _fixed(threshold, arm, float(num_failures(records, arm)))
    if threshold.metric in _SUMMED:
        return _fixed(threshold, arm, _summed(summary, threshold.metric))
    if threshold.metric == f"near_kept{_DROP}":
        ours = _summed(summary, "near_kept")
        known = ours is not None and reference.near_kept is not None
        return _fixed(threshold, arm, (reference.near_kept or 0.0) - (ours or 0.0) if known else None)
    if threshold.is_drop:
        return _drop(threshold, arm, records, reference, seed)
    values = list(case_values(records, arm, threshold.metric).values())
    return _fixed(threshold, arm, sum(values) / len(values) if values else None)


def _fixed(threshold: Threshold, arm: str, value: float | None) -> GateVerdict:
    if value is None:
        return GateVerdict(threshold=str(threshold), arm=arm, outcome="fail", value=None, reason="nothing to judge by")
    holds = value >= threshold.limit if threshold.operator == ">=" else value <= threshold.limit
    return GateVerdict(threshold=str(threshold), arm=arm, outcome="pass" if holds else "fail", value=value)


def _drop(
    threshold: Threshold, arm: str, records: Sequence[CaseRecord], reference: Reference, seed: int
) -> GateVerdict:
    metric = threshold.metric.removesuffix(_DROP)
    ours = case_values(records, arm, metric)
    theirs = case_values(reference.records, reference.arm, metric)
    both = [id for id in theirs if id in ours]
    if not both:
        reason = f"no case is scored by {metric} in both"
        return GateVerdict(threshold=str(threshold), arm=arm, outcome="fail", value=None, reason=reason)
    paired = compare([theirs[id] for id in both], [ours[id] for id in both], seed=seed)
    low, high = paired.interval
    outcome: Literal["pass", "fail", "undecided"] = "pass"
    reason = f"{len(both)} pairs; a true drop below {paired.detectable:.3f} would not be seen"
    if paired.difference > threshold.limit:
        outcome = "fail" if low > 0.0 else "undecided"
        if outcome == "undecided":
            reason = f"{len(both)} pairs; chance explains it; {paired.num_needed:,} pairs would decide"
    return GateVerdict(
        threshold=str(threshold), arm=arm, outcome=outcome, value=paired.difference, low=low, high=high, reason=reason
    )


def _summed(summary: ArmSummary | None, metric: str) -> float | None:
    if summary is None or summary.redundancy is None:
        return None
    found = summary.redundancy
    return {"near_kept": found.near_kept, "copies_removed": found.recall, "copies_precision": found.precision}[metric]


def has_failed(verdicts: Sequence[GateVerdict], *, strict: bool = False) -> bool:
    """Whether the pipeline has to stop."""
    stopping = ("fail", "undecided") if strict else ("fail",)
    return any(verdict.outcome in stopping for verdict in verdicts)
