"""Databases and stores of counters for tests: SQLite in a folder, PostgreSQL and Valkey started for the test."""

import contextlib
import hashlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from factories_app import make_settings

from app.operator_settings import AdminSettings, StorageSettings
from app.settings import Settings
from eval.launcher import free_port

ADMIN_KEY = "sk-admin-of-tests"
START_TIMEOUT_S = 60.0


def make_storage_settings(folder: Path, *, url: str = "", **changes: Any) -> Settings:
    """The two tenants of ``make_settings`` in the file, and a database in ``folder`` or at ``url``."""
    storage = StorageSettings(url=url, data_folder=str(folder), flush_interval_s=0.1)
    storage = msgspec.structs.replace(storage, **changes.pop("storage", {}))
    return make_settings(storage=storage, admin=AdminSettings(key_sha256=(digest_of(ADMIN_KEY),)), **changes)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def counter_server() -> str | None:
    """The program of Valkey or Redis, or ``None``."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


def postgres_programs() -> Path | None:
    """The folder with PostgreSQL's ``initdb`` and ``postgres``, or ``None``."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: path.parts[-3])
    return versions[-1].parent if versions else None


@contextlib.contextmanager
def running_counter_server() -> Iterator[str]:
    """A Valkey or Redis on a free port; yields its URL."""
    program = counter_server()
    assert program is not None, "checked before"
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for_port(port, process)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait(20)


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """A PostgreSQL on a free port; yields its URL."""
    programs = postgres_programs()
    assert programs is not None, "checked before"
    port = free_port()
    # PostgreSQL refuses to run as root; Debian's package brings the user.
    user = "postgres" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="pg", ignore_cleanup_errors=True) as folder:
        if user is not None:
            entry = pwd.getpwnam(user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
        data = Path(folder) / "data"
        environ = {**os.environ, "LC_ALL": "C"}
        setup = [str(programs / "initdb"), "-D", str(data), "-U", "firsttoken", "-A", "trust", "-N", "-E", "UTF8"]
        subprocess.run(setup, check=True, capture_output=True, user=user, cwd=folder, env=environ)
        command = [str(programs / "postgres"), "-D", str(data), "-p", str(port), "-k", folder, "-h", "127.0.0.1", "-F"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user, cwd=folder, env=environ
        )
        try:
            _wait_for_port(port, process)
            _wait_until_ready(programs, port)
            yield f"postgresql://firsttoken@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # ends connections as well
            process.wait(20)


def _wait_for_port(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert process.poll() is None, f"the server ended with status {process.returncode}"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)


def _wait_until_ready(programs: Path, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    command = [str(programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-q"]
    while subprocess.run(command, check=False).returncode != 0:
        assert time.monotonic() < deadline, "PostgreSQL does not accept connections"
        time.sleep(0.1)
