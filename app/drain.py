"""The end of running requests at shutdown: their clients are told, nobody is cut off in the middle of a word.

with drain.interruptible():      a task waits for an output of the engine
    output = await anext(outputs)
                                 drain.end() cancels that wait
ShuttingDownError                an ordinary error from here on: 503, or the frame that ends a stream
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from app.errors import ShuttingDownError


@dataclass(slots=True, eq=False)
class _Wait:
    """One task inside ``interruptible``."""

    task: "asyncio.Task[object]"
    is_interrupted: bool = False


class Drain:
    """Ends all that is interruptible at once. Used from the event loop only."""

    def __init__(self) -> None:
        self._waits: set[_Wait] = set()
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether ``end`` was called."""
        return self._is_over

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around what may be broken off. Raises ``ShuttingDownError`` when ``end`` is called, or was before.

        A cancellation by anybody else passes through as it is, also one that comes at the same time.
        """
        if self._is_over:
            raise ShuttingDownError
        task = asyncio.current_task()
        assert task is not None, "only a task can be interrupted"
        wait, num_cancellations = _Wait(task), task.cancelling()
        self._waits.add(wait)
        try:
            yield
        except asyncio.CancelledError:
            if wait.is_interrupted and task.cancelling() <= num_cancellations + 1:
                raise ShuttingDownError from None
            raise
        finally:
            self._waits.discard(wait)
            if wait.is_interrupted:
                task.uncancel()

    def end(self) -> None:
        """Interrupts what is inside ``interruptible`` and refuses what comes later. Further calls do nothing."""
        if self._is_over:
            return
        self._is_over = True
        for wait in self._waits:
            wait.is_interrupted = True
            wait.task.cancel()
