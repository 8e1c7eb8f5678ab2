"""Metrics and logs: names that dashboards know, bounded series, no prompt text."""

import hashlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from factories_app import EchoBackend, bearer, make_app, make_body, make_documents, make_key, make_settings
from litestar.testing import AsyncTestClient
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from app.logs import configure_logging
from app.observability import ITL_BUCKETS, EngineCollector
from app.operator_settings import AdminSettings, StorageSettings
from app.plain_histogram import PlainHistogram
from app.settings import LoggingSettings, Settings, TenantSettings
from engine.outputs import EngineStats, KVTransferStats

URL = "/v1/chat/completions"


def series(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_a_completion_is_measured_under_vllms_names() -> None:
    async with AsyncTestClient(make_app()) as http:
        answer = (await http.post(URL, json=make_body(documents=make_documents(5)), headers=bearer())).json()
        response = await http.get("/metrics")
    metrics = series(response.text)
    label = '{model_name="default"}'
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert metrics[f"firsttoken_prompt_tokens_total{label}"] == answer["usage"]["prompt_tokens"]
    assert metrics[f"firsttoken_generation_tokens_total{label}"] == 4
    assert metrics[f"firsttoken_saved_prompt_tokens_total{label}"] == answer["firsttoken"]["saved_tokens"]
    assert metrics['firsttoken_request_success_total{finished_reason="stop",model_name="default"}'] == 1
    assert metrics[f"firsttoken_inter_token_latency_seconds_count{label}"] == 3
    assert metrics[f"firsttoken_e2e_request_latency_seconds_count{label}"] == 1
    assert metrics[f"firsttoken_request_queue_time_seconds_sum{label}"] == pytest.approx(0.001)
    assert metrics[f"firsttoken_request_decode_time_seconds_sum{label}"] == pytest.approx(0.006)
    assert metrics[f"firsttoken_request_time_per_output_token_seconds_sum{label}"] == pytest.approx(0.002)
    assert metrics['firsttoken_time_to_first_token_seconds_count{length_bucket="medium",model_name="default"}'] == 1
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_alive"):
        assert f"firsttoken_{gauge}{label}" in metrics
    assert not any(name.startswith("vllm") for name in metrics)


async def test_errors_are_counted_by_status_and_code() -> None:
    async with AsyncTestClient(make_app()) as http:
        await http.post(URL, json=make_body(model="gpt-9"), headers=bearer())
        await http.get("/nowhere")
        metrics = series((await http.get("/metrics")).text)
    name = 'firsttoken_request_errors_total{code="%s",model_name="default",status="404"}'
    assert metrics[name % "model_not_found"] == metrics[name % "unknown_url"] == 1


async def test_no_series_grows_with_tenants_requests_or_documents() -> None:
    tenants = {f"tenant-{i}": TenantSettings(keys=(make_key(f"sk-{i}"),)) for i in range(40)}
    settings = Settings(tenants=tenants, encoder=make_settings().encoder)
    counts = []
    async with AsyncTestClient(make_app(settings)) as http:
        for i in range(40):
            await http.post(URL, json=make_body(documents=make_documents(3)), headers=bearer(f"sk-{i}"))
            counts.append(len(series((await http.get("/metrics")).text)))
        text = (await http.get("/metrics")).text
    assert counts[-1] == counts[1]
    assert "tenant-" not in text


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the gateway logs while a test runs."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    configure_logging(LoggingSettings(), stream)
    yield stream
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


async def test_logs_are_json_lines_with_ids_and_numbers_but_no_text(log: io.StringIO) -> None:
    secret = "xyzzy-plugh"
    documents = [{"id": f"{secret}-id", "text": f"{secret} document", "title": secret}]
    async with AsyncTestClient(make_app(backend=EchoBackend(reply=f"{secret} answer"))) as http:
        headers = bearer() | {"x-request-id": "abc"}
        await http.post(URL, json=make_body(f"{secret} question", documents=documents), headers=headers)
        await http.post(URL, json=make_body(secret, temperature=9, stop=secret), headers=headers)
        await http.post(URL, json={"model": secret, "messages": []}, headers=headers)
    lines: list[dict[str, Any]] = [msgspec.json.decode(line) for line in log.getvalue().splitlines()]
    own = [line for line in lines if line["logger"].startswith("firsttoken")]
    assert [line["event"] for line in own] == ["compaction", "completion", "request_refused", "request_refused"]
    assert {line["request_id"] for line in own} == {"abc"}
    assert own[0]["tenant"] == "acme"
    assert own[1]["prompt_tokens"] == own[0]["prompt_tokens"]
    assert secret not in log.getvalue()


async def test_what_is_no_completion_has_a_line_with_its_route_and_an_operators_change_its_object(
    log: io.StringIO, tmp_path: Path
) -> None:
    secret = "xyzzy-plugh"
    digest = hashlib.sha256(b"sk-admin").hexdigest()
    settings = make_settings(
        admin=AdminSettings(key_sha256=(digest,)), storage=StorageSettings(data_folder=str(tmp_path))
    )
    async with AsyncTestClient(make_app(settings)) as http:
        await http.get("/health")
        await http.post(URL, json=make_body(), headers=bearer())
        await http.post("/v1/tokenize", json={"prompt": secret}, headers=bearer() | {"x-request-id": "abc"})
        await http.put("/admin/v1/tenants/acme/groups/staff", headers=bearer("sk-admin"))  # the file's own, so refused
        await http.post("/admin/v1/tenants", json={"name": "initech"}, headers=bearer("sk-admin"))
        await http.put("/admin/v1/tenants/initech/groups/staff", headers=bearer("sk-admin"))
        await http.get("/v1/models/" + secret, headers=bearer())
    lines: list[dict[str, Any]] = [msgspec.json.decode(line) for line in log.getvalue().splitlines()]
    tokenize, create, group = (line for line in lines if line["event"] == "request")
    assert (tokenize["method"], tokenize["route"], tokenize["status"]) == ("POST", "/v1/tokenize", 200)
    assert (tokenize["tenant"], tokenize["request_id"]) == ("acme", "abc")
    assert (create["route"], create["status"], create["operator"]) == ("/admin/v1/tenants", 201, digest[:8])
    assert (group["name"], group["group"], group["method"]) == ("initech", "staff", "PUT")
    refused = [line for line in lines if line["event"] == "request_refused"]
    assert [line.get("operator") for line in refused] == [digest[:8], None]
    assert secret not in log.getvalue()
    assert digest not in log.getvalue()


async def test_an_unexpected_error_is_logged_with_its_trace_and_told_without_it(log: io.StringIO) -> None:
    backend = EchoBackend(start_error=ZeroDivisionError("a detail of ours"))
    async with AsyncTestClient(make_app(backend=backend)) as http:
        response = await http.post(URL, json=make_body(), headers=bearer())
    assert response.status_code == 500
    assert "a detail of ours" not in response.text
    [line] = [msgspec.json.decode(line) for line in log.getvalue().splitlines() if "request_failed" in line]
    assert "ZeroDivisionError" in line["exception"]
    assert line["request_id"] == response.headers["x-request-id"]


def test_transfers_of_kv_blocks_are_counted_by_outcome_and_prompt_tokens_by_source() -> None:
    stats = EngineStats(
        num_running=0,
        num_waiting=0,
        kv_cache_usage=0.0,
        prompt_tokens=100,
        cached_prompt_tokens=30,
        generation_tokens=0,
        num_preemptions=0,
        num_steps=0,
        transferred_prompt_tokens=50,
        kv_transfer=KVTransferStats(num_completed=4, num_failed={"timeout": 2}, num_bytes=800, recomputed_tokens=16),
    )
    registry = CollectorRegistry()
    registry.register(EngineCollector("default", lambda: stats, lambda: True))
    metrics = series(generate_latest(registry).decode())
    by_source = {
        source: metrics[f'firsttoken_prompt_tokens_by_source_total{{model_name="default",source="{source}"}}']
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert by_source == {"local_compute": 20, "local_cache_hit": 30, "external_kv_transfer": 50}
    assert metrics['firsttoken_kv_transfers_total{model_name="default",outcome="completed"}'] == 4
    assert metrics['firsttoken_kv_transfers_total{model_name="default",outcome="timeout"}'] == 2
    assert metrics['firsttoken_kv_transfer_bytes_total{model_name="default"}'] == 800
    assert metrics['firsttoken_kv_transfer_recomputed_tokens_total{model_name="default"}'] == 16


def test_a_plain_histogram_reads_as_prometheus_own() -> None:
    name, text = "firsttoken_gap_seconds", "Time between two texts"
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = PlainHistogram(name, text, ITL_BUCKETS, "default")
    ours.register(plain)
    child = Histogram(name, text, ["model_name"], buckets=ITL_BUCKETS, registry=theirs).labels("default")
    assert generate_latest(ours) == generate_latest(theirs)
    for value in (0.0, 0.01, 0.0100001, 0.3, 1.0, 79.9, 80.0, 81.0, 1e9):
        plain.observe(value)
        child.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
