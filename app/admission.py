"""Budgets of tenants: what a request takes at its admission, and gives back or pays at its end.

A request takes a lease. The lease reserves what may be used (the compacted prompt and the output that is allowed)
before the engine sees the request, and is settled exactly once, on every way out, with what was really used.

    tokens_per_day = 1000            used 0     reserved 0
    reserve(300, 400)                used 0     reserved 700    300 fit, and 400 of the output
    reserve(200, 400), another one   used 0     reserved 1000   200 fit, and 100 of the output; nothing is left
    settle(300, 100), the first      used 400   reserved 300    300 tokens are free again
    settle(200, 900), the other      used 1500  reserved 0      its answer had 900 tokens and ended undisturbed
    admit                                                       refused until midnight UTC
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from app.auth import Principal
from app.counters import AccountLimits, Balance, CounterStore, MemoryCounterStore, Refusal
from app.counters.base import CounterStoreError

RENEWALS_PER_TTL = 3


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a tenant has left of its tightest limits; ``None`` where it has no limit."""

    requests: int | None
    tokens: int | None
    requests_limit: int | None = None
    tokens_limit: int | None = None
    requests_reset_s: float = 0.0
    """Seconds until the limit is whole again."""
    tokens_reset_s: float = 0.0


class UsageSink(Protocol):
    """Hears of every settled request."""

    def on_settled(self, principal: Principal, input_tokens: int, output_tokens: int) -> None:
        """A request has ended and used these tokens."""
        ...


