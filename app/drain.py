"""The end of running requests at shutdown: their clients are told, nobody is cut off in the middle of a word.

with drain.interruptible():      a task waits for an output of the engine
    output = await anext(outputs)
                                 drain.end() cancels that wait
ShuttingDownError                an ordinary error from here on: 503, or the frame that ends a stream
"""

import asyncio
from types import TracebackType

from app.errors import ShuttingDownError


class _Wait:
    """One task inside ``interruptible``. A class of its own, because a stream enters it with every piece."""

    __slots__ = ("_num_cancellations", "_waits", "is_interrupted", "task")

    def __init__(self, waits: "set[_Wait]") -> None:
        self._waits = waits
        self.is_interrupted = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "only a task can be interrupted"
        self.task: asyncio.Task[object] = task
        self._num_cancellations = task.cancelling()
        self._waits.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._waits.discard(self)
        if not self.is_interrupted:
            return
        is_ours = isinstance(error, asyncio.CancelledError) and self.task.cancelling() <= self._num_cancellations + 1
        self.task.uncancel()
        if is_ours:
            raise ShuttingDownError from None


class Drain:
    """Ends all that is interruptible at once. Used from the event loop only."""

    def __init__(self) -> None:
        self._waits: set[_Wait] = set()
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether ``end`` was called."""
        return self._is_over

    def interruptible(self) -> _Wait:
        """Around what may be broken off. Raises ``ShuttingDownError`` when ``end`` is called, or was before.

        A cancellation by anybody else passes through as it is, also one that comes at the same time.
        """
        if self._is_over:
            raise ShuttingDownError
        return _Wait(self._waits)

    def end(self) -> None:
        """Interrupts what is inside ``interruptible`` and refuses what comes later. Further calls do nothing."""
        if self._is_over:
            return
        self._is_over = True
        for wait in self._waits:
            wait.is_interrupted = True
            wait.task.cancel()
