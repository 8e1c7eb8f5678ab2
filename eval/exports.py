"""Load results in the shapes of guidellm and aiperf, with their names and units, so that their readers read ours."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from eval.load_records import Distribution, LoadReport, RequestRecord
from eval.load_summary import distribution

Value = Callable[[RequestRecord], float | None]

_PER_REQUEST: dict[str, Value] = {
    "request_latency": lambda record: record.e2el_ms / 1000.0,
    "prompt_token_count": lambda record: float(record.prompt_tokens),
    "output_token_count": lambda record: float(record.output_tokens),
    "time_to_first_token_ms": lambda record: record.ttft_ms,
    "time_to_first_output_token_ms": lambda record: record.ttft_ms,
    "time_per_output_token_ms": lambda record: record.e2el_ms / record.output_tokens if record.output_tokens else None,
    "inter_token_latency_ms": lambda record: record.tpot_ms,
    "prompt_tokens_per_second": lambda record: _rate(record.prompt_tokens, record.ttft_ms),
    "output_tokens_per_second": lambda record: _rate(record.output_tokens, record.e2el_ms),
    "tokens_per_second": lambda record: _rate(record.prompt_tokens + record.output_tokens, record.e2el_ms),
}


def guidellm_document(report: LoadReport, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """``benchmarks[].metrics``; time per output token includes the first one there, and latency is in seconds."""
    by_status = {
        "successful": [record for record in records if record.status == "ok"],
        "errored": [record for record in records if record.status == "refused"],
        "incomplete": [record for record in records if record.status == "failed"],
    }
    counts = {name: len(members) for name, members in by_status.items()} | {"total": len(records)}
    metrics: dict[str, Any] = {
        name: {status: _guidellm(distribution(map(value, members))) for status, members in by_status.items()}
        | {"total": _guidellm(distribution(map(value, by_status["successful"])))}
        for name, value in _PER_REQUEST.items()
    }
    metrics["request_totals"] = counts
    metrics["requests_per_second"] = {"successful": {"mean": report.request_throughput}}
    metrics["request_goodput"] = report.request_goodput
    metrics["slo_attainment"] = report.slo_attainment
    started = datetime.fromisoformat(report.manifest.date).timestamp()
    benchmark = {
        "type_": "generative_benchmark",
        "config": {"run_id": report.name, "settings": report.manifest.settings},
        "start_time": started,
        "end_time": started + report.duration,
        "duration": report.duration,
        "metrics": metrics,
        "request_totals": counts,
        "requests": {status: [_request(record) for record in members] for status, members in by_status.items()},
    }
    return {"metadata": {"version": 1, "tool": "firsttoken"}, "benchmarks": [benchmark]}


def aiperf_document(report: LoadReport, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """``profile_export_aiperf.json``: every metric with its unit, average and percentiles."""
    done = [record for record in records if record.status == "ok"]
    gaps = [gap for record in done for gap in record.itl_ms]
    failed = len(records) - len(done)
    found: dict[str, Any] = {
        "time_to_first_token": _aiperf("ms", [record.ttft_ms for record in done]),
        "time_to_second_token": _aiperf("ms", [record.itl_ms[0] if record.itl_ms else None for record in done]),
        "request_latency": _aiperf("ms", [record.e2el_ms for record in done]),
        "inter_token_latency": _aiperf("ms", [record.tpot_ms for record in done]),
        "inter_chunk_latency": _aiperf("ms", gaps),
        "output_token_throughput_per_user": _aiperf(
            "tokens/sec/user", [1000.0 / record.tpot_ms if record.tpot_ms else None for record in done]
        ),
        "input_sequence_length": _aiperf("tokens", [float(record.prompt_tokens) for record in done]),
        "output_sequence_length": _aiperf("tokens", [float(record.output_tokens) for record in done]),
        "usage_prompt_tokens": _aiperf("tokens", [float(record.prompt_tokens) for record in done]),
        "usage_prompt_cache_read_tokens": _aiperf("tokens", [float(record.cached_tokens) for record in done]),
        "request_throughput": _single("requests/sec", report.request_throughput),
        "output_token_throughput": _single("tokens/sec", report.output_throughput),
        "total_token_throughput": _single("tokens/sec", report.total_token_throughput),
        "request_count": _single("requests", len(done)),
        "error_request_count": _single("requests", failed),
        "request_error_rate": _single("ratio", failed / len(records) if records else 0.0),
        "context_overflow_count": _single(
            "requests", sum("context_length_exceeded" in (record.reason or "") for record in records)
        ),
    }
    if report.request_goodput is not None and report.slo_attainment is not None:
        found["goodput"] = _single("requests/sec", report.request_goodput)
        found["good_request_fraction"] = _single("ratio", report.slo_attainment)
        found["good_request_count"] = _single("requests", round(report.slo_attainment * len(records)))
    measured = {name: value for name, value in found.items() if value is not None}
    return {"schema_version": "1.4", "input_config": report.manifest.settings, **measured}


def _request(record: RequestRecord) -> dict[str, Any]:
    return {
        "request_id": record.id,
        "request_latency": record.e2el_ms / 1000.0,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "time_to_first_token_ms": record.ttft_ms,
        "inter_token_latency_ms": record.tpot_ms,
        "error": record.reason,
    }


def _guidellm(found: Distribution | None) -> dict[str, Any] | None:
    if found is None:
        return None
    shares = ("p01", "p05", "p10", "p25", "p50", "p75", "p90", "p95", "p99")
    return {
        "mean": found.mean,
        "median": found.p50,
        "std_dev": found.std,
        "min": found.min,
        "max": found.max,
        "count": found.count,
        "percentiles": {share: getattr(found, share) for share in shares},
    }


def _aiperf(unit: str, values: Sequence[float | None]) -> dict[str, Any] | None:
    found = distribution(values)
    if found is None:
        return None
    shares = {"p1": found.p01, "p5": found.p05, "p10": found.p10, "p25": found.p25, "p50": found.p50, "p75": found.p75,
              "p90": found.p90, "p95": found.p95, "p99": found.p99}  # fmt: skip
    return {
        "unit": unit, "avg": found.mean, "min": found.min, "max": found.max, "std": found.std, "count": found.count,
        "sum": found.mean * found.count, **shares,
    }  # fmt: skip


def _single(unit: str, value: float) -> dict[str, Any]:
    return {"unit": unit, "avg": value}


def _rate(num_tokens: int, ms: float | None) -> float | None:
    return num_tokens / ms * 1000.0 if ms else None
