"""What a load test writes down: one record a request, and the summary over them."""

from typing import Any, Literal

import msgspec

from eval.manifest import DataFile, MachineManifest

Status = Literal["ok", "refused", "failed"]

DEFINITIONS = {
    "ttft": (
        "ms from the request's intended arrival to the first non-empty content delta; an empty role delta does not "
        "count. vLLM's client counts from the sending: the same but for client_lag."
    ),
    "tpot": (
        "ms per output token after the first: (e2el - ttft) / (output tokens - 1), one value a request. As in vLLM; "
        "guidellm's time_per_output_token includes the first token."
    ),
    "itl": "ms between two content deltas, one value a gap, as in vLLM. A delta may hold several tokens.",
    "e2el": "ms from the request's intended arrival to the end of the stream.",
    "stages": (
        "ms of each part of the time to the first token, as the gateway tells; outside the gateway is the rest of the "
        "client's, late sending included. The parts sum to the mean ttft of the requests that told them."
    ),
    "goodput": "successful requests per second that meet every objective given.",
    "hit_rate": (
        "prompt tokens from the prefix cache / prompt tokens, as each request's usage says, counted once a request."
    ),
    "throughput": "tokens of successful requests / seconds from the first intended arrival to the last end.",
    "bucket": (
        "by the tokens of the prompt as the application sent it, before any reduction: short < 512, medium < 2048, "
        "long < 8192, very long."
    ),
    "status": (
        "refused: an HTTP error before the first byte. failed: the stream broke off, timed out or never began. "
        "Neither enters latencies; both are counted beside them."
    ),
}


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as the client saw it. Durations in ms; ``None`` where the server does not tell."""

    id: str
    status: Status
    arrival_s: float
    """Intended, since the start of the test."""
    client_lag_ms: float = 0.0
    """How much later than intended it was sent."""
    bucket: str = "short"
    input_tokens: int = 0
    """Of the prompt as sent by the application."""
    prompt_tokens: int = 0
    """Of the prompt that the model saw."""
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float | None = None
    first_chunk_ms: float | None = None
    """To the first chunk of any kind."""
    e2el_ms: float = 0.0
    itl_ms: list[float] = []
    queue_ms: float | None = None
    prefill_ms: float | None = None
    reduce_ms: float | None = None
    stages_ms: dict[str, float] = {}
    """Stages of the time to the first token as the gateway measured it; they sum to that."""
    contains: float | None = None
    """Whether the answer contains an accepted one."""
    finish_reason: str | None = None
    reason: str | None = None
    """Of a refusal or a failure."""

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; ``None`` for fewer than two."""
        if self.ttft_ms is None or self.output_tokens < 2:
            return None
        return (self.e2el_ms - self.ttft_ms) / (self.output_tokens - 1)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of one duration or length."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    p01: float
    p05: float
    p10: float
    p25: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float


class BucketSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one length, or all of them."""

    bucket: str
    num_requests: int
    completed: int
    refused: dict[str, int]
    """By reason."""
    failed: dict[str, int]
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    queue_ms: Distribution | None
    prefill_ms: Distribution | None
    reduce_ms: Distribution | None
    input_tokens: Distribution | None
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    hit_rate: float | None
    contains: float | None
    """Share of the sampled answers that contain an accepted one."""
    contains_low: float | None = None
    contains_high: float | None = None
    num_scored: int = 0
    stages_ms: dict[str, float] = {}
    """Means of the stages of the time to the first token, over the requests that told them; ``outside the gateway`` is
    what is left of the client's: late sending, connection, delivery."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the test, by intended arrival."""

    start_s: float
    end_s: float
    num_requests: int
    hit_rate: float | None
    ttft_ms_p50: float | None
    kv_usage_max: float | None = None


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """One load test. Names of the totals are those of ``vllm bench serve``."""

    kind: Literal["load"] = "load"
    name: str
    manifest: MachineManifest
    data: DataFile | None
    definitions: dict[str, str]
    duration: float
    """Seconds."""
    completed: int
    failed: int
    """Refused or failed."""
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    objectives: dict[str, float] = {}
    slo_attainment: float | None = None
    """Share of all requests that meet every objective."""
    overall: BucketSummary
    buckets: list[BucketSummary]
    windows: list[Window] = []
    num_out_of_memory: int = 0
    kv_usage_max: float | None = None
    """Most KV blocks in use, 0 to 1, as ``/metrics`` said during the test."""
    num_preemptions: float | None = None
    client_lag_ms_p99: float | None = None
    num_without_usage: int = 0
    """Completed requests whose token counts the server did not tell."""
    requests_file: str | None = None


def encode_requests(records: list[RequestRecord]) -> bytes:
    """One JSON object a line."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def vllm_fields(report: LoadReport) -> dict[str, Any]:
    """The flat result of ``vllm bench serve``: totals, then mean, median, std and percentiles of each latency."""
    flat: dict[str, Any] = {
        name: getattr(report, name)
        for name in (
            *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
            *("request_goodput", "output_throughput", "total_token_throughput"),
        )
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        found: Distribution | None = getattr(report.overall, f"{name}_ms")
        for field, statistic in (("mean", "mean"), ("p50", "median"), ("std", "std"), ("p50", "p50"), ("p95", "p95"),
                                 ("p99", "p99")):  # fmt: skip
            flat[f"{statistic}_{name}_ms"] = None if found is None else getattr(found, field)
    return flat
