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
    """One task inside ``interruptible``. May be entered again once it was left: a stream does so with every piece."""

    __slots__ = ("_drain", "_num_cancellations", "is_interrupted", "task")

    def __init__(self, drain: "Drain") -> None:
        self._drain = drain
        self.is_interrupted = False

    def __enter__(self) -> None:
        if self._drain.is_over:
            raise ShuttingDownError
        task = asyncio.current_task()
        assert task is not None, "only a task can be interrupted"
        self.task: asyncio.Task[object] = task
        self._num_cancellations = task.cancelling()
        self._drain.waits.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._drain.waits.discard(self)
        if not self.is_interrupted:
            return
        is_ours = isinstance(error, asyncio.CancelledError) and self.task.cancelling() <= self._num_cancellations + 1
        self.task.uncancel()
        if is_ours:
            raise ShuttingDownError from None


class Drain:
    """Ends all that is interruptible at once. Used from the event loop only."""

    def __init__(self) -> None:
        self.waits: set[_Wait] = set()
        """What would be interrupted now."""
        self.is_over = False
        """Whether ``end`` was called."""

    def interruptible(self) -> _Wait:
        """Around what may be broken off. Raises ``ShuttingDownError`` when ``end`` is called, or was before.

        A cancellation by anybody else passes through as it is, also one that comes at the same time.
        """
        return _Wait(self)

    def end(self) -> None:
        """Interrupts what is inside ``interruptible`` and refuses what comes later. Further calls do nothing."""
        if self.is_over:
            return
        self.is_over = True
        for wait in self.waits:
            wait.is_interrupted = True
            wait.task.cancel()
