"""Counters: the same rules in memory and in a shared store, also for two gateways at once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
from factories_storage import counter_server, running_counter_server

from app.counters import AccountLimits, MemoryCounterStore, PeriodLimit
from app.counters.base import CounterStore, CounterStoreError
from app.counters.memory import Spent
from app.counters.periods import Period, window_of
from app.counters.shared import SharedCounterStore
from app.operator_settings import CounterSettings

Make = Callable[..., CounterStore]
NO_SERVER = "neither valkey-server nor redis-server is on the path"


@dataclass
class Clock:
    now_s: float = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    if counter_server() is None:
        pytest.skip(NO_SERVER)
    with running_counter_server() as url:
        yield url


@pytest.fixture(params=["memory", "shared"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Makes stores; all of a test that are shared have the same accounts."""
    made: list[CounterStore] = []

    def make_store(clock: Clock | None = None, lease_ttl_s: float = 60.0) -> CounterStore:
        clock = clock or Clock()
        if request.param == "memory":
            store: CounterStore = MemoryCounterStore(wall_clock=clock, lease_ttl_s=lease_ttl_s)
        else:
            prefix = f"{request.node.name}"
            settings = CounterSettings(
                url=request.getfixturevalue("server"), key_prefix=prefix, lease_ttl_s=lease_ttl_s, timeout_s=10.0
            )
            store = SharedCounterStore(settings, wall_clock=clock)
        made.append(store)
        return store

    yield make_store
    for store in made:
        await store.close()


def day(**limits: int) -> AccountLimits:
    return AccountLimits(periods=(PeriodLimit("day", **limits),))


async def test_a_prompt_over_the_rest_is_refused_and_reserves_nothing(make: Make) -> None:
    store, limits = make(), day(tokens=1000)
    assert await store.admit("a", "1", limits) is None
    assert await store.admit("a", "2", limits) is None
    assert await store.reserve("a", "1", limits, 700, 0) is None
    refusal = await store.reserve("a", "2", limits, 400, 0)
    assert refusal is not None
    assert (refusal.kind, refusal.what, refusal.limit, refusal.used, refusal.requested) == (
        *("tokens", "tokens per day"),
        *(1000, 700, 400),
    )
    assert (await store.balance("a", limits)).windows[0].input_tokens == 700


async def test_the_output_is_reserved_as_far_as_tokens_are_left(make: Make) -> None:
    store, limits = make(), day(tokens=1000)
    for lease in ("1", "2"):
        await store.admit("a", lease, limits)
    assert await store.reserve("a", "1", limits, 300, 400) is None
    assert await store.reserve("a", "2", limits, 200, 400) is None
    window = (await store.balance("a", limits)).windows[0]
    assert (window.input_tokens, window.output_tokens) == (500, 500)
    refusal = await store.admit("a", "3", limits)
    assert refusal is not None
    assert (refusal.used, refusal.limit) == (1000, 1000)
    store.settle("a", "1", limits, 300, 100)
    window = (await store.balance("a", limits)).windows[0]
    assert (window.input_tokens, window.output_tokens) == (500, 200)


async def test_a_stream_over_the_limit_is_charged_whole_and_the_next_request_refused_once(make: Make) -> None:
    store, limits = make(), day(tokens=1000)
    await store.admit("a", "1", limits)
    assert await store.reserve("a", "1", limits, 100, 1100) is None
    store.settle("a", "1", limits, 100, 1100)
    await store.balance("a", limits)  # waits for the settlement, which a shared store hears of in the background
    refusal = await store.admit("a", "2", limits)
    assert refusal is not None
    assert refusal.used == 1200
    window = (await store.balance("a", limits)).windows[0]
    assert (window.requests, window.input_tokens, window.output_tokens) == (1, 100, 1100)


async def test_input_and_output_have_limits_of_their_own(make: Make) -> None:
    store, limits = make(), day(input_tokens=100, output_tokens=50)
    await store.admit("a", "1", limits)
    refusal = await store.reserve("a", "1", limits, 101, 10)
    assert refusal is not None
    assert refusal.what == "input tokens per day"
    assert await store.reserve("a", "1", limits, 60, 500) is None
    refusal = await store.admit("a", "2", limits)
    assert refusal is not None
    assert refusal.what == "output tokens per day"
    store.settle("a", "1", limits, 60, 20)
    await store.balance("a", limits)
    assert await store.admit("a", "2", limits) is None


async def test_requests_per_minute_are_counted_over_any_sixty_seconds(make: Make) -> None:
    store, limits = make(), AccountLimits(requests_per_minute=2)
    for lease in ("1", "2"):
        assert await store.admit("a", lease, limits) is None
    refusal = await store.admit("a", "3", limits)
    assert refusal is not None
    assert (refusal.kind, refusal.limit, refusal.used) == ("requests", 2, 2)
    assert 0 < refusal.retry_after_s <= 60
    assert (await store.balance("a", limits)).num_starts == 2


