"""What tenants have in this process: who calls, what is left to them, their policies, receipts and usage.

Works with the configuration file alone, and with a database and a shared store of counters where they are configured.
The modules of both are imported when they are opened.
"""

import asyncio
import importlib
from typing import TYPE_CHECKING

import structlog

from app.admission import AdmissionController
from app.auth import Principal
from app.counters import CounterStore, MemoryCounterStore
from app.counters.base import CounterStoreError
from app.counters.memory import Spent
from app.counters.periods import Period
from app.directory import TenantDirectory
from app.errors import GatewayError, OverloadedError
from app.receipts import ReceiptStore
from app.settings import Settings
from app.snapshot import LiveConfig

if TYPE_CHECKING:
    from app.storage.service import Storage


class Tenancy:
    """Made with the gateway, opened at its start, closed at its end."""

    def __init__(self, config: LiveConfig, source: str = "the configuration file") -> None:
        """``source`` is how messages call the configuration."""
        settings = config.settings
        storage = settings.storage
        self.directory = TenantDirectory(
            config.current.authenticator,
            self if storage.enabled else None,
            ttl_s=storage.key_cache_s,
            max_entries=storage.max_cached_keys,
        )
        self.memory_receipts = ReceiptStore(settings.receipts)
        self.num_counter_failures = 0
        memory = MemoryCounterStore(lease_ttl_s=settings.counters.lease_ttl_s, history=self._spent_since)
        shared = _shared_counters(settings)
        self.admission = AdmissionController(
            shared or memory,
            fallback=memory if shared is not None and settings.counters.fail_open else None,
            lease_ttl_s=settings.counters.lease_ttl_s,
            usage=self,
            on_store_failure=self._on_counter_failure,
        )
        self._config = config
        self._source = source
        self._storage: Storage | None = None

    @property
    def storage(self) -> "Storage | None":
        """The open database; ``None`` where there is none."""
        return self._storage

    @property
    def is_persistent(self) -> bool:
        """Whether a database is configured."""
        return self._config.settings.storage.enabled

    async def check(self, settings: Settings) -> None:
        """Raises ``ConfigError`` for a tenant of ``settings`` that the database has as well."""
        if self._storage is not None:
            await self._storage.refuse_clashes(settings)

    def use_config(self) -> None:
        """Takes the configuration that has been put in force. What was used of budgets stays."""
        current, storage = self._config.current, self._config.settings.storage
        self.directory.use(current.authenticator, ttl_s=storage.key_cache_s, max_entries=storage.max_cached_keys)
        self.memory_receipts.limit(current.settings.receipts)
        if self._storage is not None:
            self._storage.receipts.limit(current.settings.receipts)

    async def open(self) -> None:
        """Opens the database. Raises ``ConfigError`` where it cannot be used."""
        if not self.is_persistent or self._storage is not None:
            return
        # Half a second of imports: in a thread, while the engine and the encoder start as well.
        module = await asyncio.to_thread(importlib.import_module, "app.storage.service")
        storage: Storage = module.Storage(
            self._config.settings, source=self._source, config=self._config, memory=self.memory_receipts
        )
        await storage.open()
        storage.run_in_background()
        self._storage = storage

    async def close(self) -> None:
        """Settles what is open, writes what is left. May be called twice."""
        await self.admission.close()
        if self._storage is not None:
            await self._storage.close()

    async def find_principal(self, digest: str) -> Principal | None:
        """The holder of a key of the database."""
        if self._storage is None:
            raise OverloadedError("The gateway is starting; retry later.", retry_after_s=1.0)
        return await self._storage.keys.find_principal(digest)

    def put(self, receipt_id: str, principal: Principal, document: bytes) -> None:
        """Keeps a receipt."""
        (self.memory_receipts if self._storage is None else self._storage.receipts).put(receipt_id, principal, document)

    async def find_receipt(self, receipt_id: str, principal: Principal) -> bytes:
        """A record as JSON. Raises ``NotFoundError``, the same for one that is not there and one of others."""
        if self._storage is None:
            return self.memory_receipts.get(receipt_id, principal)
        return await self._storage.receipts.get(receipt_id, principal)

    def on_settled(self, principal: Principal, input_tokens: int, output_tokens: int) -> None:
        """Writes usage down."""
        if self._storage is not None:
            self._storage.usage.on_settled(principal, input_tokens, output_tokens)

    def on_compaction(self, principal: Principal, original_tokens: int, saved_tokens: int) -> None:
        """Writes down what a reduction saved."""
        if self._storage is not None:
            self._storage.usage.on_compaction(principal, original_tokens, saved_tokens)

    def on_cached(self, principal: Principal, cached_tokens: int) -> None:
        """Writes down what the prefix cache saved."""
        if self._storage is not None:
            self._storage.usage.on_cached(principal, cached_tokens)

    async def _spent_since(self, tenant: str, period: Period, start_s: float) -> Spent:
        """What counters in memory begin with after a restart; nothing where the database does not say."""
        if self._storage is None:
            return Spent()
        try:
            return await self._storage.usage.spent_since(tenant, period, start_s)
        except GatewayError as error:
            structlog.get_logger("firsttoken.counters").warning("history_missing", tenant=tenant, reason=str(error))
            return Spent()

    def _on_counter_failure(self, error: CounterStoreError) -> None:
        self.num_counter_failures += 1
        if self.num_counter_failures == 1 or self.num_counter_failures % 1000 == 0:
            structlog.get_logger("firsttoken.counters").warning(
                "counter_store_failed",
                reason=str(error.__cause__ or error),
                count=self.num_counter_failures,
                then="counting alone" if self._config.settings.counters.fail_open else "refusing",
            )


def _shared_counters(settings: Settings) -> CounterStore | None:
    if not settings.counters.url:
        return None
    from app.counters.shared import SharedCounterStore

    return SharedCounterStore(settings.counters)
