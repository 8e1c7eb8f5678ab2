"""Where the time to the first token went: a request's way from arrival to first text, cut into stages that add up.

Every moment belongs to exactly one stage, because a stage ends where the next begins::

    read_arrival   authenticate | read_body |
    complete                                 parse | admission | worker_wait | access … select | pack | receipt | …
    backend                                                      tokenize | engine_transport | queue | prefill |
    stream                                                                                                first_token

``other`` is the time that no stage claims. Moments are whole microseconds since the arrival, so the parts sum to the
measured time exactly: there is nothing to round afterwards.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import msgspec

from app.trace_context import Trace
from engine.outputs import RequestTimings

T = TypeVar("T")

Stage = Literal[
    "authenticate",
    "read_body",
    "parse",
    "admission",
    "worker_wait",
    "event_loop",
    "access",
    "clean",
    "dedup",
    "rank",
    "history",
    "select",
    "pack",
    "receipt",
    "tokenize",
    "engine_transport",
    "transfer",
    "queue",
    "prefill",
    "upstream",
    "first_token",
    "other",
]
"""``worker_wait``: for a thread; ``event_loop``: until the loop takes up what a thread has finished; ``pack``:
rendering and counting the prompt around the reducer's stages; ``engine_transport``: to the engine's process, which
takes requests in between two steps, and back;
``transfer``: KV blocks of another engine; ``upstream``: from sending to the first text of a replica; ``first_token``:
from the engine's first output to the first text on its way to the client."""
STAGES: tuple[Stage, ...] = get_args(Stage)


class Interval(NamedTuple):
    """One stretch of one stage, in microseconds since the arrival."""

    stage: Stage
    start_us: int
    end_us: int


class StagePart(msgspec.Struct, frozen=True, kw_only=True):
    """All stretches of one stage."""

    stage: str
    ms: float


class WaterfallReport(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a time to the first token, in the order in which they began; they sum to it."""

    ttft_ms: float
    stages: list[StagePart]


@dataclass(frozen=True, slots=True)
class Waterfall:
    """From the arrival to the first text, without gaps."""

    intervals: tuple[Interval, ...]

    @property
    def ttft_us(self) -> int:
        """The whole, in microseconds."""
        return self.intervals[-1].end_us if self.intervals else 0

    def by_stage(self) -> dict[Stage, int]:
        """Microseconds of each stage that took part, in the order in which they began."""
        found: dict[Stage, int] = {}
        for stage, start_us, end_us in self.intervals:
            found[stage] = found.get(stage, 0) + end_us - start_us
        return found

    def report(self) -> WaterfallReport:
        """The same in ms."""
        parts = [StagePart(stage=stage, ms=us / 1000) for stage, us in self.by_stage().items()]
        return WaterfallReport(ttft_ms=self.ttft_us / 1000, stages=parts)


class TimedJob:
    """Calls a function in whatever thread it is run in, and notes when."""

    __slots__ = ("ended_s", "started_s")

    def __init__(self) -> None:
        self.started_s = self.ended_s = 0.0

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of ``function``."""
        self.started_s = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.ended_s = time.perf_counter()


class Timeline:
    """Laps of one request on the ``time.perf_counter`` clock. A lap goes from the end of the one before to its own."""

    __slots__ = ("_laps", "_last_s", "arrived_s", "trace")

    def __init__(self, arrived_s: float, trace: Trace | None = None) -> None:
        self.arrived_s = arrived_s
        self.trace = trace
        """Where the request is in a trace of its client's or ours."""
        if trace is not None:
            trace.attach(self)
        self._last_s = arrived_s
        self._laps: list[tuple[Stage, float]] = []

    def lap(self, stage: Stage, end_s: float | None = None) -> None:
        """What has passed since the last lap was ``stage``. An end before the last one's ends with it."""
        end_s = time.perf_counter() if end_s is None else end_s
        self._last_s = max(end_s, self._last_s)
        self._laps.append((stage, self._last_s))

    def lap_job(self, job: TimedJob, stage: Stage, parts: Sequence[tuple[Stage, float]] = ()) -> None:
        """A job has come back from its thread: waiting for it, ``parts`` and then ``stage`` in it, and coming back."""
        self.lap("worker_wait", job.started_s)
        self._lap_parts(parts, job.ended_s)
        self.lap(stage, job.ended_s)
        self.lap("event_loop")

    def lap_engine(self, timings: RequestTimings | None) -> None:
        """The first output has come: the engine's own account, and before it what it does not account for."""
        now = time.perf_counter()
        if timings is not None:
            parts: list[tuple[Stage, float]] = [
                ("transfer", timings.transfer_ms / 1000),
                ("queue", timings.queue_ms / 1000),
                ("prefill", timings.prefill_ms / 1000),
            ]
            self.lap("engine_transport", now - sum(duration_s for _, duration_s in parts))
            self._lap_parts([part for part in parts if part[1] > 0], now)
        self.lap("engine_transport", now)

    def waterfall(self, until_s: float) -> Waterfall:
        """All laps up to ``until_s``; what follows the last is ``other``."""
        intervals: list[Interval] = []
        start_us = 0
        for stage, end_s in (*self._laps, ("other", until_s)):
            end_us = round((min(end_s, until_s) - self.arrived_s) * 1e6)
            if end_us > start_us:
                intervals.append(Interval(stage, start_us, end_us))
                start_us = end_us
        return Waterfall(tuple(intervals))

    def _lap_parts(self, parts: Sequence[tuple[Stage, float]], end_s: float) -> None:
        """Parts one after the other, none of them past ``end_s``: clocks of others may say more than there was."""
        for stage, duration_s in parts:
            self.lap(stage, min(self._last_s + duration_s, end_s))
