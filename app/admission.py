"""Budgets of tenants: requests per minute and tokens per day.

A request takes a lease. The lease reserves what is known to be used (the compacted prompt) before the engine sees the
request, and is settled exactly once, on every way out, with what was really used. Reserved tokens count like used ones,
so requests that run at the same time cannot promise the same tokens twice. The output is charged when it is known: a
stream that passes the limit ends undisturbed, the next request is refused.

    tokens_per_day = 1000   used 0    reserved 0
    reserve(300)            used 0    reserved 300     300 <= 1000: admitted
    settle(300, 900)        used 1200 reserved 0       the answer had 900 tokens
    reserve(10)                                        refused until midnight UTC
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from app.auth import Principal
from app.errors import RateLimitError
from app.settings import TenantSettings

DAY_S = 86400
WINDOW_S = 60.0


@dataclass(slots=True)
class _Account:
    """What one tenant has used."""

    limits: TenantSettings
    day: int
    used_tokens: int = 0
    reserved_tokens: int = 0
    starts: deque[float] = field(default_factory=deque)
    """Start times of the requests in the last 60 s, oldest first; at most ``requests_per_minute`` of them."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a tenant has left; ``None`` where it has no limit."""

    requests: int | None
    tokens: int | None


class Lease:
    """One admitted request's claim on its tenant's budget."""

    def __init__(self, controller: "AdmissionController", account: _Account) -> None:
        self._controller = controller
        self._account = account
        self._reserved = 0
        self._is_settled = False

    def reserve(self, num_prompt_tokens: int) -> None:
        """Reserves the prompt. Raises ``RateLimitError`` if the day's tokens do not cover it."""
        assert not self._is_settled, "a settled lease reserves nothing"
        assert not self._reserved, "a lease reserves once"
        self._controller.check_tokens(self._account, num_prompt_tokens)
        self._account.reserved_tokens += num_prompt_tokens
        self._reserved = num_prompt_tokens

    def charge(self, num_tokens: int) -> None:
        """Charges tokens that the request used on its way to an answer, whatever becomes of it."""
        self._controller.charge(self._account, num_tokens)

    def settle(self, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Gives the reservation back and charges what was used. Further calls do nothing."""
        if self._is_settled:
            return
        self._is_settled = True
        self._account.reserved_tokens -= self._reserved
        self._controller.charge(self._account, num_prompt_tokens + num_output_tokens)


class AdmissionController:
    """Accounts of all tenants. Used from the event loop only, so every method is atomic."""

    def __init__(
        self, wall_clock: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall_clock = wall_clock
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, principal: Principal) -> Lease:
        """Counts one request. Raises ``RateLimitError`` at a limit; the refused request is not counted."""
        account = self._account(principal)
        now = self._clock()
        limit = account.limits.requests_per_minute
        if limit is not None:
            self._forget_old_starts(account, now)
            if len(account.starts) >= limit:
                raise RateLimitError(
                    f"Rate limit reached for requests per minute: limit {limit}, used {len(account.starts)}.",
                    kind="requests",
                    retry_after_s=account.starts[0] + WINDOW_S - now,
                )
        self.check_tokens(account, 1)
        if limit is not None:
            account.starts.append(now)
        return Lease(self, account)

    def remaining(self, principal: Principal) -> Remaining:
        """What the tenant has left now."""
        account = self._account(principal)
        self._forget_old_starts(account, self._clock())
        limits = account.limits
        requests = tokens = None
        if limits.requests_per_minute is not None:
            requests = limits.requests_per_minute - len(account.starts)
        if limits.tokens_per_day is not None:
            tokens = max(0, limits.tokens_per_day - account.used_tokens - account.reserved_tokens)
        return Remaining(requests, tokens)

    def check_tokens(self, account: _Account, num_tokens: int) -> None:
        """Raises ``RateLimitError`` unless ``num_tokens`` more fit into the tenant's day."""
        limit = account.limits.tokens_per_day
        if limit is None:
            return
        taken = account.used_tokens + account.reserved_tokens
        if taken + num_tokens > limit:
            raise RateLimitError(
                f"Rate limit reached for tokens per day: limit {limit}, used {taken}, requested {num_tokens}.",
                kind="tokens",
                retry_after_s=DAY_S - self._wall_clock() % DAY_S,
            )

    def charge(self, account: _Account, num_tokens: int) -> None:
        """Adds used tokens to the current day."""
        self._roll_over(account)
        account.used_tokens += num_tokens

    def _account(self, principal: Principal) -> _Account:
        account = self._accounts.get(principal.tenant_id)
        if account is None:
            account = self._accounts[principal.tenant_id] = _Account(principal.tenant, self._today())
        self._roll_over(account)
        return account

    def _roll_over(self, account: _Account) -> None:
        # Reservations of running requests stay: they are charged to the day on which they end.
        if (today := self._today()) != account.day:
            account.day = today
            account.used_tokens = 0

    def _today(self) -> int:
        return int(self._wall_clock() // DAY_S)

    @staticmethod
    def _forget_old_starts(account: _Account, now: float) -> None:
        while account.starts and account.starts[0] + WINDOW_S <= now:
            account.starts.popleft()
