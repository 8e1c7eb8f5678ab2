"""Counters in this process. Every operation is atomic, because none of them waits."""

import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from app.counters.base import (
    RATE_WINDOW_S,
    AccountLimits,
    Balance,
    PeriodLimit,
    Refusal,
    WindowBalance,
)
from app.counters.periods import Period, window_of


@dataclass(slots=True)
class Spent:
    """What was used in a window."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _Window:
    index: int
    spent: Spent


@dataclass(slots=True)
class _Lease:
    expires_s: float
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _Account:
    starts: deque[float] = field(default_factory=deque)
    """Start times of the requests in the last 60 s, oldest first; at most ``requests_per_minute`` of them."""
    windows: dict[Period, _Window] = field(default_factory=dict)
    leases: OrderedDict[str, _Lease] = field(default_factory=OrderedDict)
    """By lease id, the one that expires first in front."""
    reserved_input: int = 0
    reserved_output: int = 0


History = Callable[[str, Period, float], Awaitable[Spent]]
"""What an account used since the window of a period began at a Unix time, as known from before the start."""


class MemoryCounterStore:
    """Accounts of one process. Used from the event loop only.

    ``history`` is asked once for each account and period when it is first seen, so that a restart does not give a
    day's budget anew.
    """

    def __init__(
        self,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        *,
        lease_ttl_s: float = 60.0,
        history: History | None = None,
    ) -> None:
        self._wall_clock = wall_clock
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._history = history
        self._accounts: dict[str, _Account] = {}

    async def admit(self, account: str, lease_id: str, limits: AccountLimits) -> Refusal | None:
        """As the protocol says."""
        if self._history is not None:
            await self._recall(account, limits, self._history)
        entry, now = self._entry(account), self._clock()
        self._expire(entry, now)
        refusal = self._refusal_of_request(entry, limits, now)
        for limit in limits.periods:
            refusal = refusal or self._refusal_of_tokens(entry, limit, 1, 1)
        if refusal is not None:
            return refusal
        if limits.requests_per_minute is not None:
            entry.starts.append(now)
        for limit in limits.periods:
            self._spent(entry, limit.period).requests += 1
        entry.leases[lease_id] = _Lease(now + self._lease_ttl_s)
        return None

    async def reserve(
        self, account: str, lease_id: str, limits: AccountLimits, input_tokens: int, max_output_tokens: int
    ) -> Refusal | None:
        """As the protocol says."""
        entry, now = self._entry(account), self._clock()
        self._expire(entry, now)
        self._release(entry, lease_id)
        output_tokens = max_output_tokens
        for limit in limits.periods:
            refusal = self._refusal_of_tokens(entry, limit, input_tokens, min(1, max_output_tokens))
            if refusal is not None:
                entry.leases[lease_id] = _Lease(now + self._lease_ttl_s)
                return refusal
            output_tokens = min(output_tokens, self._output_left(entry, limit, input_tokens))
        entry.leases[lease_id] = _Lease(now + self._lease_ttl_s, input_tokens, output_tokens)
        entry.reserved_input += input_tokens
        entry.reserved_output += output_tokens
        return None

    def settle(self, account: str, lease_id: str, limits: AccountLimits, input_tokens: int, output_tokens: int) -> None:
        """As the protocol says."""
        entry = self._entry(account)
        self._release(entry, lease_id)
        for limit in limits.periods:
            spent = self._spent(entry, limit.period)
            spent.input_tokens += input_tokens
            spent.output_tokens += output_tokens

    async def balance(self, account: str, limits: AccountLimits) -> Balance:
        """As the protocol says."""
        if self._history is not None:
            await self._recall(account, limits, self._history)
        entry, now, wall = self._entry(account), self._clock(), self._wall_clock()
        self._expire(entry, now)
        windows = []
        for limit in limits.periods:
            spent = self._spent(entry, limit.period)
            windows.append(
                WindowBalance(
                    limit=limit,
                    requests=spent.requests,
                    input_tokens=spent.input_tokens + entry.reserved_input,
                    output_tokens=spent.output_tokens + entry.reserved_output,
                    reset_s=window_of(limit.period, wall).end_s - wall,
                )
            )
        reset_s = entry.starts[0] + RATE_WINDOW_S - now if entry.starts else 0.0
        return Balance(len(entry.starts), reset_s, len(entry.leases), tuple(windows))

    async def renew(self, leases: dict[str, str]) -> None:
        """As the protocol says."""
        now = self._clock()
        for lease_id, account in leases.items():
            entry = self._accounts.get(account)
            if entry is not None and (lease := entry.leases.get(lease_id)) is not None:
                lease.expires_s = now + self._lease_ttl_s
                entry.leases.move_to_end(lease_id)

    async def close(self) -> None:
        """Nothing is on its way."""

    def _entry(self, account: str) -> _Account:
        return self._accounts.setdefault(account, _Account())

    def _spent(self, entry: _Account, period: Period) -> Spent:
        """What was used in the current window, which begins empty."""
        index = window_of(period, self._wall_clock()).number
        window = entry.windows.get(period)
        if window is None or window.index != index:
            window = entry.windows[period] = _Window(index, Spent())
        return window.spent

    async def _recall(self, account: str, limits: AccountLimits, history: History) -> None:
        """Begins windows that this process sees for the first time with what was used before."""
        for limit in limits.periods:
            if limit.period in self._entry(account).windows:
                continue
            window = window_of(limit.period, self._wall_clock())
            spent = await history(account, limit.period, window.start_s)
            # Another request may have begun the window meanwhile, with the same figures.
            self._entry(account).windows.setdefault(limit.period, _Window(window.number, spent))

    def _expire(self, entry: _Account, now: float) -> None:
        while entry.starts and entry.starts[0] + RATE_WINDOW_S <= now:
            entry.starts.popleft()
        while entry.leases and (first := next(iter(entry.leases.items())))[1].expires_s <= now:
            self._release(entry, first[0])

    @staticmethod
    def _release(entry: _Account, lease_id: str) -> None:
        lease = entry.leases.pop(lease_id, None)
        if lease is not None:
            entry.reserved_input -= lease.input_tokens
            entry.reserved_output -= lease.output_tokens

    def _refusal_of_request(self, entry: _Account, limits: AccountLimits, now: float) -> Refusal | None:
        per_minute, parallel = limits.requests_per_minute, limits.max_parallel_requests
        if per_minute is not None and (used := len(entry.starts)) >= per_minute:
            # Where the limit was lowered, more than one of the starts has to pass.
            retry_after_s = entry.starts[used - per_minute] + RATE_WINDOW_S - now
            return Refusal("requests", "requests per minute", per_minute, used, 1, retry_after_s)
        if parallel is not None and (used := len(entry.leases)) >= parallel:
            return Refusal("requests", "parallel requests", parallel, used, 1, 1.0)
        wall = self._wall_clock()
        for limit in limits.periods:
            used = self._spent(entry, limit.period).requests
            if limit.requests is not None and used >= limit.requests:
                retry_after_s = window_of(limit.period, wall).end_s - wall
                return Refusal("requests", f"requests per {limit.period}", limit.requests, used, 1, retry_after_s)
        return None

    def _refusal_of_tokens(
        self, entry: _Account, limit: PeriodLimit, input_tokens: int, output_tokens: int
    ) -> Refusal | None:
        spent = self._spent(entry, limit.period)
        used_input = spent.input_tokens + entry.reserved_input
        used_output = spent.output_tokens + entry.reserved_output
        for name, most, used, asked in (
            ("tokens", limit.tokens, used_input + used_output, input_tokens),
            ("input tokens", limit.input_tokens, used_input, input_tokens),
            ("output tokens", limit.output_tokens, used_output, output_tokens),
        ):
            if most is not None and used + asked > most:
                wall = self._wall_clock()
                retry_after_s = window_of(limit.period, wall).end_s - wall
                return Refusal("tokens", f"{name} per {limit.period}", most, used, asked, retry_after_s)
        return None

    def _output_left(self, entry: _Account, limit: PeriodLimit, input_tokens: int) -> int:
        """Output tokens that may be reserved beside a prompt that fits."""
        spent = self._spent(entry, limit.period)
        used_output = spent.output_tokens + entry.reserved_output
        left = []
        if limit.tokens is not None:
            left.append(limit.tokens - spent.input_tokens - entry.reserved_input - used_output - input_tokens)
        if limit.output_tokens is not None:
            left.append(limit.output_tokens - used_output)
        return max(0, min(left, default=2**53))
