"""Two gateway processes with one database and one store of counters: limits, keys, receipts and usage are shared."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from factories_app import bearer, make_body, wait_until
from factories_storage import (
    ADMIN_KEY,
    counter_server,
    postgres_programs,
    running_counter_server,
    running_postgres,
)

TESTS = Path(__file__).resolve().parent.parent
ADMIN = bearer(ADMIN_KEY)
CHAT = "/v1/chat/completions"
KEY_CACHE_S = 0.3


@contextlib.contextmanager
def gateway(
    folder: Path, database_url: str, counter_url: str
) -> Iterator[tuple[httpx.Client, "subprocess.Popen[str]"]]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
    command = [sys.executable, str(TESTS / "storage_gateway.py"), str(folder), database_url, counter_url]
    process = subprocess.Popen(
        [*command, str(KEY_CACHE_S)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdin is not None
    assert process.stdout is not None
    drain = threading.Thread(target=process.stdout.read, daemon=True)
    try:
        line = next((text for text in process.stdout if text.startswith("http")), "")
        assert line, "the gateway did not start"
        # It logs to the same pipe, and would stop where nobody reads what it writes.
        drain.start()
        with httpx.Client(base_url=line.strip(), timeout=30) as http:
            yield http, process
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if drain.is_alive():
            drain.join(5)
        process.stdout.close()


@pytest.fixture(params=["sqlite", "postgres"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[list[tuple[httpx.Client, "subprocess.Popen[str]"]]]:
    if counter_server() is None:
        pytest.skip("neither valkey-server nor redis-server is on the path")
    if request.param == "postgres" and postgres_programs() is None:
        pytest.skip("PostgreSQL is not installed")
    with contextlib.ExitStack() as stack:
        counters = stack.enter_context(running_counter_server())
        database = stack.enter_context(running_postgres()) if request.param == "postgres" else ""
        yield [stack.enter_context(gateway(tmp_path, database, counters)) for _ in range(2)]


def make_tenant(http: httpx.Client) -> str:
    created = http.post("/admin/v1/tenants", json={"name": "initech", "max_parallel_requests": 50}, headers=ADMIN)
    assert created.status_code == 201, created.text
    issued = http.post("/admin/v1/tenants/initech/keys", json={"name": "backend"}, headers=ADMIN)
    return str(issued.json()["key"])


def test_two_gateways_share_tenants_limits_receipts_and_usage(
    pair: list[tuple[httpx.Client, "subprocess.Popen[str]"]],
) -> None:
    (first, _), (second, _) = pair
    key = make_tenant(first)

    # A prompt of 34 tokens and at most 6 of output: 40 a request, 400 for ten of twenty at the same time.
    first.put("/admin/v1/tenants/initech/budgets/day", json={"tokens": 400}, headers=ADMIN)
    body = make_body(max_tokens=6)
    with ThreadPoolExecutor(20) as pool:
        answers = list(
            pool.map(lambda n: pair[n % 2][0].post(CHAT, json=body, headers=bearer(key)), range(20), timeout=60)
        )
    granted = [answer for answer in answers if answer.status_code == 200]
    assert {answer.status_code for answer in answers} == {200, 429}
    used = sum(answer.json()["usage"]["total_tokens"] for answer in granted)
    assert used <= 400 + 6  # one request may have had less of its output reserved than it used
    assert len(granted) >= 10
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1

    # Nothing is left reserved, and every answer is charged once, whoever gave it.
    first.put("/admin/v1/tenants/initech/budgets/day", json={"tokens": 100_000}, headers=ADMIN)
    time.sleep(KEY_CACHE_S)
    last = second.post(CHAT, json=body, headers=bearer(key))
    used += last.json()["usage"]["total_tokens"]
    assert int(last.headers["x-ratelimit-remaining-tokens"]) == 100_000 - used

    receipt_id = granted[0].json()["firsttoken"]["receipt_id"]

    def is_found_by_both() -> bool:
        return all(http.get(f"/v1/receipts/{receipt_id}", headers=bearer(key)).status_code == 200 for http, _ in pair)

    assert wait_until(is_found_by_both, 10)

    def is_usage_complete() -> bool:
        rows = first.get("/admin/v1/usage?tenant=initech", headers=ADMIN).json()["data"]
        return sum(row["input_tokens"] + row["output_tokens"] for row in rows) == used

    assert wait_until(is_usage_complete, 10)

    # A key that one gateway revokes stops working at the other within the stated time.
    first.delete("/admin/v1/tenants/initech/keys/backend", headers=ADMIN)
    time.sleep(KEY_CACHE_S)
    assert second.post(CHAT, json=body, headers=bearer(key)).status_code == 401


def test_a_gateway_that_is_killed_gives_its_reservations_back(
    pair: list[tuple[httpx.Client, "subprocess.Popen[str]"]],
) -> None:
    (first, _), (second, process) = pair
    key = make_tenant(first)
    first.put("/admin/v1/tenants/initech/budgets/day", json={"tokens": 100}, headers=ADMIN)
    url = str(second.base_url)
    body = make_body(stream=True)
    with (
        httpx.Client(base_url=url, timeout=30) as http,
        contextlib.suppress(httpx.HTTPError),
        http.stream("POST", CHAT, json=body, headers=bearer(key)) as response,
    ):
        next(response.iter_bytes())
        process.kill()
        process.wait()
    assert first.post(CHAT, json=make_body(), headers=bearer(key)).status_code == 429
    assert wait_until(lambda: first.post(CHAT, json=make_body(), headers=bearer(key)).status_code == 200, 30)
