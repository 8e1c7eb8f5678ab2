"""The end of running requests: those inside are interrupted once, and nobody else's cancellation is taken for it."""

import asyncio

import pytest

from app.drain import Drain
from app.errors import ShuttingDownError


async def wait_in(drain: Drain) -> str:
    with drain.interruptible():
        await asyncio.sleep(30)
    return "finished"


async def test_what_waits_inside_ends_with_an_error_and_its_task_goes_on() -> None:
    drain = Drain()

    async def work() -> str:
        try:
            return await wait_in(drain)
        except ShuttingDownError:
            await asyncio.sleep(0)  # a task that is still being cancelled could not wait here
            task = asyncio.current_task()
            assert task is not None
            return f"told, {task.cancelling()} cancellations left"

    running = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    drain.end()
    drain.end()
    assert await asyncio.wait_for(running, 1) == "told, 0 cancellations left"


async def test_what_comes_after_the_end_is_refused_at_once() -> None:
    drain = Drain()
    drain.end()
    with pytest.raises(ShuttingDownError):
        await asyncio.wait_for(wait_in(drain), 1)
    assert drain.is_over


async def test_what_is_outside_again_is_left_alone() -> None:
    drain = Drain()

    async def work() -> str:
        with drain.interruptible():
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        return "finished"

    running = asyncio.ensure_future(work())
    await asyncio.sleep(0.01)
    drain.end()
    assert await running == "finished"


@pytest.mark.parametrize("ends_first", [False, True])
async def test_a_cancellation_by_others_stays_one(ends_first: bool) -> None:
    drain = Drain()
    running = asyncio.ensure_future(wait_in(drain))
    await asyncio.sleep(0)
    for interrupt in (drain.end, running.cancel) if ends_first else (running.cancel, drain.end):
        interrupt()
    await asyncio.wait({running}, timeout=1)
    assert running.cancelled()


async def test_an_error_inside_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), Drain().interruptible():
        raise ZeroDivisionError


async def test_one_task_may_be_inside_twice() -> None:
    drain = Drain()

    async def work() -> None:
        with drain.interruptible():
            await wait_in(drain)

    running = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    drain.end()
    with pytest.raises(ShuttingDownError):
        await asyncio.wait_for(running, 1)
