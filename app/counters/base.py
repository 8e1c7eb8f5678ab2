"""What a store of counters does, and the values that go in and come out.

An account belongs to one tenant. A request holds a lease of it from its admission to its end:

    admit    counts the request and opens the lease          refused at a rate limit, or where nothing is left
    reserve  prompt and expected output, at once or not      refused where the prompt does not fit
    settle   gives the reservation back, charges the use     exactly once, on every way out

Each is one atomic operation, so requests that run at the same time, in one gateway or in several, cannot promise the
same tokens twice. A lease that is neither renewed nor settled, because its gateway died, expires and gives its
reservation back.

The prompt must fit whole. The output is reserved as far as tokens are left: ``max_tokens`` is an upper bound and mostly
not used up, so a bound above the rest is no reason to refuse. An answer that passes the limit ends undisturbed; all
accounts together go over a limit by at most the output of the one request that took the rest.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from app.counters.periods import Period
from app.errors import OverloadedError, RateLimitError

RATE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class PeriodLimit:
    """What an account may use in each window of a period; ``None`` is no limit."""

    period: Period
    requests: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    tokens: int | None = None
    """Input and output together."""


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """All limits of an account that counters keep."""

    requests_per_minute: int | None = None
    """Requests in any 60 seconds."""
    max_parallel_requests: int | None = None
    periods: tuple[PeriodLimit, ...] = ()
    """At most one of each period."""

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing needs to be counted."""
        return self.requests_per_minute is None and self.max_parallel_requests is None and not self.periods


@dataclass(frozen=True, slots=True)
class WindowBalance:
    """One period of an account, reservations of running requests included in what is used."""

    limit: PeriodLimit
    requests: int
    input_tokens: int
    output_tokens: int
    reset_s: float
    """Seconds until the next window."""


@dataclass(frozen=True, slots=True)
class Balance:
    """An account now."""

    num_starts: int
    """Requests in the last 60 seconds."""
    starts_reset_s: float
    """Seconds until the oldest of them no longer counts; 0 where there is none."""
    num_leases: int
    """Requests that run."""
    windows: tuple[WindowBalance, ...]


RefusalKind = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an account does not get what it asked for."""

    kind: RefusalKind
    what: str
    """The limit in words, e.g. ``input tokens per day``."""
    limit: int
    used: int
    requested: int
    retry_after_s: float

    def error(self) -> RateLimitError:
        """What the caller is told."""
        asked = f", requested {self.requested}" if self.kind == "tokens" else ""
        return RateLimitError(
            f"Rate limit reached for {self.what}: limit {self.limit}, used {self.used}{asked}.",
            kind=self.kind,
            retry_after_s=self.retry_after_s,
        )


class CounterStoreError(OverloadedError):
    """The shared store of counters does not answer."""


class CounterStore(Protocol):
    """Counters of all accounts."""

    async def admit(self, account: str, lease_id: str, limits: AccountLimits) -> Refusal | None:
        """Counts one request and opens its lease, or says why not. A refused request is not counted."""
        ...

    async def reserve(
        self, account: str, lease_id: str, limits: AccountLimits, input_tokens: int, max_output_tokens: int
    ) -> Refusal | None:
        """Reserves the prompt, and of the output what is left, or says why not."""
        ...

    def settle(self, account: str, lease_id: str, limits: AccountLimits, input_tokens: int, output_tokens: int) -> None:
        """Closes the lease and charges what was used to the current windows.

        Returns at once, so that no cancellation comes between; a shared store hears of it in the background and is
        told again while it does not answer.
        """
        ...

    async def balance(self, account: str, limits: AccountLimits) -> Balance:
        """The account now, with everything that this process settled before."""
        ...

    async def renew(self, leases: dict[str, str]) -> None:
        """Keeps leases from expiring; accounts by lease id."""
        ...

    async def close(self) -> None:
        """Waits for what is on its way to the store, then lets go of it."""
        ...
