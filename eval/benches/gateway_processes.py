"""The upstream and the gateway of the gateway's bench as processes of their own, and their processor time."""

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.benches.gateway_upstream import MODEL
from eval.errors import LaunchError
from eval.process_tree import descendants

KEY = "sk-bench"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
_READY = re.compile(rb"ready on http://\S+:(\d+)")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_CONFIG = """
[server]
host = "127.0.0.1"
port = 0

[backend]
kind = "openai"
flavour = "vllm"
model = "{model}"

[backend.tokenizer]
name = "o200k_base"

[[backend.replicas]]
url = "http://127.0.0.1:{port}/v1"

[encoder]
enabled = false

[storage]
enabled = {storage}
data_folder = "{folder}"

[[tenants.bench.keys]]
name = "bench"
sha256 = "{digest}"
"""


@dataclass(slots=True)
class Running:
    """A process that listens on a port of this machine."""

    process: subprocess.Popen[bytes]
    port: int
    start_s: float
    """From its start to its readiness."""
    start_cpu_s: float

    def cpu_s(self) -> float:
        """Processor time of the process, its threads and all processes below it, in seconds."""
        return sum(_cpu_s(pid) for pid in (self.process.pid, *descendants(self.process.pid)))


@contextlib.contextmanager
def running_upstream() -> Iterator[Running]:
    """The trivial upstream."""
    with _running([sys.executable, "-m", "eval.benches.gateway_upstream"], re.compile(rb"^(\d+)$"), {}) as upstream:
        yield upstream


@contextlib.contextmanager
def running_gateway(upstream: Running, *, num_processes: int = 1, has_storage: bool = True) -> Iterator[Running]:
    """``firsttoken serve`` in front of the upstream, with receipts and usage in a database as by default."""
    with tempfile.TemporaryDirectory(prefix="firsttoken-bench-") as folder:
        config = Path(folder) / "firsttoken.toml"
        config.write_text(
            _CONFIG.format(
                model=MODEL,
                port=upstream.port,
                folder=folder,
                storage=str(has_storage).lower(),
                digest=hashlib.sha256(KEY.encode()).hexdigest(),
            ),
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "app.cli", "serve", "--config", str(config)]
        if num_processes > 1:
            command += ["--workers", str(num_processes)]
        with _running(command, _READY, {"OMP_NUM_THREADS": "1"}) as gateway:
            yield gateway


@contextlib.contextmanager
def _running(command: list[str], ready: re.Pattern[bytes], environment: dict[str, str]) -> Iterator[Running]:
    started = time.perf_counter()
    with tempfile.TemporaryFile(prefix="firsttoken-bench-") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=os.environ | environment
        )
        assert process.stdout is not None
        assert process.stdin is not None
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            found = ready.search(process.stdout.readline().strip())
            watchdog.cancel()
            if found is None:
                end = os.pread(log.fileno(), 4000, max(0, os.fstat(log.fileno()).st_size - 4000)).decode()
                raise LaunchError(f"{' '.join(command[2:4])} did not become ready:\n{end}")
            running = Running(process, int(found[1]), time.perf_counter() - started, 0.0)
            running.start_cpu_s = running.cpu_s()
            yield running
        finally:
            watchdog.cancel()
            process.stdin.close()
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(value) for value in fields[11:13]) / _TICKS_PER_S
