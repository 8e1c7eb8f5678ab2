"""Starts a gateway of our own on a free loopback port and ends it again, whatever happens in between."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import httpx

from eval.errors import LaunchError

NO_STORAGE = {"FIRSTTOKEN__STORAGE__ENABLED": "false"}
"""A run must neither read nor fill the operator's database."""
HOST = "127.0.0.1"
READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.2
_TAIL_LINES = 20

COMMAND = (sys.executable, "-m", "app.cli", "serve")


@contextmanager
def started_gateway(
    *,
    config: Path | None = None,
    example: bool = False,
    settings: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
    ready_timeout_s: float = READY_TIMEOUT_S,
) -> Iterator[str]:
    """A running gateway; yields its URL once ``/ready`` answers 200.

    ``config`` is its configuration file; by default it finds one itself, or, with ``example``, takes the example that
    is shipped with it, whose keys are known, whatever lies in the working directory. ``settings`` are environment
    variables that change single keys of it. It runs in a process group of its
    own, so Ctrl-C reaches this process alone, which then ends the group. Raises LaunchError with the end of the
    gateway's log.
    """
    port = free_port()
    environment = os.environ | NO_STORAGE | dict(settings or {})
    environment |= {"FIRSTTOKEN_HOST": HOST, "FIRSTTOKEN_PORT": str(port)}
    if config is not None:
        environment["FIRSTTOKEN_CONFIG"] = str(config.resolve())
    elif example:
        environment.pop("FIRSTTOKEN_CONFIG", None)
    with (
        tempfile.TemporaryDirectory(prefix="firsttoken-eval-") as empty_folder,
        started_server(
            command,
            f"http://{HOST}:{port}",
            environment=environment,
            folder=empty_folder if example and config is None else None,
            ready_timeout_s=ready_timeout_s,
        ) as url,
    ):
        yield url


@contextmanager
def started_server(
    command: Sequence[str],
    url: str,
    *,
    name: str = "the gateway",
    ready_path: str = "/ready",
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    ready_timeout_s: float = READY_TIMEOUT_S,
) -> Iterator[str]:
    """Any running server; yields ``url`` once ``ready_path`` answers 200, and ends the server afterwards.

    ``environment`` replaces the whole environment, ``folder`` is its working directory. Raises LaunchError with the end
    of the server's log.
    """
    with tempfile.TemporaryFile(prefix="firsttoken-eval-") as log, _termination_as_exit():
        process = subprocess.Popen(
            list(command),
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, f"{url}{ready_path}", log, ready_timeout_s, name)
            yield url
        finally:
            _stop(process)


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: BinaryIO, timeout_s: float, name: str) -> None:
    deadline = time.monotonic() + timeout_s
    state = "no answer"
    with httpx.Client(timeout=5.0, trust_env=False) as http:
        while time.monotonic() < deadline:
            if (code := process.poll()) is not None:
                raise LaunchError(f"{name} ended with exit status {code} before it was ready:\n{_tail(log)}")
            try:
                response = http.get(url)
            except httpx.TransportError as error:
                state = type(error).__name__
            else:
                if response.is_success:
                    return
                state = f"HTTP {response.status_code}"
            time.sleep(_POLL_S)
    raise LaunchError(f"{name} was not ready after {timeout_s:.0f} s (last: {state}):\n{_tail(log)}")


def _tail(log: BinaryIO) -> str:
    # The gateway writes through its own copy of the descriptor, which shares the position: read without moving it.
    size = os.fstat(log.fileno()).st_size
    start = max(0, size - 65536)
    lines = os.pread(log.fileno(), size - start, start).decode(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:]) or "(its log is empty)"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the gateway; after a grace period SIGKILL to all that is left of its process group."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Turns SIGTERM into an exception while the gateway runs, so that it is ended then too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
