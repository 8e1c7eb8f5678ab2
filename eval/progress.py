"""The progress bar of a run in a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar:
    """Shows how much is done and what is at work."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def step(self, what: str) -> None:
        """Names the current piece of work."""
        self._progress.update(self._task, description=what)

    def case_done(self) -> None:
        """Moves the bar on."""
        self._progress.advance(self._task)


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Bar]:
    """A bar of ``total`` steps that is gone when the run is over."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, progress.add_task("", total=total))
