"""Budgets: reserved at admission, settled once, never promised twice."""

from dataclasses import dataclass

import pytest
from factories_app import ACME_KEY, GLOBEX_KEY, make_settings

from app.admission import AdmissionController
from app.auth import Authenticator, Principal
from app.counters import MemoryCounterStore
from app.errors import RateLimitError

DAY_S = 86400


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make_principal(key: str = ACME_KEY, **limits: int) -> Principal:
    return Authenticator(make_settings(acme=limits)).authenticate(f"Bearer {key}")


def make_controller(clock: Clock | None = None) -> AdmissionController:
    clock = clock or Clock()
    return AdmissionController(MemoryCounterStore(wall_clock=clock, clock=clock))


async def test_the_request_after_the_last_allowed_one_is_refused_until_the_first_is_a_minute_old() -> None:
    clock = Clock()
    controller, principal = make_controller(clock), make_principal(requests_per_minute=2)
    await controller.admit(principal)
    clock.now_s += 20
    await controller.admit(principal)
    with pytest.raises(RateLimitError, match="limit 2, used 2") as caught:
        await controller.admit(principal)
    assert (caught.value.kind, caught.value.retry_after_s) == ("requests", 40.0)
    clock.now_s += 40
    await controller.admit(principal)
    with pytest.raises(RateLimitError):
        await controller.admit(principal)


async def test_reserved_tokens_cannot_be_promised_twice() -> None:
    controller, principal = make_controller(), make_principal(tokens_per_day=1000)
    first, second = await controller.admit(principal), await controller.admit(principal)
    await first.reserve(700)
    with pytest.raises(RateLimitError, match="limit 1000, used 700, requested 400"):
        await second.reserve(400)
    second.settle()
    first.settle(700, 50)
    assert (await controller.remaining(principal)).tokens == 250


async def test_a_stream_that_passes_the_limit_ends_and_the_next_request_is_refused() -> None:
    controller, principal = make_controller(), make_principal(tokens_per_day=1000)
    lease = await controller.admit(principal)
    await lease.reserve(300)
    lease.settle(300, 900)
    with pytest.raises(RateLimitError) as caught:
        await controller.admit(principal)
    assert caught.value.kind == "tokens"
    assert caught.value.retry_after_s == DAY_S - 1000.0


async def test_a_lease_is_settled_once() -> None:
    controller, principal = make_controller(), make_principal(tokens_per_day=1000)
    lease = await controller.admit(principal)
    await lease.reserve(100)
    lease.settle(100, 10)
    lease.settle(100, 10)
    assert (await controller.remaining(principal)).tokens == 890


async def test_a_failed_request_gives_its_reservation_back() -> None:
    controller, principal = make_controller(), make_principal(tokens_per_day=1000)
    lease = await controller.admit(principal)
    await lease.reserve(900)
    lease.settle()
    assert (await controller.remaining(principal)).tokens == 1000


async def test_tokens_return_at_midnight_and_a_running_request_is_charged_to_its_last_day() -> None:
    clock = Clock(now_s=DAY_S - 10.0)
    controller, principal = make_controller(clock), make_principal(tokens_per_day=1000)
    done, running = await controller.admit(principal), await controller.admit(principal)
    await done.reserve(600)
    done.settle(600, 0)
    await running.reserve(300)
    clock.now_s += 20
    assert (await controller.remaining(principal)).tokens == 700
    running.settle(300, 100)
    assert (await controller.remaining(principal)).tokens == 600


async def test_tenants_do_not_use_each_others_budget() -> None:
    controller = make_controller()
    acme = make_principal(tokens_per_day=10, requests_per_minute=1)
    await (await controller.admit(acme)).reserve(10)
    with pytest.raises(RateLimitError):
        await controller.admit(acme)
    await (await controller.admit(make_principal(GLOBEX_KEY))).reserve(10**9)
