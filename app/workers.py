"""A bounded pool of threads for CPU-heavy work, so that the event loop stays free for streams.

Large jobs have a thread of their own: a few of them must not take every thread from the many small ones.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from app.errors import OverloadedError

P = ParamSpec("P")
T = TypeVar("T")


class WorkerPool:
    """Runs functions in threads. Jobs that wait for a thread are counted, and a job too many is refused at once.

    A cancelled caller does not wait: a job that has not started is dropped, one that runs finishes unheard and still
    counts until it does.
    """

    def __init__(self, num_workers: int, max_pending_jobs: int) -> None:
        self._small = ThreadPoolExecutor(num_workers, thread_name_prefix="firsttoken-worker")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="firsttoken-large")
        self._max_pending_jobs = max_pending_jobs
        self._num_pending = 0

    @property
    def num_pending(self) -> int:
        """Jobs waiting or running."""
        return self._num_pending

    def limit(self, max_pending_jobs: int) -> None:
        """Takes another limit; jobs that are there already stay."""
        self._max_pending_jobs = max_pending_jobs

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``function`` called in a thread. Raises ``OverloadedError`` when the pool is full."""
        return await self._run(self._small, partial(function, *args, **kwargs))

    async def run_large(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As ``run``, in the thread that large jobs share."""
        return await self._run(self._large, partial(function, *args, **kwargs))

    async def _run(self, executor: ThreadPoolExecutor, job: Callable[[], T]) -> T:
        if self._num_pending >= self._max_pending_jobs:
            raise OverloadedError(f"{self._num_pending} requests are waiting to be read already; retry later")
        loop = asyncio.get_running_loop()
        self._num_pending += 1
        future = executor.submit(contextvars.copy_context().run, job)
        future.add_done_callback(partial(self._on_done, loop))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drops what has not started; running jobs finish on their own."""
        for executor in (self._small, self._large):
            executor.shutdown(wait=False, cancel_futures=True)

    def _on_done(self, loop: asyncio.AbstractEventLoop, _: Future[Any]) -> None:
        # Called in the worker's thread, or in the loop's where a job is cancelled before it starts.
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody counts any more
            loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        self._num_pending -= 1
