"""Upstream servers in their own processes, and gateways in front of them on a real socket."""

import base64
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from factories_app import make_settings, served

from app.asgi import create_app
from app.backend_settings import BackendSettings, CountingSettings, ReplicaSettings
from app.settings import Settings

SERVER = Path(__file__).with_name("upstream_server.py")
MODEL = "upstream-model"


@dataclass
class Upstream:
    """A running upstream."""

    url: str
    process: subprocess.Popen[str]

    def control(self, **behaviour: Any) -> None:
        """How it answers from now on, unless a request says otherwise."""
        httpx.post(f"{self.url}/control", json=behaviour).raise_for_status()

    def log(self) -> list[dict[str, Any]]:
        """Requests for completions that came in, oldest first."""
        requests: list[dict[str, Any]] = httpx.get(f"{self.url}/log").json()["requests"]
        return requests

    def last_body(self) -> bytes:
        """The body of the last request, byte by byte."""
        return base64.b64decode(self.log()[-1]["body"])

    def last_request(self) -> dict[str, Any]:
        request: dict[str, Any] = json.loads(self.last_body())
        return request

    @property
    def num_connections(self) -> int:
        count: int = httpx.get(f"{self.url}/log").json()["connections"]
        return count

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running_upstream() -> Iterator[Upstream]:
    """An upstream on a free port until the block ends."""
    process = subprocess.Popen([sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Upstream(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def make_backend(*upstreams: Upstream, **changes: Any) -> BackendSettings:
    """Settings for these upstreams; counts with o200k_base."""
    fields: dict[str, Any] = {
        "kind": "openai",
        "flavour": "vllm",
        "model": MODEL,
        "replicas": tuple(ReplicaSettings(url=f"{upstream.url}/v1") for upstream in upstreams),
        "tokenizer": CountingSettings(name="o200k_base"),
        "health_interval_s": 0.0,
        "first_token_timeout_s": 10.0,
        "idle_timeout_s": 5.0,
    }
    return BackendSettings(**fields | changes)


def make_upstream_settings(*upstreams: Upstream, acme: dict[str, Any] | None = None, **changes: Any) -> Settings:
    return make_settings(acme=acme, backend=make_backend(*upstreams, **changes))


@contextlib.contextmanager
def gateway_on(*upstreams: Upstream, acme: dict[str, Any] | None = None, **changes: Any) -> Iterator[str]:
    """A gateway in front of these upstreams; yields its URL."""
    with served(create_app(make_upstream_settings(*upstreams, acme=acme, **changes))) as url:
        yield url


def frames_of(text: str) -> list[Any]:
    """The data of a stream's events, decoded but for ``[DONE]``."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
