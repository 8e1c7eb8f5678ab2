"""From the records of a load test to its report."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from eval.intervals import wilson
from eval.lengths import LENGTH_BUCKETS
from eval.load import LoadRun, ServerSamples
from eval.load_records import (
    DEFINITIONS,
    BucketSummary,
    Distribution,
    LoadReport,
    RequestRecord,
    Window,
)
from eval.manifest import DataFile, MachineManifest

NUM_WINDOWS = 20
OUTSIDE = "outside the gateway"
OBJECTIVES = ("ttft", "tpot", "e2el")
_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def parse_objectives(texts: Iterable[str]) -> dict[str, float]:
    """``ttft:500 tpot:50`` as milliseconds by name. Raises ``ValueError``.

    >>> parse_objectives(["ttft:500", "e2el:2000"])
    {'ttft': 500.0, 'e2el': 2000.0}
    """
    found: dict[str, float] = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or name not in OBJECTIVES:
            raise ValueError(f"an objective looks like ttft:500, named {', '.join(OBJECTIVES)}; got {text!r}")
        found[name] = float(value)
        if found[name] <= 0:
            raise ValueError(f"an objective must be positive, got {text!r}")
    return found


def meets(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether a request succeeded within every objective. One token alone has no TPOT to miss."""
    if record.status != "ok":
        return False
    values = {"ttft": record.ttft_ms, "tpot": record.tpot_ms, "e2el": record.e2el_ms}
    return all(
        (name == "tpot" and values[name] is None) or ((value := values[name]) is not None and value <= limit)
        for name, limit in objectives.items()
    )


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Mean, spread and percentiles, linear between neighbours; ``None`` without values."""
    array = np.asarray([value for value in values if value is not None], dtype=np.float64)
    if array.size == 0:
        return None
    points = np.percentile(array, _PERCENTILES)
    named = {f"p{share:02d}": float(value) for share, value in zip(_PERCENTILES, points, strict=True)}
    return Distribution(
        count=int(array.size),
        mean=float(array.mean()),
        std=float(array.std()),
        min=float(array.min()),
        max=float(array.max()),
        **named,
    )


def hit_rate(records: Iterable[RequestRecord]) -> float | None:
    """Prompt tokens from the cache among all, each request once; ``None`` where nothing was computed."""
    done = [record for record in records if record.status == "ok"]
    total = sum(record.prompt_tokens for record in done)
    return sum(record.cached_tokens for record in done) / total if total else None


def summarise_bucket(name: str, records: Sequence[RequestRecord]) -> BucketSummary:
    """The requests of one length."""
    done = [record for record in records if record.status == "ok"]
    scored = [record.contains for record in done if record.contains is not None]
    interval = wilson(int(sum(scored)), len(scored)) if scored else None
    return BucketSummary(
        bucket=name,
        num_requests=len(records),
        completed=len(done),
        refused=_reasons(records, "refused"),
        failed=_reasons(records, "failed"),
        ttft_ms=distribution(record.ttft_ms for record in done),
        tpot_ms=distribution(record.tpot_ms for record in done),
        itl_ms=distribution(gap for record in done for gap in record.itl_ms),
        e2el_ms=distribution(record.e2el_ms for record in done),
        queue_ms=distribution(record.queue_ms for record in done),
        prefill_ms=distribution(record.prefill_ms for record in done),
        reduce_ms=distribution(record.reduce_ms for record in done),
        input_tokens=distribution(float(record.input_tokens) for record in done),
        prompt_tokens=distribution(float(record.prompt_tokens) for record in done),
        output_tokens=distribution(float(record.output_tokens) for record in done),
        hit_rate=hit_rate(done),
        contains=sum(scored) / len(scored) if scored else None,
        contains_low=None if interval is None else interval.low,
        contains_high=None if interval is None else interval.high,
        num_scored=len(scored),
        stages_ms=mean_stages(done),
    )


def mean_stages(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Means of the parts of the time to the first token; they sum to the mean of it. Empty where nobody told any."""
    told = [record for record in records if record.stages_ms and record.ttft_ms is not None]
    if not told:
        return {}
    sums: dict[str, float] = {}
    for record in told:
        for stage, ms in record.stages_ms.items():
            sums[stage] = sums.get(stage, 0.0) + ms
    sums[OUTSIDE] = sum(record.ttft_ms or 0.0 for record in told) - sum(sums.values())
    return {stage: total / len(told) for stage, total in sums.items()}


def _reasons(records: Iterable[RequestRecord], status: str) -> dict[str, int]:
    return dict(Counter(record.reason or "unknown" for record in records if record.status == status).most_common())


def make_load_report(
    name: str,
    run: LoadRun,
    manifest: MachineManifest,
    *,
    data: DataFile | None = None,
    objectives: Mapping[str, float] | None = None,
) -> LoadReport:
    """The report of one test."""
    records, wanted = run.records, dict(objectives or {})
    done = [record for record in records if record.status == "ok"]
    num_good = sum(meets(record, wanted) for record in records)
    total_input = sum(record.prompt_tokens for record in done)
    total_output = sum(record.output_tokens for record in done)
    found = {
        bucket: [record for record in records if record.bucket == bucket] for bucket in (*LENGTH_BUCKETS, "unknown")
    }
    lag = distribution(record.client_lag_ms for record in records)
    preempted = run.samples.num_preemptions
    return LoadReport(
        name=name,
        manifest=manifest,
        data=data,
        definitions=DEFINITIONS,
        duration=run.duration_s,
        completed=len(done),
        failed=len(records) - len(done),
        total_input_tokens=total_input,
        total_output_tokens=total_output,
        request_throughput=len(done) / run.duration_s,
        request_goodput=num_good / run.duration_s if wanted else None,
        output_throughput=total_output / run.duration_s,
        total_token_throughput=(total_input + total_output) / run.duration_s,
        objectives=wanted,
        slo_attainment=num_good / len(records) if wanted and records else None,
        overall=summarise_bucket("all", records),
        buckets=[summarise_bucket(bucket, members) for bucket, members in found.items() if members],
        windows=_windows(records, run.samples),
        num_out_of_memory=sum(record.reason == "out_of_memory" for record in records),
        kv_usage_max=run.samples.kv_usage_max,
        num_preemptions=preempted[-1] - preempted[0] if preempted else None,
        client_lag_ms_p99=None if lag is None else lag.p99,
        num_without_usage=sum(record.prompt_tokens == 0 for record in done),
    )


def _windows(records: Sequence[RequestRecord], samples: ServerSamples) -> list[Window]:
    if not records:
        return []
    last = max(record.arrival_s for record in records)
    width = last / NUM_WINDOWS if last > 0 else 1.0
    windows = []
    for number in range(NUM_WINDOWS if last > 0 else 1):
        start, end = number * width, (number + 1) * width
        is_last = number == NUM_WINDOWS - 1
        members = [item for item in records if start <= item.arrival_s < end or (is_last and item.arrival_s == last)]
        ttft = distribution(item.ttft_ms for item in members)
        usage = [value for at_s, value in samples.kv_usage if start <= at_s < end]
        windows.append(
            Window(
                start_s=start,
                end_s=end,
                num_requests=len(members),
                hit_rate=hit_rate(members),
                ttft_ms_p50=None if ttft is None else ttft.p50,
                kv_usage_max=max(usage, default=None),
            )
        )
    return windows
