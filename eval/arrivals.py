"""When requests arrive in an open-loop test: the clock decides, whatever the server does."""

from collections.abc import Sequence

import numpy as np

from eval.traces import TraceLine


def poisson_arrivals(rate_per_s: float, num_requests: int, *, seed: int, burstiness: float = 1.0) -> list[float]:
    """Arrival times in seconds. Gaps are gamma distributed with mean ``1 / rate_per_s``.

    ``burstiness`` is the shape, as in vLLM: 1 is a Poisson process, less is burstier, more is more regular.
    """
    if rate_per_s <= 0 or burstiness <= 0:
        raise ValueError(f"rate and burstiness must be positive, got {rate_per_s} and {burstiness}")
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate_per_s * burstiness), num_requests)
    return [float(time) for time in np.cumsum(gaps)]


def burst_arrivals(size: int, period_s: float, num_requests: int) -> list[float]:
    """``size`` requests at once, every ``period_s`` seconds.

    >>> burst_arrivals(2, 10.0, 5)
    [0.0, 0.0, 10.0, 10.0, 20.0]
    """
    if size < 1 or period_s <= 0:
        raise ValueError(f"a burst needs at least one request and a positive period, got {size} and {period_s}")
    return [float(number // size * period_s) for number in range(num_requests)]


def trace_arrivals(lines: Sequence[TraceLine], time_scale: float = 1.0) -> list[float]:
    """Arrivals of a trace; a ``time_scale`` of 0.5 replays it twice as fast."""
    if time_scale <= 0:
        raise ValueError(f"time_scale must be positive, got {time_scale}")
    return [(line.t - lines[0].t) * time_scale for line in lines] if lines else []
