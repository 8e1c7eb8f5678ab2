"""The stages of the time to the first token for Prometheus: sums by stage and length bucket."""

from collections.abc import Iterator

from prometheus_client.core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from app.waterfall import STAGES, Waterfall
from engine.lengths import LENGTH_BUCKETS, LengthBucket, length_bucket

_PLACES = {name: place for place, name in enumerate(STAGES)}


class WaterfallCollector(Collector):
    """Sums of all waterfalls, by stage and length. Adding to it is a few additions; it is used from one thread."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = dict.fromkeys(LENGTH_BUCKETS, 0)
        self._sums_us: dict[LengthBucket, list[int]] = {bucket: [0] * len(STAGES) for bucket in LENGTH_BUCKETS}

    def add(self, num_prompt_tokens: int, waterfall: Waterfall) -> None:
        """Adds one request, by the length of its prompt as the model saw it."""
        bucket = length_bucket(num_prompt_tokens)
        self._counts[bucket] += 1
        sums = self._sums_us[bucket]
        for stage, start_us, end_us in waterfall.intervals:
            sums[_PLACES[stage]] += end_us - start_us

    def collect(self) -> Iterator[Metric]:
        """One series a stage and length bucket from the start, so that nothing grows and rates begin at zero."""
        family = SummaryMetricFamily(
            "firsttoken_ttft_stage_seconds",
            "Stages of the time to the first token; over all stages they sum to it",
            labels=["model_name", "stage", "length_bucket"],
        )
        for bucket, sums in self._sums_us.items():
            for stage, us in zip(STAGES, sums, strict=True):
                family.add_metric(
                    [self._model_name, stage, bucket], count_value=self._counts[bucket], sum_value=us / 1e6
                )
        yield family
