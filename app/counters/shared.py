"""Counters in a Valkey or Redis that several gateways share.

Each operation is one script, so it is atomic for all of them. A settlement goes to the store in the background, in
order with nothing else to wait for, and is told again while the store does not answer; the store counts it once.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import RedisError

from app.counters import scripts
from app.counters.base import (
    RATE_WINDOW_S,
    AccountLimits,
    Balance,
    CounterStoreError,
    PeriodLimit,
    Refusal,
    WindowBalance,
)
from app.counters.periods import Window, window_of
from app.operator_settings import CounterSettings

SETTLE_TRIES = 8
FIRST_PAUSE_S = 0.1
LATE_S = 3600
"""A window stays this long after its end."""
NO_LIMIT = -1
MAX_CONNECTIONS = 32


class SharedCounterStore:
    """Accounts in a shared store. Used from the event loop only."""

    def __init__(
        self,
        settings: CounterSettings,
        *,
        wall_clock: Callable[[], float] = time.time,
        rate_window_s: float = RATE_WINDOW_S,
    ) -> None:
        """``wall_clock`` only tells which window of a period it is; gateways need clocks that agree to the second."""
        scheme, separator, rest = settings.url.partition("://")
        url = {"valkey": "redis", "valkeys": "rediss"}.get(scheme, scheme) + separator + rest
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=settings.timeout_s,
            socket_timeout=settings.timeout_s,
            socket_connect_timeout=settings.timeout_s,
            decode_responses=True,
        )
        self._client = Redis.from_pool(pool)
        self._prefix = settings.key_prefix
        self._lease_ttl_s = settings.lease_ttl_s
        self._wall_clock = wall_clock
        self._rate_window_s = rate_window_s
        self._admit = self._client.register_script(scripts.ADMIT)
        self._reserve = self._client.register_script(scripts.RESERVE)
        self._settle = self._client.register_script(scripts.SETTLE)
        self._balance = self._client.register_script(scripts.BALANCE)
        self._renew = self._client.register_script(scripts.RENEW)
        self._settling: dict[str, set[asyncio.Task[None]]] = defaultdict(set)
        self._log = structlog.get_logger("firsttoken.counters")

    async def admit(self, account: str, lease_id: str, limits: AccountLimits) -> Refusal | None:
        """As the protocol says."""
        windows = self._windows(limits)
        numbers = [_number(limits.requests_per_minute), _number(limits.max_parallel_requests)]
        answer = await self._run(
            self._admit,
            self._keys(account, limits, windows),
            [lease_id, self._lease_ttl_s, self._rate_window_s, *numbers, *self._periods(limits, windows)],
        )
        return self._refusal(answer, limits, windows)

    async def reserve(
        self, account: str, lease_id: str, limits: AccountLimits, input_tokens: int, max_output_tokens: int
    ) -> Refusal | None:
        """As the protocol says."""
        windows = self._windows(limits)
        numbers = [input_tokens, max_output_tokens]
        answer = await self._run(
            self._reserve,
            self._keys(account, limits, windows),
            [lease_id, self._lease_ttl_s, self._rate_window_s, *numbers, *self._periods(limits, windows)],
        )
        return self._refusal(answer, limits, windows)

    def settle(self, account: str, lease_id: str, limits: AccountLimits, input_tokens: int, output_tokens: int) -> None:
        """As the protocol says."""
        windows = self._windows(limits)
        keys = self._keys(account, limits, windows)
        kept = [self._keep_s(window) for window in windows]
        arguments = [lease_id, input_tokens, output_tokens, len(windows), *kept]
        task = asyncio.create_task(self._tell_settlement(account, keys, arguments))
        self._settling[account].add(task)
        task.add_done_callback(lambda done: self._forget_settlement(account, done))

    async def balance(self, account: str, limits: AccountLimits) -> Balance:
        """As the protocol says."""
        if pending := tuple(self._settling.get(account, ())):
            await asyncio.wait(pending, timeout=1.0)
        windows, wall = self._windows(limits), self._wall_clock()
        found = await self._run(
            self._balance, self._keys(account, limits, windows), [self._rate_window_s, len(limits.periods)]
        )
        balances = [
            WindowBalance(
                limit=limit,
                requests=int(found[3 + 3 * place]),
                input_tokens=int(found[4 + 3 * place]),
                output_tokens=int(found[5 + 3 * place]),
                reset_s=windows[place].end_s - wall,
            )
            for place, limit in enumerate(limits.periods)
        ]
        return Balance(int(found[0]), max(0.0, float(found[1])), int(found[2]), tuple(balances))

    async def renew(self, leases: dict[str, str]) -> None:
        """As the protocol says."""
        by_account: dict[str, list[str]] = defaultdict(list)
        for lease_id, account in leases.items():
            by_account[account].append(lease_id)
        for account, lease_ids in by_account.items():
            keys = self._keys(account, AccountLimits(), [])
            await self._run(self._renew, keys, [self._lease_ttl_s, *lease_ids])

    async def close(self) -> None:
        """Gives settlements that are on their way a few seconds, then closes the connections."""
        if pending := [task for tasks in self._settling.values() for task in tasks]:
            _, late = await asyncio.wait(pending, timeout=5.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._client.aclose()

    async def _tell_settlement(self, account: str, keys: list[str], arguments: list[Any]) -> None:
        pause_s = FIRST_PAUSE_S
        for attempt in range(SETTLE_TRIES):
            try:
                await self._run(self._settle, keys, arguments)
            except CounterStoreError:
                if attempt + 1 == SETTLE_TRIES:
                    # The reservation expires by itself; what was used is not charged.
                    self._log.error("settlement_lost", tenant=account, input=arguments[1], output=arguments[2])
                    return
                await asyncio.sleep(pause_s * (1 + random.random()))
                pause_s *= 2
            else:
                return

    def _forget_settlement(self, account: str, task: "asyncio.Task[None]") -> None:
        self._settling[account].discard(task)
        if not self._settling[account]:
            del self._settling[account]

    async def _run(self, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        try:
            return await script(keys=keys, args=arguments)
        except (RedisError, OSError, TimeoutError) as error:
            raise CounterStoreError("The store of rate limits does not answer; retry later.") from error

    def _windows(self, limits: AccountLimits) -> list[Window]:
        wall = self._wall_clock()
        return [window_of(limit.period, wall) for limit in limits.periods]

    def _keys(self, account: str, limits: AccountLimits, windows: list[Window]) -> list[str]:
        base = f"{self._prefix}:{{{account}}}"
        used = [
            f"{base}:used:{limit.period}:{window.number}" for limit, window in zip(limits.periods, windows, strict=True)
        ]
        return [*(f"{base}:{name}" for name in ("starts", "leases", "amounts", "reserved", "ended")), *used]

    def _periods(self, limits: AccountLimits, windows: list[Window]) -> list[int]:
        numbers = [len(limits.periods)]
        for limit, window in zip(limits.periods, windows, strict=True):
            numbers += [_number(limit.requests), _number(limit.input_tokens), _number(limit.output_tokens)]
            numbers += [_number(limit.tokens), self._keep_s(window)]
        return numbers

    def _keep_s(self, window: Window) -> int:
        return max(1, int(window.end_s - self._wall_clock())) + LATE_S

    def _refusal(self, answer: list[Any], limits: AccountLimits, windows: list[Window]) -> Refusal | None:
        if not answer:
            return None
        kind, place, what, limit, used, asked, retry_after_s = answer
        if int(place):
            period: PeriodLimit = limits.periods[int(place) - 1]
            what = f"{what} per {period.period}"
        wait_s = float(retry_after_s)
        if wait_s < 0:
            wait_s = windows[int(place) - 1].end_s - self._wall_clock()
        return Refusal(kind, what, int(limit), int(used), int(asked), wait_s)


def _number(limit: int | None) -> int:
    return NO_LIMIT if limit is None else limit
