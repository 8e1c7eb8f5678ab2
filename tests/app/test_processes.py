"""Several processes of one gateway: shared address, nothing counted twice or lost, restarts, and one common end."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from factories_app import bearer, make_body, make_settings, wait_until
from factories_gateway import is_running
from factories_processes import ROOT, Supervised, config_text, supervised
from factories_upstream import Upstream, make_backend, running_upstream

from app.errors import ConfigError
from app.operator_settings import CounterSettings, StorageSettings
from app.settings import Settings
from app.siblings import ProcessPlace, with_process_label
from app.supervisor import check_processes

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with running_upstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def gateway(folder: Path, upstream: Upstream) -> Iterator[Supervised]:
    """One for all tests that leave it serving: to start three processes takes seconds."""
    with supervised(folder, upstream) as gateway:
        yield gateway


@pytest.fixture
def own_gateway(tmp_path: Path, upstream: Upstream) -> Iterator[Supervised]:
    with supervised(tmp_path, upstream) as gateway:
        yield gateway


def upstream_settings(**changes: object) -> Settings:
    settings = make_settings(backend=make_backend(Upstream("http://127.0.0.1:1", None)))  # type: ignore[arg-type]
    return msgspec.structs.replace(settings, **changes)


def test_one_process_may_do_everything() -> None:
    check_processes(make_settings(), 1)
    check_processes(make_settings(acme={"tokens_per_day": 10}), 1)


def test_several_processes_without_anything_to_count_are_fine() -> None:
    check_processes(upstream_settings(), 2)


def test_the_embedded_engine_is_served_by_one_process() -> None:
    with pytest.raises(ConfigError, match=r"server.num_processes is 2, but the embedded engine"):
        check_processes(make_settings(), 2)


def test_limits_are_not_counted_in_each_process_on_its_own() -> None:
    acme = make_settings(acme={"requests_per_minute": 10}).tenants
    with pytest.raises(ConfigError, match=r"tenant 'acme' has limits.*set counters.url"):
        check_processes(upstream_settings(tenants=acme), 2)
    with pytest.raises(ConfigError, match=r"the database may hold tenants with limits.*storage.enabled = false"):
        check_processes(upstream_settings(storage=StorageSettings()), 2)
    shared = CounterSettings(url="valkey://127.0.0.1:6379/0")
    check_processes(upstream_settings(tenants=acme, storage=StorageSettings(), counters=shared), 2)


def test_the_place_of_a_process_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    place = ProcessPlace(1, 3, tmp_path / "a:b")
    assert ProcessPlace.from_environ({"FIRSTTOKEN_PROCESS": place.variable()}) == place
    assert ProcessPlace.from_environ({}) is None


def test_metrics_of_processes_stand_together_by_family() -> None:
    text = b'# HELP a_total A\n# TYPE a_total counter\na_total{m="x {y} z"} 1.0\n# HELP b B\n# TYPE b gauge\nb 2.0\n'
    assert with_process_label({1: text, 0: text}).decode().splitlines() == [
        "# HELP a_total A",
        "# TYPE a_total counter",
        'a_total{process="0",m="x {y} z"} 1.0',
        'a_total{process="1",m="x {y} z"} 1.0',
        "# HELP b B",
        "# TYPE b gauge",
        'b{process="0"} 2.0',
        'b{process="1"} 2.0',
    ]


def success_by_process(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", timeout=20).text
    found = re.findall(r'^firsttoken_request_success_total\{process="(\d)",.*stop.*\} (\S+)$', text, re.MULTILINE)
    return {process: float(value) for process, value in found}


def test_requests_are_shared_out_and_metrics_and_receipts_come_from_all(gateway: Supervised) -> None:
    assert "2 processes" in gateway.line
    receipts = []
    for _ in range(24):  # a connection each: the kernel gives it to one of the two
        answer = httpx.post(f"{gateway.url}{CHAT}", json=make_body(), headers=bearer(), timeout=20)
        assert answer.status_code == 200, answer.text
        receipts.append(answer.json()["firsttoken"]["receipt_id"])
    counts = success_by_process(gateway.url)
    assert sum(counts.values()) == 24
    assert len(counts) == 2
    for receipt_id in receipts:
        shown = httpx.get(f"{gateway.url}/v1/receipts/{receipt_id}", headers=bearer(), timeout=20)
        assert shown.json()["receipt_id"] == receipt_id
    missing = httpx.get(f"{gateway.url}/v1/receipts/rcpt_none", headers=bearer(), timeout=20)
    assert missing.status_code == 404


def test_a_process_that_dies_is_started_again_and_the_others_go_on(gateway: Supervised) -> None:
    before = gateway.children()
    os.kill(before[0], signal.SIGKILL)
    assert wait_until(lambda: not is_running(before[0]), 20)

    def is_answered() -> bool:
        try:
            answer = httpx.post(f"{gateway.url}{CHAT}", json=make_body(), headers=bearer(), timeout=20)
        except httpx.TransportError:  # the kernel has not yet closed all that the dead one had
            return False
        return answer.status_code == 200

    def both_answer() -> bool:
        text = httpx.get(f"{gateway.url}/metrics", timeout=20).text
        return 'process="0"' in text and 'process="1"' in text

    assert wait_until(is_answered, 20)
    assert wait_until(both_answer, 90)
    after = gateway.children()
    assert len(after) == 2
    assert before[1] in after


def test_all_end_together_and_running_streams_end_whole(own_gateway: Supervised) -> None:
    children = own_gateway.children()
    body = make_body(stream=True, x_behaviour={"delay_s": 0.05, "reply": "a " * 20})
    with httpx.stream("POST", f"{own_gateway.url}{CHAT}", json=body, headers=bearer(), timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        own_gateway.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert own_gateway.process.wait(60) == 0
    assert not any(is_running(pid) for pid in children)


def test_processes_end_when_their_supervisor_is_killed(own_gateway: Supervised) -> None:
    children = own_gateway.children()
    assert own_gateway.stop(signal.SIGKILL) == -signal.SIGKILL
    assert wait_until(lambda: not any(is_running(pid) for pid in children), 60)


def test_a_hangup_reads_the_configuration_in_every_process(
    gateway: Supervised, folder: Path, upstream: Upstream
) -> None:
    more = "[limits]\ndefault_max_tokens = 7\n"
    (folder / "firsttoken.toml").write_text(config_text(upstream.url, more), encoding="utf-8")
    gateway.process.send_signal(signal.SIGHUP)

    def all_clamp() -> bool:
        answers = [httpx.post(f"{gateway.url}{CHAT}", json=make_body(), headers=bearer(), timeout=20) for _ in range(8)]
        return all(answer.json()["firsttoken"]["max_tokens"] == 7 for answer in answers)

    assert wait_until(all_clamp, 60)
    assert len(gateway.children()) == 2


def test_a_configuration_that_cannot_be_shared_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "firsttoken.toml"
    config.write_text(config_text("http://127.0.0.1:1", "[tenants.acme]\nrequests_per_minute = 5\n"), encoding="utf-8")
    command = [sys.executable, "-m", "app.cli", "serve", "--config", str(config), "--workers", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "tenant 'acme' has limits" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_cannot_start_ends_all_with_its_reason(tmp_path: Path) -> None:
    config = tmp_path / "firsttoken.toml"
    config.write_text(config_text("http://127.0.0.1:1"), encoding="utf-8")  # nobody tells the window
    command = [sys.executable, "-m", "app.cli", "serve", "--config", str(config), "--workers", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "no replica tells the window" in done.stderr
    assert "before it was ready" in done.stderr
    assert "Traceback" not in done.stderr
