"""``firsttoken serve`` as a process: SIGHUP, a changed file, a bad one, and a stream that runs across all of it."""

import fcntl
import json
import os
import signal
import termios
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from factories_app import bearer, make_body, wait_until
from factories_config import ConfigFile, ServedFile, config_toml, serving_file, tenant_toml
from factories_upstream import MODEL, Upstream, frames_of, running_upstream

ACME, INITECH = "sk-acme-own", "sk-initech-own"
CHAT = "/v1/chat/completions"


def backend_toml(*upstreams: Upstream, **keys: Any) -> str:
    lines = [
        '[backend]\nkind = "openai"\nflavour = "vllm"',
        f'model = "{MODEL}"\nmax_model_len = 32768\nhealth_interval_s = 0.0',
        *(f"{name} = {value!r}" for name, value in keys.items()),
        '[backend.tokenizer]\nname = "o200k_base"',
        *(f'[[backend.replicas]]\nurl = "{upstream.url}/v1"' for upstream in upstreams),
    ]
    return "\n".join(lines) + "\n"


def status_of(served: ServedFile, key: str, **fields: Any) -> int:
    return httpx.post(f"{served.url}{CHAT}", json=make_body(**fields), headers=bearer(key), timeout=30).status_code


def metric(served: ServedFile, name: str) -> float:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")))


class Stream:
    """A stream that is read in a thread of its own."""

    def __init__(self, served: ServedFile, key: str) -> None:
        self.status: int | None = None
        self.text = ""
        self._thread = threading.Thread(target=self._read, args=(f"{served.url}{CHAT}", key))
        self._thread.start()

    def _read(self, url: str, key: str) -> None:
        body = make_body(stream=True)
        with httpx.stream("POST", url, json=body, headers=bearer(key), timeout=60) as response:
            self.status = response.status_code
            for piece in response.iter_text():
                self.text += piece

    @property
    def num_frames(self) -> int:
        return self.text.count("data: ")

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def words(self) -> str:
        self._thread.join(60)
        frames = frames_of(self.text)
        assert frames[-1] == "[DONE]", self.text[-500:]
        chunks = [frame for frame in frames[:-1] if frame["choices"]]
        return "".join(frame["choices"][0]["delta"].get("content") or "" for frame in chunks)


def test_a_running_stream_ends_whole_while_its_tenant_and_its_replica_are_taken_out(tmp_path: Path) -> None:
    reply = " ".join(f"word{n}" for n in range(40))
    with running_upstream() as first, running_upstream() as second:
        first.control(reply=reply, delay_s=0.05)
        file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME), backend_toml(first)))
        with serving_file(file) as served:
            assert served.status()["state"] == "current"
            stream = Stream(served, ACME)
            assert wait_until(lambda: stream.num_frames >= 3, timeout_s=20)
            file.write(config_toml(tenant_toml("initech", INITECH), backend_toml(second)))
            status = served.reload()
            assert (status["state"], status["digest"], status["generation"]) == ("current", file.digest, 2)
            assert status["source"] == str(file.path)
            assert [status_of(served, key) for key in (ACME, INITECH)] == [401, 200]
            assert stream.is_running
            assert stream.words() == reply
            assert (len(first.log()), len(second.log())) == (1, 1)
            log = served.log.read_text()
            assert served.process.poll() is None
    assert any(entry.get("event") == "replica_removed" and entry["running"] == 1 for entry in entries_of(log))


def test_a_bad_file_is_told_and_the_gateway_goes_on_until_a_good_one_comes(tmp_path: Path) -> None:
    with running_upstream() as upstream:
        good = config_toml(tenant_toml("acme", ACME), backend_toml(upstream), "[reload]\ninterval_s = 0.1\n")
        file = ConfigFile(tmp_path, good)
        digest = file.digest
        with serving_file(file) as served:
            file.write(good.replace("[tenants.acme]", "[tenants.acme]\nrequests_per_minut = 1"))
            # No signal: the file has changed.
            assert wait_until(lambda: served.status()["state"] == "failed", timeout_s=20)
            status = served.status()
            assert (status["digest"], status["last_failure"]["key"]) == (digest, "tenants.acme.requests_per_minut")
            assert status["last_failure"]["hint"] == "did you mean 'requests_per_minute'?"
            assert status_of(served, ACME) == 200
            assert metric(served, "firsttoken_config_last_reload_successful") == 0.0
            assert metric(served, 'firsttoken_config_reloads_total{outcome="failed"}') == 1.0
            file.write(good.replace("[tenants.acme]", "[tenants.acme]\nrequests_per_minute = 2"))
            assert wait_until(lambda: served.status()["state"] == "current", timeout_s=20)
            assert metric(served, "firsttoken_config_last_reload_successful") == 1.0
            assert [status_of(served, ACME) for _ in range(3)] == [200, 200, 429]
            # What was counted stays; what needs a restart is named and the rest holds.
            changed = good.replace("[tenants.acme]", "[tenants.acme]\nrequests_per_minute = 3")
            file.write(changed.replace("port = 0", "port = 1"))
            assert wait_until(lambda: served.status()["state"] == "restart_needed", timeout_s=20)
            assert served.status()["needs_restart"] == ["server.port"]
            assert [status_of(served, ACME) for _ in range(2)] == [200, 429]
            log = served.log.read_text()
    failed = [entry for entry in entries_of(log) if entry.get("event") == "config_reload_failed"]
    assert [entry["key"] for entry in failed] == ["tenants.acme.requests_per_minut"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_terminal_that_closes_ends_the_gateway(tmp_path: Path, num_processes: int) -> None:
    with running_upstream() as upstream:
        file = ConfigFile(
            tmp_path,
            config_toml(
                tenant_toml("acme", ACME), backend_toml(upstream), server=f"port = 0\nnum_processes = {num_processes}"
            ),
        )
        main, terminal = os.openpty()

        def take_terminal() -> None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        with serving_file(file, stdin=terminal, preexec_fn=take_terminal) as served:
            os.close(terminal)
            served.signal()
            time.sleep(0.5)
            assert served.process.poll() is None
            assert status_of(served, ACME) == 200
            os.close(main)
            assert served.process.wait(30) == 0


def test_many_signals_in_a_row_change_nothing_and_sigterm_ends_it(tmp_path: Path) -> None:
    with running_upstream() as upstream:
        file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME), backend_toml(upstream)))
        with serving_file(file) as served:
            for _ in range(5):
                served.signal()
            assert served.reload()["generation"] == 1
            served.signal(signal.SIGTERM)
            assert served.process.wait(20) == 0


def test_several_processes_follow_the_file_together(tmp_path: Path) -> None:
    with running_upstream() as upstream:
        server = "port = 0\nnum_processes = 2"
        file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME), backend_toml(upstream), server=server))
        with serving_file(file) as served:
            file.write(config_toml(tenant_toml("initech", INITECH), backend_toml(upstream), server=server))
            served.signal()

            def answers() -> set[tuple[int, int]]:
                """Connections of their own, which the kernel shares out."""
                return {(status_of(served, ACME), status_of(served, INITECH)) for _ in range(12)}

            assert wait_until(lambda: answers() == {(401, 200)}, timeout_s=20)
            served.signal(signal.SIGTERM)
            assert served.process.wait(30) == 0
            log = served.log.read_text()
    assert sum(entry.get("event") == "config_reloaded" for entry in entries_of(log)) == 2


def entries_of(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