async def test_parallel_requests_are_counted_until_they_are_settled(make: Make) -> None:
    store, limits = make(), AccountLimits(max_parallel_requests=1)
    assert await store.admit("a", "1", limits) is None
    refusal = await store.admit("a", "2", limits)
    assert refusal is not None
    assert refusal.what == "parallel requests"
    store.settle("a", "1", limits, 0, 0)
    await store.balance("a", limits)
    assert await store.admit("a", "2", limits) is None


async def test_a_new_window_begins_empty_and_keeps_what_runs(make: Make) -> None:
    clock = Clock(window_of("month", 1_000_000_000.0).end_s - 10)
    limits = AccountLimits(periods=(PeriodLimit("month", tokens=1000, requests=2),))
    store = make(clock)
    for lease in ("1", "2"):
        await store.admit("a", lease, limits)
    await store.reserve("a", "1", limits, 600, 0)
    store.settle("a", "1", limits, 600, 0)
    await store.balance("a", limits)
    await store.reserve("a", "2", limits, 300, 0)
    refusal = await store.admit("a", "3", limits)
    assert refusal is not None
    assert (refusal.what, refusal.retry_after_s) == ("requests per month", 10)
    clock.now_s += 10
    window = (await store.balance("a", limits)).windows[0]
    assert (window.requests, window.input_tokens) == (0, 300)
    store.settle("a", "2", limits, 300, 50)
    window = (await store.balance("a", limits)).windows[0]
    assert (window.input_tokens, window.output_tokens) == (300, 50)


async def test_a_lease_that_nobody_renews_gives_its_reservation_back(make: Make) -> None:
    store, limits = make(lease_ttl_s=0.3), day(tokens=1000)
    for lease in ("dead", "alive"):
        await store.admit("a", lease, limits)
        await store.reserve("a", lease, limits, 300, 0)
    for _ in range(5):
        await asyncio.sleep(0.1)
        await store.renew({"alive": "a"})
    balance = await store.balance("a", limits)
    assert (balance.num_leases, balance.windows[0].input_tokens) == (1, 300)
    # The gateway was only slow: what the request used is charged all the same.
    store.settle("a", "dead", limits, 300, 7)
    balance = await store.balance("a", limits)
    assert (balance.windows[0].input_tokens, balance.windows[0].output_tokens) == (600, 7)


async def test_accounts_are_apart(make: Make) -> None:
    store, limits = make(), day(tokens=10)
    await store.admit("a", "1", limits)
    await store.reserve("a", "1", limits, 10, 0)
    assert await store.admit("b", "2", limits) is None


async def test_gateways_that_share_a_store_never_promise_the_same_tokens_twice(server: str) -> None:
    settings = CounterSettings(url=server, key_prefix="two", timeout_s=20.0)
    stores = [SharedCounterStore(settings) for _ in range(2)]
    limits = AccountLimits(max_parallel_requests=64, periods=(PeriodLimit("day", tokens=1000),))

    async def ask(number: int) -> bool:
        store, lease = stores[number % 2], f"lease-{number}"
        if await store.admit("a", lease, limits) is not None:
            return False
        return await store.reserve("a", lease, limits, 100, 0) is None

    granted = await asyncio.gather(*(ask(number) for number in range(40)))
    assert sum(granted) == 10
    for number, has_it in enumerate(granted):
        # Told twice, by a gateway that did not hear the answer: counted once.
        for _ in range(2):
            stores[number % 2].settle("a", f"lease-{number}", limits, 90 if has_it else 0, 0)
    for store in stores:
        await store.balance("a", limits)
    balance = await stores[0].balance("a", limits)
    assert (balance.num_leases, balance.windows[0].input_tokens) == (0, 900)
    for store in stores:
        await store.close()


async def test_a_store_that_does_not_answer_is_an_error_of_its_own() -> None:
    store = SharedCounterStore(CounterSettings(url="redis://127.0.0.1:1/0", timeout_s=0.2))
    with pytest.raises(CounterStoreError, match="does not answer"):
        await store.admit("a", "1", day(tokens=10))
    await store.close()


async def test_a_restart_does_not_give_a_budget_anew() -> None:
    asked: list[tuple[str, Period]] = []

    async def history(account: str, period: Period, _: float) -> Spent:
        asked.append((account, period))
        return Spent(requests=3, input_tokens=900, output_tokens=50)

    store, limits = MemoryCounterStore(history=history), day(tokens=1000)
    assert await store.admit("a", "1", limits) is None
    refusal = await store.reserve("a", "1", limits, 51, 0)
    assert refusal is not None
    assert refusal.used == 950
    assert await store.reserve("a", "1", limits, 50, 0) is None
    assert asked == [("a", "day")]


@pytest.mark.parametrize(
    ("period", "start", "end"),
    [("minute", 0.0, 60.0), ("hour", 0.0, 3600.0), ("day", 0.0, 86400.0), ("month", 0.0, 31 * 86400.0)],
)
def test_windows_begin_in_utc(period: Period, start: float, end: float) -> None:
    assert window_of(period, 59.0)[1:] == (start, end)
    assert window_of(period, end).number == window_of(period, 59.0).number + 1
