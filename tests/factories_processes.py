"""``firsttoken serve`` in several processes in front of a test's upstream."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from factories_app import ACME_KEY
from factories_gateway import wait_until_ready
from factories_upstream import MODEL, Upstream

from eval.process_tree import children

ROOT = Path(__file__).resolve().parent.parent
STOP_TIMEOUT_S = 60.0


def config_text(url: str, more: str = "") -> str:
    return f"""
[server]
port = 0
shutdown_grace_s = 5

[backend]
kind = "openai"
flavour = "vllm"
model = "{MODEL}"
tokenizer.name = "o200k_base"

[[backend.replicas]]
url = "{url}/v1"

[encoder]
enabled = false

[storage]
enabled = false

[[tenants.acme.keys]]
name = "demo"
sha256 = "{hashlib.sha256(ACME_KEY.encode()).hexdigest()}"
groups = ["staff"]
{more}
"""


@dataclass
class Supervised:
    """A supervisor and its address."""

    process: subprocess.Popen[bytes]
    url: str
    line: str

    def children(self) -> list[int]:
        """Process ids of those that serve."""
        return list(children(self.process.pid))

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def supervised(folder: Path, upstream: Upstream, *, num_processes: int = 2) -> Iterator[Supervised]:
    config = folder / "firsttoken.toml"
    config.write_text(config_text(upstream.url), encoding="utf-8")
    command = [sys.executable, "-m", "app.cli", "serve", "--config", str(config), "--workers", str(num_processes)]
    log_file = folder / "log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    assert process.stdout is not None
    try:
        url, line = wait_until_ready(process, log_file)
        yield Supervised(process, url, line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
