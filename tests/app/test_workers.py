"""The worker pool: bounded, and quick to let go of a caller that has left."""

import asyncio
import threading

import pytest

from app.errors import OverloadedError
from app.workers import WorkerPool


async def test_a_job_runs_in_another_thread_and_its_error_comes_back() -> None:
    pool = WorkerPool(1, 4)
    assert await pool.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 1, 0)
    pool.close()


async def test_a_job_too_many_is_refused_and_one_is_taken_again_later() -> None:
    pool, gate = WorkerPool(1, 2), threading.Event()
    jobs = [asyncio.ensure_future(pool.run(gate.wait, 5)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        await pool.run(gate.wait, 5)
    gate.set()
    assert await asyncio.gather(*jobs) == [True, True]
    await asyncio.sleep(0.05)
    assert pool.num_pending == 0
    assert await pool.run(int, "3") == 3
    pool.close()


async def test_a_cancelled_caller_returns_at_once_and_a_waiting_job_never_runs() -> None:
    pool, gate, ran = WorkerPool(1, 4), threading.Event(), threading.Event()
    running = asyncio.ensure_future(pool.run(gate.wait, 5))
    waiting = asyncio.ensure_future(pool.run(ran.set))
    await asyncio.sleep(0.02)
    for job in (running, waiting):
        job.cancel()
    await asyncio.wait({running, waiting}, timeout=1)
    assert running.cancelled()
    assert waiting.cancelled()
    gate.set()
    await asyncio.sleep(0.05)
    assert not ran.is_set()
    assert pool.num_pending == 0
    pool.close()


async def test_large_jobs_leave_the_threads_of_small_ones_alone() -> None:
    pool, gate = WorkerPool(1, 8), threading.Event()
    large = [asyncio.ensure_future(pool.run_large(gate.wait, 5)) for _ in range(3)]
    await asyncio.sleep(0.02)
    assert await asyncio.wait_for(pool.run(int, "7"), 1) == 7
    assert pool.num_pending >= 3
    gate.set()
    await asyncio.gather(*large)
    pool.close()
