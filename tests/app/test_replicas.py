"""Routing by prefix within the load bound, and the breaker of each replica."""

from collections import Counter
from itertools import pairwise

import pytest

from app.backend_settings import BackendSettings, ReplicaSettings
from app.backends.replicas import Replica, Ring


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_replicas(num: int, clock: Clock | None = None, **changes: float) -> list[Replica]:
    policy = BackendSettings(**changes)  # type: ignore[arg-type]
    clock = clock or Clock()
    return [Replica(ReplicaSettings(url=f"http://replica-{n}:8000/v1"), policy, clock) for n in range(num)]


def make_ring(replicas: list[Replica], load_bound: float = 1.25) -> Ring:
    return Ring(replicas, load_bound=load_bound, virtual_nodes=64)


def names(ring: Ring, num_keys: int = 300) -> list[str]:
    chosen = [ring.choose(f"key {n}".encode()) for n in range(num_keys)]
    return [replica.name for replica in chosen if replica is not None]


def test_the_same_key_goes_to_the_same_replica_and_keys_spread_over_all() -> None:
    ring = make_ring(make_replicas(4))
    assert names(ring) == names(ring)
    counts = Counter(names(ring))
    assert len(counts) == 4
    assert max(counts.values()) < 2.2 * min(counts.values())


def test_a_replica_that_leaves_moves_its_own_keys_only() -> None:
    replicas = make_replicas(4, failure_threshold=1)
    ring = make_ring(replicas)
    before = names(ring)
    replicas[1].fail("down")
    after = names(ring)
    assert replicas[1].name not in after
    assert all(new == old for old, new in zip(before, after, strict=True) if old != replicas[1].name)


def test_a_popular_key_spreads_within_the_bound() -> None:
    replicas = make_replicas(4)
    ring = make_ring(replicas)
    for count in range(1, 41):
        replica = ring.choose(b"popular")
        assert replica is not None
        replica.begin()
        most = -(-count * 5 // 16)  # ceil(1.25 * count / 4)
        assert max(replica.num_running for replica in replicas) <= most
    assert min(replica.num_running for replica in replicas) > 0


def test_an_idle_group_keeps_a_key_at_its_first_place() -> None:
    replicas = make_replicas(3)
    ring = make_ring(replicas)
    first = ring.choose(b"key")
    assert first is not None
    first.begin()
    first.end()
    assert ring.choose(b"key") is first


def test_passed_over_and_open_replicas_are_not_chosen() -> None:
    replicas = make_replicas(2, failure_threshold=1)
    ring = make_ring(replicas)
    assert ring.choose(b"k", [replicas[0]]) is replicas[1]
    replicas[1].fail("down")
    assert ring.choose(b"k", [replicas[0]]) is None


def test_breaker_opens_at_the_threshold_and_a_success_in_between_counts_anew() -> None:
    (replica,) = make_replicas(1, failure_threshold=3)
    for outcome in ("fail", "fail", "succeed", "fail", "fail"):
        replica.succeed() if outcome == "succeed" else replica.fail("x")
        assert replica.state == "closed"
    replica.fail("x")
    assert replica.state == "open"
    assert not replica.is_available


def test_a_half_open_replica_takes_one_request_and_a_failure_doubles_the_pause() -> None:
    clock = Clock()
    (replica,) = make_replicas(1, clock, failure_threshold=1, open_s=5.0, max_open_s=12.0)
    replica.fail("x")
    pauses = []
    for _ in range(3):
        opened = clock.now
        while replica.state == "open":
            clock.now += 0.5
        pauses.append(clock.now - opened)
        assert replica.is_available
        replica.begin()
        assert not replica.is_available, "one trial at a time"
        replica.fail("x")
        replica.end()
    assert pauses == [5.0, 10.0, 12.0]
    assert all(a <= b for a, b in pairwise(pauses))
    clock.now += 12.0
    replica.begin()
    replica.succeed()
    replica.end()
    assert replica.state == "closed"
    assert replica.retry_after_s == 0.0


@pytest.mark.parametrize("url", ["ftp://x/v1", "http://", "http://user:pw@host/v1", "http://host/v1?key=1", "host:80"])
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url must"):
        ReplicaSettings(url=url)


def test_an_openai_backend_needs_a_model_and_distinct_replicas() -> None:
    replica = ReplicaSettings(url="http://a/v1")
    with pytest.raises(ValueError, match="model must name"):
        BackendSettings(kind="openai", replicas=(replica,))
    with pytest.raises(ValueError, match="at least one server"):
        BackendSettings(kind="openai", model="m")
    with pytest.raises(ValueError, match="one URL twice"):
        BackendSettings(kind="openai", model="m", replicas=(replica, ReplicaSettings(url="http://a/v1/")))