class Lease:
    """One admitted request's claim on its tenant's budget."""

    def __init__(self, controller: "AdmissionController", store: CounterStore, principal: Principal) -> None:
        self.id = secrets.token_hex(12)
        self.principal = principal
        self.store = store
        self._controller = controller
        self._charged = 0
        self._has_reserved = False
        self._is_settled = False

    async def reserve(self, num_prompt_tokens: int, max_output_tokens: int = 0) -> None:
        """Reserves the prompt, and the output as far as tokens are left.

        Raises ``RateLimitError`` if what is left of a budget does not cover the prompt.
        """
        assert not self._is_settled, "a settled lease reserves nothing"
        assert not self._has_reserved, "a lease reserves once"
        self._has_reserved = True
        limits = self.principal.limits
        if limits.is_unlimited:
            return
        refusal = await self._controller.reserve(self, self._charged + num_prompt_tokens, max_output_tokens)
        if refusal is not None:
            raise refusal.error()

    def charge(self, num_tokens: int) -> None:
        """Charges tokens that the request used on its way to an answer, whatever becomes of it."""
        self._charged += num_tokens

    def settle(self, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Gives the reservation back and charges what was used. Further calls do nothing."""
        if self._is_settled:
            return
        self._is_settled = True
        self._controller.settle(self, self._charged + num_prompt_tokens, num_output_tokens)


class AdmissionController:
    """Admits requests against the limits of their tenants. Used from the event loop only."""

    def __init__(
        self,
        store: CounterStore | None = None,
        *,
        fallback: CounterStore | None = None,
        lease_ttl_s: float = 60.0,
        usage: UsageSink | None = None,
        on_store_failure: Callable[[CounterStoreError], None] = lambda _: None,
    ) -> None:
        """``fallback`` counts for this process alone while ``store`` does not answer; without one it refuses then."""
        self._store = store or MemoryCounterStore()
        self._fallback = fallback
        self._lease_ttl_s = lease_ttl_s
        self._usage = usage
        self._on_store_failure = on_store_failure
        self._leases: dict[str, Lease] = {}
        self._renewing: asyncio.Task[None] | None = None

    @property
    def num_leases(self) -> int:
        """Requests of limited tenants that this process has admitted and not settled."""
        return len(self._leases)

    async def admit(self, principal: Principal) -> Lease:
        """Counts one request. Raises ``RateLimitError`` at a limit; the refused request is not counted."""
        limits, tenant_id = principal.limits, principal.tenant_id
        lease = Lease(self, self._store, principal)
        if limits.is_unlimited:
            return lease
        try:
            refusal = await self._admit(lease, tenant_id, limits)
        except asyncio.CancelledError:
            # The store may have opened it already.
            lease.store.settle(tenant_id, lease.id, limits, 0, 0)
            raise
        if refusal is not None:
            raise refusal.error()
        self._leases[lease.id] = lease
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_leases())
        return lease

    async def _admit(self, lease: Lease, tenant_id: str, limits: AccountLimits) -> Refusal | None:
        try:
            return await self._store.admit(tenant_id, lease.id, limits)
        except CounterStoreError as error:
            self._on_store_failure(error)
            if self._fallback is None:
                raise
        lease.store = self._fallback
        return await self._fallback.admit(tenant_id, lease.id, limits)

    async def reserve(self, lease: Lease, input_tokens: int, max_output_tokens: int) -> Refusal | None:
        """Reserves for a lease; called by it, once."""
        tenant_id, limits = lease.principal.tenant_id, lease.principal.limits
        try:
            return await lease.store.reserve(tenant_id, lease.id, limits, input_tokens, max_output_tokens)
        except CounterStoreError as error:
            self._on_store_failure(error)
            if self._fallback is None:
                raise
        # Opened there before it went away, the lease goes on here; what it uses is charged there at its end.
        return await self._fallback.reserve(tenant_id, lease.id, limits, input_tokens, max_output_tokens)

    def settle(self, lease: Lease, input_tokens: int, output_tokens: int) -> None:
        """Closes a lease; called by it, once."""
        principal = lease.principal
        self._leases.pop(lease.id, None)
        if not principal.limits.is_unlimited:
            lease.store.settle(principal.tenant_id, lease.id, principal.limits, input_tokens, output_tokens)
        if self._usage is not None:
            self._usage.on_settled(principal, input_tokens, output_tokens)

    async def remaining(self, principal: Principal) -> Remaining:
        """What the tenant has left now; nothing is known of a tenant without limits, or of a store that is down."""
        if principal.limits.is_unlimited:
            return Remaining(None, None)
        try:
            return remaining_of(principal.limits, await self._store.balance(principal.tenant_id, principal.limits))
        except CounterStoreError as error:
            self._on_store_failure(error)
            return Remaining(None, None)

    async def close(self) -> None:
        """Settles what is left and lets go of the store."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        for lease in list(self._leases.values()):
            lease.settle()
        await self._store.close()

    async def _renew_leases(self) -> None:
        """Keeps the leases of running requests while there are any; those of a process that died expire."""
        while True:
            await asyncio.sleep(self._lease_ttl_s / RENEWALS_PER_TTL)
            for store in (self._store, self._fallback):
                if store is None:
                    continue
                held = {lease.id: lease.principal.tenant_id for lease in self._leases.values() if lease.store is store}
                if held:
                    with contextlib.suppress(CounterStoreError):
                        await store.renew(held)


def remaining_of(limits: AccountLimits, balance: Balance) -> Remaining:
    """The tightest limit of each kind: the one with the least left."""
    requests: list[tuple[int, int, float]] = []
    tokens: list[tuple[int, int, float]] = []
    if limits.requests_per_minute is not None:
        left = max(0, limits.requests_per_minute - balance.num_starts)
        requests.append((left, limits.requests_per_minute, balance.starts_reset_s))
    for window in balance.windows:
        limit = window.limit
        if limit.requests is not None:
            requests.append((max(0, limit.requests - window.requests), limit.requests, window.reset_s))
        for most, used in (
            (limit.tokens, window.input_tokens + window.output_tokens),
            (limit.input_tokens, window.input_tokens),
            (limit.output_tokens, window.output_tokens),
        ):
            if most is not None:
                tokens.append((max(0, most - used), most, window.reset_s))
    request, token = min(requests, default=None), min(tokens, default=None)
    return Remaining(
        requests=None if request is None else request[0],
        tokens=None if token is None else token[0],
        requests_limit=None if request is None else request[1],
        tokens_limit=None if token is None else token[1],
        requests_reset_s=0.0 if request is None else request[2],
        tokens_reset_s=0.0 if token is None else token[2],
    )
