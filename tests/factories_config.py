"""Configuration files for tests, and gateways that follow them."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from factories_app import EchoBackend, bearer, wait_until
from factories_storage import ADMIN_KEY, digest_of

from app.asgi import create_app
from app.config_file import read_config
from app.config_reload import ConfigReloader
from app.gateway import Gateway, make_gateway

ADMIN = bearer(ADMIN_KEY)
START_TIMEOUT_S = 120.0


def tenant_toml(name: str, key: str, *, groups: str = '["staff"]', **limits: Any) -> str:
    """A tenant with one key."""
    lines = [f"[tenants.{name}]", *(f"{limit} = {value!r}" for limit, value in limits.items())]
    return "\n".join(
        [*lines, f"[[tenants.{name}.keys]]", f'name = "own"\nsha256 = "{digest_of(key)}"\ngroups = {groups}', ""]
    )


def config_toml(*parts: str, storage: str = "enabled = false", server: str = "port = 0") -> str:
    """A whole configuration without an encoder; by default without a database."""
    head = f'[server]\n{server}\n[encoder]\nenabled = false\n[admin]\nkey_sha256 = ["{digest_of(ADMIN_KEY)}"]\n'
    return "\n".join([head, f"[storage]\n{storage}\n", *parts])


class ConfigFile:
    """A file that tests write again and again; each writing changes what ``stat`` says of it."""

    def __init__(self, folder: Path, text: str) -> None:
        self.path = folder / "firsttoken.toml"
        self.write(text)

    def write(self, text: str) -> None:
        """Replaces the file at once, as editors and config maps do."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, self.path)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


@contextlib.asynccontextmanager
async def following_gateway(
    file: ConfigFile, backend: Any = None
) -> AsyncIterator[tuple[httpx.AsyncClient, ConfigReloader, Gateway]]:
    """A gateway on the settings of a file, a client of it in the same loop, and what reads the file anew."""
    started = read_config(file.path, {})
    gateway = make_gateway(started.settings, backend or EchoBackend())
    reloader = ConfigReloader(gateway, started)
    transport = httpx.ASGITransport(create_app(gateway=gateway))  # type: ignore[arg-type]
    await gateway.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            yield http, reloader, gateway
    finally:
        await gateway.close()


@dataclass
class ServedFile:
    """A ``firsttoken serve`` process on a file."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def status(self) -> dict[str, Any]:
        """What ``/admin/v1/config`` says."""
        answer = httpx.get(f"{self.url}/admin/v1/config", headers=ADMIN).raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def signal(self, number: int = signal.SIGHUP) -> None:
        self.process.send_signal(number)

    def reload(self) -> dict[str, Any]:
        """Sends SIGHUP; the status once it has been answered."""
        before = self.status()["checked_at"]
        self.signal()
        assert wait_until(lambda: self.status()["checked_at"] > before, timeout_s=20), self.log.read_text()
        return self.status()


@contextlib.contextmanager
def serving_file(file: ConfigFile, **popen: Any) -> Iterator[ServedFile]:
    """The gateway as a process on a file that names port 0, once it is ready."""
    log = file.path.with_suffix(".log")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "serve", "--config", str(file.path)],
            cwd=Path(__file__).resolve().parent.parent,
            stdout=subprocess.PIPE,
            stderr=stream,
            **{"start_new_session": True, **popen},
        )
    assert process.stdout is not None
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        ready = re.search(rb"ready on (http://\S+)", process.stdout.readline())
        assert ready is not None, log.read_text()
        yield ServedFile(process, ready[1].decode(), log)
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        process.stdout.close()
