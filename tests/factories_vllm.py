"""A real vLLM server from an environment of its own, which ``eval/benches/peers/make_vllm_cpu.sh`` makes."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

VARIABLE = "FIRSTTOKEN_VLLM"
MODEL = "smollm2"
START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 30.0


def missing_vllm() -> str | None:
    """Why there is no vLLM to test against, or ``None``."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} names no environment of vLLM (make test-vllm)"
    for path in (Path(folder) / "bin/python", _model_folder(Path(folder)) / "config.json"):
        if not path.exists():
            return f"{VARIABLE}: {path} is missing (eval/benches/peers/make_vllm_cpu.sh)"
    return None


def _model_folder(environment: Path) -> Path:
    return environment.parent / "smollm2"


@dataclass
class Vllm:
    """A running server."""

    url: str
    model_folder: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, **body: Any) -> Any:
        """The decoded answer to a request that must succeed."""
        response = httpx.post(f"{self.url}{path}", json={"model": MODEL, **body}, timeout=120)
        response.raise_for_status()
        return response.json()

    def gauge(self, name: str) -> float:
        """The sum of a metric over its series."""
        lines = httpx.get(f"{self.url}/metrics", timeout=20).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def kill(self) -> None:
        """Ends it and its engine at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def running_vllm(log_file: Path) -> Iterator[Vllm]:
    """A server on a free port of this machine, once it is healthy, until the block ends."""
    folder = Path(os.environ[VARIABLE])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [
        *(
            "--model",
            str(_model_folder(folder)),
            "--served-model-name",
            MODEL,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ),
        *("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--enable-prompt-tokens-details"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTHON"))}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [folder / "bin/python", "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env=inherited | offline | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    vllm = Vllm(f"http://127.0.0.1:{port}", _model_folder(folder), process)
    try:
        _wait(vllm, log_file)
        yield vllm
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        vllm.kill()


def _wait(vllm: Vllm, log_file: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{vllm.url}/health", timeout=5).status_code == 200:
                return
        assert vllm.process.poll() is None, f"vLLM ended while it started:\n{log_file.read_text()[-4000:]}"
        time.sleep(1.0)
    raise AssertionError(f"vLLM did not start within {START_TIMEOUT_S:g} s:\n{log_file.read_text()[-4000:]}")
