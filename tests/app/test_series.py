"""Metric series: as many after ten thousand tenants and any nonsense as after the first request of each kind."""

import random
import re
import statistics
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from factories_app import EchoBackend, bearer, make_app, make_body, make_documents, make_key, make_settings, served
from factories_upstream import gateway_on, running_upstream
from litestar.testing import AsyncTestClient
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.admission import AdmissionController
from app.auth import Authenticator, Principal
from app.gateway import make_gateway
from app.metric_labels import CODES
from app.observability import EngineCollector
from app.settings import Settings, TenantSettings
from engine.stats import EngineCounters

URL = "/v1/chat/completions"
ROOT = Path(__file__).resolve().parents[2]

VLLM_NAMES = {
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    "counter": (
        *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
        *("request_success", "prompt_tokens_cached", "prompt_tokens_by_source"),
    ),
    "histogram": (
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
        *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
        *("request_params_max_tokens", "iteration_tokens_total", "request_prefill_kv_computed_tokens"),
    ),
}


def names_of(text: str) -> set[str]:
    """Every series, its labels included."""
    return {f"{s.name}{sorted(s.labels.items())}" for f in text_string_to_metric_families(text) for s in f.samples}


def nonsense(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits + "-_.", k=rng.randint(3, 40)))


def many_tenants(number: int) -> Settings:
    tenants = {
        f"tenant-{i}": TenantSettings(keys=(make_key(f"sk-{i}"),), requests_per_minute=5000, tokens_per_day=10**6)
        for i in range(number)
    }
    return make_settings(tenants=tenants) if number else make_settings()


async def test_series_do_not_grow_with_tenants_models_paths_methods_or_keys() -> None:
    rng = random.Random(7)
    app = make_app(many_tenants(10_000), EchoBackend())

    async def one_of_each(http: AsyncTestClient[Any]) -> None:
        key = bearer(f"sk-{rng.randrange(10_000)}")
        documents = [*make_documents(30), {"id": nonsense(rng), "text": "x", "acl": [nonsense(rng)]}]
        for body in (
            make_body(documents=documents, n=rng.randint(1, 3), user=nonsense(rng)),
            make_body(model=nonsense(rng)),
            make_body(firsttoken={"policy": nonsense(rng)}),
            make_body(**{nonsense(rng): nonsense(rng)}),
            make_body(temperature=rng.randint(3, 99)),
        ):
            await http.post(URL, json=body, headers=key | {"x-request-id": nonsense(rng)})
        await http.post(URL, json=make_body(), headers=bearer(nonsense(rng)))
        await http.get(f"/{nonsense(rng)}")
        await http.get(f"/v1/receipts/{nonsense(rng)}", headers=key)
        for method in (nonsense(rng).replace("_", "A").replace(".", "B"), "BREW", "DELETE"):
            await http.request(method, "/v1/models")

    async with AsyncTestClient(app) as http:
        for _ in range(3):
            await one_of_each(http)
        before = names_of((await http.get("/metrics")).text)
        for _ in range(60):
            await one_of_each(http)
        text = (await http.get("/metrics")).text
    assert names_of(text) == before
    assert "tenant-" not in text


def test_series_do_not_grow_with_what_an_upstream_makes_up() -> None:
    rng = random.Random(11)
    with running_upstream() as upstream, gateway_on(upstream, max_attempts=1) as url:

        def round_() -> None:
            error = {"message": "no", "type": nonsense(rng), "code": nonsense(rng), "param": nonsense(rng)}
            for behaviour in (
                {"status": 418, "body": {"error": error}},
                {"finish_reason": nonsense(rng)},
                {"reply": nonsense(rng)},
            ):
                upstream.control(**behaviour)
                httpx.post(f"{url}{URL}", json=make_body(), headers=bearer())

        for _ in range(2):
            round_()
        before = names_of(httpx.get(f"{url}/metrics").text)
        for _ in range(20):
            round_()
        after = names_of(httpx.get(f"{url}/metrics").text)
    assert after == before
    assert any("('code', 'other')" in name for name in after)
    assert any("('finished_reason', 'other')" in name for name in after)


def test_every_code_that_we_give_an_error_is_a_label_of_its_own() -> None:
    text = "".join(source.read_text(encoding="utf-8") for source in (ROOT / "app").rglob("*.py"))
    given = set(re.findall(r'code="([a-z_]+)"', text))
    assert given <= CODES


