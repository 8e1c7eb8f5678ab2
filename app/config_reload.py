"""Reads the configuration anew while the gateway runs: on SIGHUP, and when the file has changed.

read      file and environment, validated whole     a mistake ends here: what is in force stays
compare   keys that hold at once, keys that wait    the latter stay as they are and are named
swap      one snapshot for the next requests        those that run keep theirs
"""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator

import msgspec
import structlog

from app.config_changes import changes_between
from app.config_file import ReadConfig, read_config, stamp_of
from app.config_status import FailedReload, ReloadOutcome, Trigger
from app.errors import ConfigError, GatewayError
from app.gateway import Gateway
from app.settings import Settings

MAX_LOGGED_KEYS = 20


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keeps the garbage collector from running while it is open.

    A file of thousands of tenants is a million small objects, of which hardly one is garbage. The collector would look
    at all of them again and again, and the streams would stand still for seconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ConfigReloader:
    """Keeps a gateway on the configuration that was started with. Used from the event loop only."""

    def __init__(
        self, gateway: Gateway, started: ReadConfig, *, adjust: Callable[[Settings], Settings] = lambda found: found
    ) -> None:
        """``started`` is what the gateway was made of; ``adjust`` lays the options of the command line over it."""
        self._gateway = gateway
        self._source = started.source
        self._path = started.path
        self._adjust = adjust
        self._stamp = started.stamp
        self._lock = asyncio.Lock()
        self._log = structlog.get_logger("firsttoken.config")
        record = gateway.reloads
        record.status = msgspec.structs.replace(
            record.status, source=str(started.path), digest=started.digest, loaded_at=time.time()
        )
        self._note_watch()

    async def reload(self, trigger: Trigger) -> ReloadOutcome:
        """Reads and applies. What cannot be used leaves everything as it is; only the outcome says so."""
        async with self._lock:
            self._stamp = await asyncio.to_thread(stamp_of, self._path)
            try:
                outcome = await self._apply(trigger)
            except ConfigError as error:
                outcome = self._refuse(trigger, str(error), error)
            except GatewayError as error:  # the database does not answer: the file may be good
                self._stamp = None
                outcome = self._refuse(trigger, str(error), error)
            except Exception as error:
                self._log.exception("config_reload_broke", trigger=trigger)
                outcome = self._refuse(trigger, f"unexpected {type(error).__name__}; the log has it", error)
            self._gateway.reloads.num_reloads[outcome] += 1
            return outcome

    async def watch(self) -> None:
        """Looks at the file again and again, until it is cancelled.

        A file is read once two looks in a row find it changed and the same: it may be half written at the first.
        """
        settling = self._stamp
        while True:
            reload = self._gateway.settings.reload
            await asyncio.sleep(reload.interval_s)
            stamp = await asyncio.to_thread(stamp_of, self._path)
            is_settled, settling = stamp == settling, stamp
            if reload.watch and is_settled and stamp != self._stamp:
                await self.reload("file")

    async def _apply(self, trigger: Trigger) -> ReloadOutcome:
        gateway = self._gateway
        with collector_paused():
            found = await asyncio.to_thread(self._read)
            changes = await asyncio.to_thread(changes_between, gateway.settings, self._adjust(found.settings))
            if changes.applied:
                await gateway.use(changes.settings)
        if "logging.level" in changes.applied:
            logging.getLogger().setLevel(changes.settings.logging.level.upper())
        now, before = time.time(), gateway.reloads.status
        gateway.reloads.status = msgspec.structs.replace(
            before,
            state="restart_needed" if changes.needs_restart else "current",
            digest=found.digest,
            loaded_at=now,
            checked_at=now,
            trigger=trigger,
            generation=before.generation + bool(changes.applied),
            needs_restart=list(changes.needs_restart),
        )
        self._note_watch()
        self._log.info(
            "config_reloaded",
            trigger=trigger,
            source=self._source,
            digest=found.digest,
            changed=changes.applied[:MAX_LOGGED_KEYS],
            num_changed=len(changes.applied),
        )
        if changes.needs_restart:
            self._log.warning("config_needs_restart", keys=changes.needs_restart[:MAX_LOGGED_KEYS])
            return "partial"
        return "applied" if changes.applied else "unchanged"

    def _read(self) -> ReadConfig:
        """Of a pipe nothing may ever come, and the thread that waits for it keeps the gateway from ending."""
        if self._path.exists() and not self._path.is_file():
            raise ConfigError(f"{self._source}: cannot be read: it is not a regular file")
        found = read_config(self._path)
        if not found.of_file:
            # Valid, but far more often a file that is being written than a wish to serve nobody.
            raise ConfigError(f"{self._source}: holds nothing", hint="stop the gateway to serve nobody")
        return found

    def _refuse(self, trigger: Trigger, message: str, error: Exception) -> ReloadOutcome:
        key, hint = (error.key, error.hint) if isinstance(error, ConfigError) else (None, None)
        now, reloads = time.time(), self._gateway.reloads
        failure = FailedReload(at=now, trigger=trigger, message=message, key=key, hint=hint)
        reloads.status = msgspec.structs.replace(
            reloads.status, state="failed", checked_at=now, trigger=trigger, last_failure=failure
        )
        self._log.error("config_reload_failed", trigger=trigger, reason=message, key=key, hint=hint)
        return "failed"

    def _note_watch(self) -> None:
        reload, reloads = self._gateway.settings.reload, self._gateway.reloads
        reloads.status = msgspec.structs.replace(
            reloads.status, watch=reload.watch, watch_interval_s=reload.interval_s if reload.watch else None
        )
