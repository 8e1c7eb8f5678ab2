"""A histogram that costs a stream little: one observation with every token of every stream."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


def cumulative_buckets(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Counts by upper bound, the last one without, as Prometheus adds them up."""
    return list(zip([*(str(float(bound)) for bound in bounds), "+Inf"], itertools.accumulate(counts), strict=True))


class PlainHistogram(Collector):
    """One series of counts by upper bound; used from one thread, so it needs no locks.

    Read as Prometheus' own: buckets hold what is at most their bound, ``+Inf`` all.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> None:
        """``bounds`` grow; the one without limit is added."""
        self._name = name
        self._text = text
        self._model_name = model_name
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The one series, from the start, so that rates begin at zero."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model_name], cumulative_buckets(self._bounds, self._counts), self._sum)
        yield family
