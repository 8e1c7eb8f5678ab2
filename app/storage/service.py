"""The storage of one process: opened once, refreshed and flushed in the background, closed once.

``firsttoken serve``, the commands of operators and ``/admin/v1`` all use this one object.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from app.errors import ConfigError, GatewayError
from app.policies import PolicyBook
from app.receipts import ReceiptStore
from app.settings import Settings
from app.snapshot import LiveConfig
from app.storage.database import Database
from app.storage.keys import KeyService
from app.storage.policy_versions import PolicyService
from app.storage.receipts import ReceiptArchive
from app.storage.tenants import TenantService, stored_names
from app.storage.usage import UsageRecorder


class Storage:
    """A database and the services on it."""

    def __init__(
        self,
        settings: Settings,
        *,
        source: str = "the configuration file",
        config: LiveConfig | None = None,
        memory: ReceiptStore | None = None,
    ) -> None:
        """``source`` is how messages call the configuration; ``memory`` holds the newest receipts.

        ``config`` is that of a gateway, which may change; without one ``settings`` hold throughout.
        """
        self._config = config or LiveConfig(settings)
        self._source = source
        self.database = Database(settings.storage)
        self.tenants = TenantService(self.database, self._config, source)
        self.keys = KeyService(self.database, self._config, source)
        self.policies = PolicyService(self.database, self._config, source)
        self.usage = UsageRecorder(self.database)
        memory = ReceiptStore(settings.receipts) if memory is None else memory  # an empty one is false
        self.receipts = ReceiptArchive(self.database, settings.receipts, memory)
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()

    @property
    def book(self) -> PolicyBook:
        """The policies of file and database."""
        return self._config.current.policies

    async def open(self, *, migrate: bool | None = None) -> None:
        """Opens the database and reads its policies.

        Raises ``ConfigError`` where it cannot be used, or holds a name that the configuration file has as well.
        """
        await self.database.open(migrate=migrate)
        try:
            await self.refuse_clashes(self._config.settings)
            await self.policies.refresh()
        except BaseException:
            await self.database.close()
            raise

    def run_in_background(self) -> None:
        """Writes usage and receipts, and reads policies that other processes changed, until ``close``."""

        def refresh_interval_s() -> float:
            return max(1.0, self._config.settings.storage.key_cache_s)

        self._tasks = [
            asyncio.create_task(
                self._repeat("flush", self.flush, lambda: self._config.settings.storage.flush_interval_s)
            ),
            asyncio.create_task(self._repeat("refresh", self.policies.refresh, refresh_interval_s)),
        ]

    async def flush(self) -> None:
        """Writes what came together. Raises ``DatabaseError``; nothing is lost then."""
        await self.usage.flush()
        await self.receipts.flush()

    async def close(self) -> None:
        """Writes what is left and closes the database. May be called twice."""
        # Not cancelled: a write that is broken off may have been made or not.
        self._stop.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        was_running, self._tasks = bool(self._tasks), []
        if was_running:
            try:
                await self.flush()
            except GatewayError as error:
                structlog.get_logger("firsttoken.storage").error("flush_failed", reason=str(error))
        await self.database.close()

    async def refuse_clashes(self, settings: Settings) -> None:
        """Raises ``ConfigError`` for a tenant of ``settings`` that the database has as well."""
        async with self.database.session() as session:
            both = sorted(set(await stored_names(session)) & set(settings.tenants))
        if both:
            raise ConfigError(
                f"tenants.{both[0]} is in {self._source} and in the database; rename it in the file, or take it "
                f"out and remove the other with `firsttoken tenants delete {both[0]}`",
                key=f"tenants.{both[0]}",
            )

    async def _repeat(self, name: str, work: Callable[[], Awaitable[None]], interval_s: Callable[[], float]) -> None:
        log = structlog.get_logger("firsttoken.storage")
        is_failing = False
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), interval_s())
                return
            try:
                await work()
            except GatewayError as error:
                if not is_failing:  # once for an outage, not once a second
                    log.warning(f"{name}_failed", reason=str(error))
                is_failing = True
            else:
                is_failing = False


@contextlib.asynccontextmanager
async def opened(settings: Settings, source: str) -> AsyncIterator[Storage]:
    """The storage for one command. Raises ``ConfigError`` where it is off or cannot be opened."""
    if not settings.storage.enabled:
        raise ConfigError("storage.enabled is false, so there is no database")
    storage = Storage(settings, source=source)
    await storage.open()
    try:
        yield storage
    finally:
        await storage.close()
