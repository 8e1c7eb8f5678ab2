"""``firsttoken serve`` in several processes: one that watches, and as many as asked for that serve.

    supervisor    holds the address, starts the others, starts one again when it dies, passes signals on
    0, 1, ...     the whole gateway each, on sockets of their own on that address; the kernel shares connections out

A process that dies takes its own connections with it, and the others go on. All end together: on SIGTERM each lets its
requests finish as one alone does. What they share lies outside of them (database, counters), so nothing that must be
counted once may be counted in memory; ``check_processes`` refuses what would be.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import structlog

from app.auth import account_limits
from app.errors import ConfigError
from app.settings import Settings
from app.siblings import PLACE_VARIABLE, ProcessPlace
from app.terminal import Terminal

MAX_PAUSE_S = 10.0
STEADY_S = 30.0
"""A process that ran for so long is started again at once; one that dies sooner, after a pause that doubles."""
FAREWELL_S = 5.0
"""Beyond the grace time: for processes that end in order."""


def check_processes(settings: Settings, num_processes: int) -> None:
    """Raises ``ConfigError`` for what several processes cannot do."""
    if num_processes == 1:
        return
    several = f"server.num_processes is {num_processes}, but"
    if settings.backend.kind == "embedded":
        raise ConfigError(
            f"{several} the embedded engine has its model and its cache in one place: serve it with one process, "
            'or set backend.kind = "openai" and start engines of their own'
        )
    if not settings.counters.url:
        limited = sorted(name for name, tenant in settings.tenants.items() if not account_limits(tenant).is_unlimited)
        who = f"tenant {limited[0]!r} has limits" if limited else "the database may hold tenants with limits"
        if limited or settings.storage.enabled:
            raise ConfigError(
                f"{several} {who}, and each process would count on its own: set counters.url to a Valkey or Redis"
                + ("" if limited else ", or storage.enabled = false")
            )
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(f"{several} this system cannot share an address between processes (SO_REUSEPORT)")


class Supervisor:
    """Starts the processes and ends with them."""

    def __init__(self, command: Sequence[str], *, host: str, port: int, num_processes: int, grace_s: float) -> None:
        """``command`` serves in one process; ``port`` is a free one that this process holds."""
        self._command = tuple(command)
        self._address = {"FIRSTTOKEN_HOST": host, "FIRSTTOKEN_PORT": str(port)}
        self._num_processes = num_processes
        self._grace_s = grace_s
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._ready: set[int] = set()
        self._is_announced = False
        self._stop = asyncio.Event()
        self._terminal = Terminal()
        self._log = structlog.get_logger("firsttoken.supervisor")

    async def run(self) -> None:
        """Until a signal comes. Raises ``ConfigError`` where a process does not even become ready for the first time.

        What such a process had to say stands on standard error.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        with tempfile.TemporaryDirectory(prefix="firsttoken-") as folder:
            keepers = [asyncio.create_task(self._keep(index, Path(folder))) for index in range(self._num_processes)]
            stopping = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait([stopping, *keepers], return_when=asyncio.FIRST_COMPLETED)
                self._stop.set()
                await self._end(keepers)
            finally:
                stopping.cancel()
                for process in self._running.values():
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    loop.remove_signal_handler(number)
            for keeper in keepers:
                keeper.result()

    async def _end(self, keepers: "Sequence[asyncio.Task[None]]") -> None:
        self._pass_on(signal.SIGTERM)
        _, late = await asyncio.wait(keepers, timeout=self._grace_s + FAREWELL_S)
        for index in list(self._running) if late else ():
            self._log.error("process_killed", process=index, reason="it did not end in time")
            with contextlib.suppress(ProcessLookupError):
                self._running[index].kill()
        await asyncio.wait(keepers)

    async def _keep(self, index: int, folder: Path) -> None:
        """One process after the other in one place, until all end."""
        pause_s = 0.0
        environment = os.environ | self._address
        environment[PLACE_VARIABLE] = ProcessPlace(index, self._num_processes, folder).variable()
        while not self._stop.is_set():
            started_s = time.monotonic()
            was_ready, status = await self._run_one(index, environment)
            if self._stop.is_set():
                return
            if not was_ready and not self._is_announced:
                raise ConfigError(f"process {index} ended with status {status} before it was ready")
            pause_s = 0.0 if time.monotonic() - started_s > STEADY_S else min(max(0.5, pause_s * 2), MAX_PAUSE_S)
            self._log.error("process_died", process=index, status=status, again_in_s=pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)

    async def _run_one(self, index: int, environment: Mapping[str, str]) -> tuple[bool, int]:
        """Whether it became ready, and its exit status. Its standard input ends with this process, and it with that."""
        process = await asyncio.create_subprocess_exec(
            *self._command, env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._running[index] = process
        if self._stop.is_set():  # it came while this one was being started
            process.terminate()
        was_ready = False
        try:
            assert process.stdout is not None, "it was piped"
            async for line in process.stdout:
                if not was_ready:
                    was_ready = True
                    self._note_ready(index, line.decode().strip())
                else:
                    sys.stdout.buffer.write(line)
            return was_ready, await process.wait()
        finally:
            if process.returncode is not None:
                del self._running[index]
            self._ready.discard(index)

    def _note_ready(self, index: int, line: str) -> None:
        self._ready.add(index)
        if self._is_announced:
            self._log.info("process_ready", process=index)
        elif len(self._ready) == self._num_processes:
            self._is_announced = True
            click.echo(f"{line} | {self._num_processes} processes")

    def _reload(self) -> None:
        """Tells those that listen for it; one that is being started would die of it, and reads the file anyway."""
        if self._terminal.is_closed:
            self._stop.set()
            return
        for index in self._ready & self._running.keys():
            with contextlib.suppress(ProcessLookupError):
                self._running[index].send_signal(signal.SIGHUP)

    def _pass_on(self, number: int) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
