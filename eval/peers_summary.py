"""From the records of all servers to ratios, intervals and what they had to show."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from eval.intervals import NUM_RESAMPLES, compare
from eval.load_records import RequestRecord
from eval.peers_records import PeerComparison, Ratio, Requirement

MIN_P50_RATIO = 5.0
MIN_P95_RATIO = 4.0

Passes = Sequence[Sequence[RequestRecord]]
"""The records of each pass."""


def compare_servers(
    peer: str,
    ours: Passes,
    theirs: Passes,
    low: tuple[Sequence[RequestRecord], Sequence[RequestRecord]],
    questions: Mapping[str, str],
    *,
    seed: int,
) -> PeerComparison:
    """firsttoken against one peer on the requests that both answered.

    ``questions``: request id -> question; a question that came several times counts once in containment. Raises
    ``ValueError`` where no request was answered by both.
    """
    pairs = [pair for mine, other in zip(ours, theirs, strict=True) for pair in _pairs(mine, other)]
    if not pairs:
        raise ValueError(f"no request was answered by both firsttoken and {peer}")
    times = np.array([(mine.ttft_ms, other.ttft_ms) for mine, other in pairs], dtype=np.float64)
    scores: dict[str, list[tuple[float, float]]] = {}
    for mine, other in pairs:
        if mine.contains is not None and other.contains is not None:
            scores.setdefault(questions[mine.id], []).append((mine.contains, other.contains))
    means = [np.mean(values, axis=0) for values in scores.values()]
    contained = compare([float(mean[0]) for mean in means], [float(mean[1]) for mean in means], seed=seed)
    alone = _pairs(*low)
    return PeerComparison(
        peer=peer,
        num_requests=len(pairs),
        ttft_p50=ratio_of_percentiles(times, 50, seed=seed),
        ttft_p95=ratio_of_percentiles(times, 95, seed=seed),
        low_ttft_p50=_median([other.ttft_ms for _, other in alone]) / _median([mine.ttft_ms for mine, _ in alone])
        if alone
        else None,
        num_questions=len(means),
        contains_ours=float(np.mean([mean[0] for mean in means])),
        contains_peer=float(np.mean([mean[1] for mean in means])),
        contains_difference=contained.difference,
        contains_low=contained.interval.low,
        contains_high=contained.interval.high,
        only_ours=contained.only_arm,
        only_peer=contained.only_baseline,
        mcnemar_p=contained.mcnemar_p,
    )


def ratio_of_percentiles(times: NDArray[np.float64], percent: float, *, seed: int) -> Ratio:
    """Peer over ours. ``times``: (num_requests, 2), ours first. The bootstrap draws whole requests."""
    rng = np.random.default_rng(seed)
    num_requests = len(times)
    drawn = times[rng.integers(0, num_requests, size=(NUM_RESAMPLES // 5, num_requests))]
    found = np.percentile(drawn, percent, axis=1)
    low, high = np.percentile(found[:, 1] / found[:, 0], [2.5, 97.5])
    whole = np.percentile(times, percent, axis=0)
    return Ratio(value=float(whole[1] / whole[0]), low=float(low), high=float(high))


def requirements(comparisons: Sequence[PeerComparison], num_failed: int) -> list[Requirement]:
    """What the bench has to show, peer by peer. ``num_failed``: our own requests without an answer."""
    found = [Requirement(text="firsttoken: requests that failed", value=num_failed, is_met=num_failed == 0)]
    for item in comparisons:
        found += [
            _at_least(f"{item.peer}: TTFT P50 over firsttoken's, at least {MIN_P50_RATIO:g}", item.ttft_p50.value,
                      MIN_P50_RATIO),
            _at_least(f"{item.peer}: TTFT P95 over firsttoken's, at least {MIN_P95_RATIO:g}", item.ttft_p95.value,
                      MIN_P95_RATIO),
            _at_least(f"{item.peer}: answers that contain an accepted one, firsttoken's share minus the peer's, at "
                      "least 0", item.contains_difference, 0.0),
        ]  # fmt: skip
    return found


def _at_least(text: str, value: float, limit: float) -> Requirement:
    return Requirement(text=text, value=value, is_met=value >= limit)


def _pairs(mine: Sequence[RequestRecord], other: Sequence[RequestRecord]) -> list[tuple[RequestRecord, RequestRecord]]:
    by_id = {record.id: record for record in other if record.status == "ok" and record.ttft_ms is not None}
    done = [record for record in mine if record.status == "ok" and record.ttft_ms is not None]
    return [(record, by_id[record.id]) for record in done if record.id in by_id]


def _median(values: Sequence[float | None]) -> float:
    return float(np.median(np.array(values, dtype=np.float64)))
