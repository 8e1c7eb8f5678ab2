"""Uncertainty of scores: intervals for one arm, and paired tests between two arms on the same cases.

Everything is seeded, so the same records give the same figures.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
_Z = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
_Z_POWER = 0.8416212335729143  # 80 % quantile: the power of a planned comparison
_MIN_PAIRS = 6
_MAX_DRAWN = 4_000_000  # indexes held at once

Method = Literal["wilson", "bootstrap"]


class Interval(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    interval: Interval
    method: Method
    num_values: int


class PairedDifference(NamedTuple):
    """Mean of ``arm - baseline`` over the same cases, with its 95 % interval and an exact McNemar test.

    The test is on pass (score of 1) against fail; ``only_arm`` counts cases that pass in the arm alone.
    """

    difference: float
    interval: Interval
    num_pairs: int
    only_arm: int
    only_baseline: int
    mcnemar_p: float
    num_needed: int | None
    """Pairs at which a true difference of this size is found four times in five; ``None`` for a difference of 0."""
    detectable: float
    """Smallest true difference that this many pairs find four times in five."""


def wilson(num_successes: int, num_trials: int) -> Interval:
    """Wilson score interval of a share. It stays honest at 0 and 1, where a bootstrap has no width."""
    if num_trials < 1 or not 0 <= num_successes <= num_trials:
        raise ValueError(f"{num_successes} of {num_trials} is no share")
    share = num_successes / num_trials
    scale = 1 + _Z**2 / num_trials
    centre = (share + _Z**2 / (2 * num_trials)) / scale
    half = _Z * math.sqrt(share * (1 - share) / num_trials + _Z**2 / (4 * num_trials**2)) / scale
    # At the ends the formula is exact and only rounding can leave the range.
    low = 0.0 if num_successes == 0 else max(0.0, centre - half)
    high = 1.0 if num_successes == num_trials else min(1.0, centre + half)
    return Interval(low, high)


def bootstrap(values: Sequence[float], *, seed: int, num_resamples: int = NUM_RESAMPLES) -> Interval:
    """Percentile bootstrap interval of the mean."""
    array = _checked(values)
    rng = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    step = max(1, _MAX_DRAWN // len(array))
    for start in range(0, num_resamples, step):
        stop = min(start + step, num_resamples)
        means[start:stop] = array[rng.integers(0, len(array), size=(stop - start, len(array)))].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(means, [tail, 100 - tail])
    return Interval(float(low), float(high))


def two_way_bootstrap(table: NDArray[np.float64], *, seed: int, num_resamples: int = NUM_RESAMPLES) -> Interval:
    """Percentile bootstrap interval of the mean of ``table``: (rounds, requests), NaN where there is no value.

    Rounds and requests are both drawn anew: what a whole round shares, a slow minute of the machine, is no evidence
    that many requests together could turn into a certainty. A single round is taken as it is.
    """
    known = ~np.isnan(table)
    if not known.any():
        raise ValueError("no values to summarise")
    values = np.where(known, table, 0.0)
    rng = np.random.default_rng(seed)
    num_rounds, num_requests = table.shape
    rounds = rng.multinomial(num_rounds, np.full(num_rounds, 1 / num_rounds), num_resamples).astype(np.float64)
    requests = rng.multinomial(num_requests, np.full(num_requests, 1 / num_requests), num_resamples).astype(np.float64)
    sums = ((rounds @ values) * requests).sum(axis=1)
    counts = ((rounds @ known.astype(np.float64)) * requests).sum(axis=1)
    drawn = counts > 0
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(sums[drawn] / counts[drawn], [tail, 100 - tail])
    return Interval(float(low), float(high))


def estimate(values: Sequence[float], *, seed: int) -> Estimate:
    """Mean with its interval: Wilson where every value is 0 or 1, bootstrap otherwise.

    Raises ``ValueError`` for no values and for NaN: a score that could not be computed is a failure, not a gap.
    """
    array = _checked(values)
    mean = float(array.mean())
    if np.isin(array, (0.0, 1.0)).all():
        return Estimate(mean, wilson(int(array.sum()), len(array)), "wilson", len(array))
    return Estimate(mean, bootstrap(values, seed=seed), "bootstrap", len(array))


def mcnemar(only_arm: int, only_baseline: int) -> float:
    """Exact two-sided p-value that the arm passes where the baseline fails as often as the other way round."""
    if only_arm < 0 or only_baseline < 0:
        raise ValueError(f"counts must not be negative, got {only_arm} and {only_baseline}")
    discordant = only_arm + only_baseline
    tail = sum(math.comb(discordant, k) for k in range(min(only_arm, only_baseline) + 1))
    # Integers of any size divide exactly; the power as a float would overflow.
    return min(1.0, 2 * tail / (1 << discordant))


def compare(arm: Sequence[float], baseline: Sequence[float], *, seed: int) -> PairedDifference:
    """Paired comparison of two arms; the values of one case stand at the same place in both."""
    if len(arm) != len(baseline):
        raise ValueError(f"a paired comparison needs the same cases, got {len(arm)} and {len(baseline)}")
    a, b = _checked(arm), _checked(baseline)
    only_arm = int(((a == 1.0) & (b != 1.0)).sum())
    only_baseline = int(((b == 1.0) & (a != 1.0)).sum())
    differences = (a - b).tolist()
    return PairedDifference(
        difference=float(np.mean(differences)),
        interval=bootstrap(differences, seed=seed),
        num_pairs=len(differences),
        only_arm=only_arm,
        only_baseline=only_baseline,
        mcnemar_p=mcnemar(only_arm, only_baseline),
        num_needed=num_needed(differences),
        detectable=detectable(differences),
    )


def num_needed(differences: Sequence[float]) -> int | None:
    """Pairs that a true difference like the mean one needs to be found at 5 % with a power of 80 %.

    ``None`` where the mean is 0. Never below 6: fewer pairs cannot be significant in an exact test.

    >>> num_needed([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    71
    """
    array = _checked(differences)
    mean = float(array.mean())
    if mean == 0.0:
        return None
    return max(_MIN_PAIRS, math.ceil(((_Z + _Z_POWER) / mean) ** 2 * float(array.var())))


def detectable(differences: Sequence[float]) -> float:
    """The difference that so many pairs find at 5 % with a power of 80 %, given how much the pairs scatter.

    Where all pairs differ by the same, or none does, the largest share of other pairs that chance hides from so many
    (at 95 %): a hundred equal pairs still leave room for three in a hundred.
    """
    array = _checked(differences)
    if array.std() == 0.0:
        return 1.0 - float((1.0 - CONFIDENCE) ** (1.0 / array.size))
    return float((_Z + _Z_POWER) * array.std() / math.sqrt(array.size))


def percentile(values: Sequence[float], share: float) -> float:
    """The ``share`` (0 to 1) quantile of ``values``, linear between neighbours."""
    return float(np.quantile(_checked(values), share))


def _checked(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("no values to summarise")
    if not np.isfinite(array).all():
        bad = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"value {bad} of {array.size} is {array[bad]}")
    return array
