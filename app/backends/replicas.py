"""Replicas of one model: which of them answers, and which gets a request.

A replica that fails several times in a row is left alone (its breaker is open), then tried by one request or health
check at a time (half open), and taken back by the first success:

    closed --failures--> open --time--> half open --success--> closed
                          ^------------- failure, for twice as long

Requests with the same beginning go to the same replica, whose prefix cache has it: each replica has places on a ring,
and a key goes to the first place after its own hash. A replica with more than ``load_bound`` times its share of the
running requests is passed over for the next one on the ring, so a popular beginning spreads over as many as it needs.
"""

import hashlib
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from app.backend_settings import BackendSettings, ReplicaSettings


@dataclass(slots=True, eq=False)
class Replica:
    """One server and what is known of it. Used from the event loop only."""

    settings: ReplicaSettings
    policy: BackendSettings
    clock: Callable[[], float] = time.monotonic
    num_running: int = 0
    """Requests that it computes for this gateway."""
    num_failures: int = 0
    """In a row."""
    last_error: str | None = None
    _opened_s: float | None = field(default=None)
    _open_s: float = 0.0
    _is_on_trial: bool = False

    @property
    def url(self) -> str:
        """Base URL without a slash at its end."""
        return self.settings.url.rstrip("/")

    @property
    def name(self) -> str:
        """Host and port."""
        return self.settings.name

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half_open``."""
        if self._opened_s is None:
            return "closed"
        return "half_open" if self.clock() - self._opened_s >= self._open_s else "open"

    @property
    def is_available(self) -> bool:
        """Whether a request may be sent to it now."""
        state = self.state
        return state == "closed" or (state == "half_open" and not self._is_on_trial)

    @property
    def retry_after_s(self) -> float:
        """When it may be tried again."""
        if self._opened_s is None:
            return 0.0
        return max(0.0, self._open_s - (self.clock() - self._opened_s))

    def begin(self) -> None:
        """A request is sent to it."""
        self.num_running += 1
        if self._opened_s is not None:
            self._is_on_trial = True

    def end(self) -> None:
        """A request to it is over, however it went."""
        self.num_running -= 1
        assert self.num_running >= 0, "a request ends once"
        self._is_on_trial = False

    def succeed(self) -> None:
        """It has answered."""
        self.num_failures = 0
        self.last_error = None
        self._opened_s, self._open_s, self._is_on_trial = None, 0.0, False

    def fail(self, error: str) -> None:
        """It has not answered, or with a failure of its own."""
        self.num_failures += 1
        self.last_error = error
        if self._opened_s is not None:
            if self.state == "half_open":
                self._open_s = min(self._open_s * 2, self.policy.max_open_s)
                self._opened_s = self.clock()
        elif self.num_failures >= self.policy.failure_threshold:
            self._open_s = min(self.policy.open_s, self.policy.max_open_s)
            self._opened_s = self.clock()
        self._is_on_trial = False


class Ring:
    """Chooses replicas by key and load."""

    def __init__(self, replicas: Sequence[Replica], *, load_bound: float, virtual_nodes: int) -> None:
        self._replicas = tuple(replicas)
        self._load_bound = load_bound
        places = sorted(
            (_point(f"{replica.url}#{number}".encode()), index)
            for index, replica in enumerate(replicas)
            for number in range(virtual_nodes)
        )
        self._points = [point for point, _ in places]
        self._owners = [index for _, index in places]

    def choose(self, key: bytes, passed_over: Collection[Replica] = ()) -> Replica | None:
        """The replica for a key, none of those ``passed_over``; ``None`` where none is available."""
        available = [
            replica for replica in self._replicas if replica.is_available and not any(replica is p for p in passed_over)
        ]
        if not available:
            return None
        num_running = sum(replica.num_running for replica in available) + 1
        most = math.ceil(self._load_bound * num_running / len(available))
        # Some available replica has fewer than the mean of all with this request, so the walk ends at one.
        for replica in self._walk(key):
            if any(replica is other for other in available) and replica.num_running + 1 <= most:
                return replica
        raise AssertionError("a replica below its bound is always found")

    def _walk(self, key: bytes) -> list[Replica]:
        """All replicas in the order in which their places follow the key."""
        start = bisect_right(self._points, _point(key))
        order = dict.fromkeys(self._owners[(start + step) % len(self._owners)] for step in range(len(self._owners)))
        return [self._replicas[index] for index in order]


def _point(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
