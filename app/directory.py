"""Who calls, among the tenants of the configuration file and those of the database.

The file's keys are in memory. A key of the database is read once and remembered for a while, an unknown one as well, so
that a request costs the same with two tenants as with ten thousand. What is remembered is as old as ``ttl_s`` at most:
within that time a revoked key stops working and a new limit holds. Changes made through this process hold at once.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from app.auth import Authenticator, Principal, key_digest, unknown_key


class KeySource(Protocol):
    """Where keys are kept beside the configuration file."""

    async def find_principal(self, digest: str) -> Principal | None:
        """The holder of a key by its SHA-256 in hex; ``None`` where it is unknown, revoked, expired or blocked."""
        ...


class _Remembered(NamedTuple):
    principal: Principal | None
    read_s: float


class TenantDirectory:
    """Finds principals. Used from the event loop only."""

    def __init__(
        self,
        authenticator: Authenticator,
        source: KeySource | None = None,
        *,
        ttl_s: float = 10.0,
        max_entries: int = 20_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._authenticator = authenticator
        self._source = source
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._clock = clock
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()
        self._reading: dict[str, asyncio.Task[Principal | None]] = {}

    @property
    def num_remembered(self) -> int:
        """Keys in memory beside those of the file."""
        return len(self._remembered)

    def use(self, authenticator: Authenticator, *, ttl_s: float, max_entries: int) -> None:
        """Takes another configuration; what was read of the database before it is read anew."""
        self._authenticator = authenticator
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self.forget()

    async def authenticate(self, authorization: str | None, authenticator: Authenticator | None = None) -> Principal:
        """The principal of an ``Authorization`` header, by the file's keys in ``authenticator`` where one is given.

        Raises ``AuthenticationError``, and ``OverloadedError`` where the database does not answer.
        """
        digest = key_digest(authorization)
        principal = (authenticator or self._authenticator).find(digest)
        if principal is None and self._source is not None:
            principal = await self._find(digest, self._source)
        if principal is None:
            raise unknown_key()
        return principal

    def forget(self) -> None:
        """Reads every key anew; called after a change."""
        self._remembered.clear()
        self._reading.clear()

    async def _find(self, digest: str, source: KeySource) -> Principal | None:
        known = self._remembered.get(digest)
        if known is not None and self._clock() - known.read_s < self._ttl_s:
            self._remembered.move_to_end(digest)
            return known.principal
        reading = self._reading.get(digest)
        if reading is None:
            # Requests that come with one key at the same time read it once; one that is cancelled spoils it for none.
            reading = self._reading[digest] = asyncio.create_task(self._read(digest, source))
            reading.add_done_callback(lambda task: self._on_read(digest, task))
        return await asyncio.shield(reading)

    async def _read(self, digest: str, source: KeySource) -> Principal | None:
        read_s = self._clock()
        principal = await source.find_principal(digest)
        if self._reading.get(digest) is asyncio.current_task():  # else a change has come in between
            self._remembered[digest] = _Remembered(principal, read_s)
            self._remembered.move_to_end(digest)
            while len(self._remembered) > self._max_entries:
                self._remembered.popitem(last=False)
        return principal

    def _on_read(self, digest: str, task: "asyncio.Task[Principal | None]") -> None:
        if self._reading.get(digest) is task:
            del self._reading[digest]
        if not task.cancelled():
            task.exception()  # those who waited have it
