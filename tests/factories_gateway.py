"""Starts the real gateway with the real engine as a subprocess, as `make serve` does."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai

from app.config_file import EXAMPLE_FILE
from engine.model_catalogue import CATALOGUE
from engine.model_store import ModelStore
from eval.process_tree import descendants

ROOT = Path(__file__).resolve().parent.parent
READY = re.compile(r"ready on (http://\S+)")
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


def missing_models() -> str | None:
    """Why the default models cannot be used, or ``None``."""
    store = ModelStore()
    missing = [model.name for model in CATALOGUE.values() if model.is_default and not store.is_installed(model)]
    return f"not on this machine: {', '.join(missing)} (firsttoken models pull)" if missing else None


@dataclass
class RunningGateway:
    """A gateway process and its address."""

    process: subprocess.Popen[bytes]
    url: str
    ready_line: str

    def client(self, key: str = "sk-acme-demo", timeout_s: float = 120.0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=timeout_s)

    def descendants(self) -> list[int]:
        """Process ids of all processes below the gateway."""
        return list(descendants(self.process.pid))

    def engine_pid(self) -> int:
        """The engine's process: the child that multiprocessing spawned."""
        return next(pid for pid in self.descendants() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the gateway by a signal; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)


def wait_until_ready(process: subprocess.Popen[bytes], log_file: Path) -> tuple[str, str]:
    """Address and line that a gateway prints once it is ready; one that takes too long is killed."""
    assert process.stdout is not None
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline().decode()
    finally:
        watchdog.cancel()
    ready = READY.search(line)
    assert ready is not None, f"the gateway did not start: {line}\n{log_file.read_text()[-4000:]}"
    return ready[1], line


@contextlib.contextmanager
def running_gateway(extra_config: str = "", **environment: str) -> Iterator[RunningGateway]:
    """The gateway on a free port, on the example configuration with ``extra_config`` behind it, once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "firsttoken.toml"
        config.write_text(f"{EXAMPLE_FILE.read_text(encoding='utf-8')}\n{extra_config}", encoding="utf-8")
        log_file = Path(folder) / "log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "app.cli", "serve"],
                cwd=ROOT,
                env=os.environ | {"FIRSTTOKEN_CONFIG": str(config), "FIRSTTOKEN_PORT": "0"} | environment,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            url, line = wait_until_ready(process, log_file)
            yield RunningGateway(process, url, line)
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