async def test_all_names_of_vllm_are_there_under_our_prefix() -> None:
    backend = EchoBackend()
    async with AsyncTestClient(make_app(backend=backend)) as http:
        await http.post(URL, json=make_body(documents=make_documents(5)), headers=bearer())
        text = (await http.get("/metrics")).text
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    missing = {
        name: kinds.get(f"firsttoken_{name}")
        for kind, names in VLLM_NAMES.items()
        for name in names
        if kinds.get(f"firsttoken_{name}") != kind
    }
    assert missing == {"iteration_tokens_total": None}  # the echo has no steps; the real engine's are below


def test_an_engine_counts_the_tokens_of_its_steps() -> None:
    counters = EngineCounters()
    for num_tokens in (1, 8, 9, 16384, 20000):
        counters.add_step(num_tokens)
    steps = counters.step_tokens.snapshot()
    assert counters.num_steps == 5
    assert (steps.counts[:3], steps.counts[-2:], steps.sum) == ((1, 1, 1), (1, 1), 36402)
    stats = msgspec.structs.replace(EchoBackend().stats, step_tokens=steps)
    registry = CollectorRegistry()
    registry.register(EngineCollector("default", lambda: stats, lambda: True))
    text = generate_latest(registry).decode()
    assert 'firsttoken_iteration_tokens_total_bucket{le="8.0",model_name="default"} 2.0' in text
    assert 'firsttoken_iteration_tokens_total_bucket{le="+Inf",model_name="default"} 5.0' in text
    assert 'firsttoken_iteration_tokens_total_sum{model_name="default"} 36402.0' in text


async def test_failures_of_the_store_of_counters_are_a_metric() -> None:
    gateway = make_gateway(make_settings(), EchoBackend())
    await gateway.start()
    gateway.tenancy.num_counter_failures = 3
    text = gateway.metrics.render().decode()
    await gateway.close()
    assert 'firsttoken_counter_failures_total{model_name="default"} 3.0' in text


def principals(number: int) -> list[Principal]:
    authenticator = Authenticator(many_tenants(number))
    return [authenticator.authenticate(f"Bearer sk-{i}") for i in range(number)]


async def admit_all(controller: AdmissionController, callers: list[Principal]) -> None:
    for caller in callers:
        lease = await controller.admit(caller)
        await lease.reserve(100, 10)
        lease.settle(100, 10)


async def test_an_admission_does_as_much_with_ten_thousand_tenants_as_with_ten() -> None:
    counts: list[int] = []
    for number in (10, 10_000):
        callers = principals(number)
        controller = AdmissionController()
        await admit_all(controller, callers)
        num_calls = 0

        def count(*_: object) -> None:
            nonlocal num_calls
            num_calls += 1

        profiled: Callable[..., None] | None = sys.getprofile()
        sys.setprofile(count)
        try:
            await admit_all(controller, callers[:1])
        finally:
            sys.setprofile(profiled)
        counts.append(num_calls)
        await controller.close()
    assert counts[1] == counts[0] > 0


async def test_neither_does_it_take_longer() -> None:
    few, many = principals(10), principals(10_000)
    controllers = AdmissionController(), AdmissionController()
    await admit_all(controllers[0], few)
    await admit_all(controllers[1], many)
    ratios = []
    for start in range(0, 1000, 20):
        times = []
        for controller, callers in zip(controllers, (few * 2, many[start : start + 20]), strict=True):
            began = time.process_time()
            await admit_all(controller, callers)
            times.append(time.process_time() - began)
        ratios.append(times[1] / times[0])
    for controller in controllers:
        await controller.close()
    assert statistics.median(ratios) < 4  # a look at every tenant would make it hundreds


async def test_a_key_is_found_as_fast_among_ten_thousand() -> None:
    found = {}
    for number in (10, 10_000):
        authenticator = Authenticator(many_tenants(number))
        num_calls = 0

        def count(*_: object) -> None:
            nonlocal num_calls
            num_calls += 1

        sys.setprofile(count)
        try:
            authenticator.authenticate("Bearer sk-7")
        finally:
            sys.setprofile(None)
        found[number] = num_calls
    assert found[10] == found[10_000]


@pytest.mark.parametrize("path", ["/metrics"])
def test_metrics_are_read_without_a_key_over_a_socket(path: str) -> None:
    with served(make_app()) as url:
        assert httpx.get(f"{url}{path}").status_code == 200
