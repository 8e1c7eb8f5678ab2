"""Runs an open-loop load test: every request is sent when it is due, whatever became of the ones before."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from eval.load_records import RequestRecord
from eval.streaming_client import StreamingClient
from eval.workload import LoadRequest

SCRAPE_INTERVAL_S = 0.5
_GAUGE = re.compile(r"^(?:firsttoken_|vllm:|sglang:)(\w+?)(?:_total)?(?:\{[^}]*\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE)


@dataclass(slots=True)
class ServerSamples:
    """What ``/metrics`` said during the test; empty where the server has none."""

    kv_usage: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the start, share of KV blocks in use."""
    num_preemptions: list[float] = field(default_factory=list)

    @property
    def kv_usage_max(self) -> float | None:
        """The watermark."""
        return max((usage for _, usage in self.kv_usage), default=None)

    def add(self, text: str, at_s: float) -> None:
        """Takes what is watched from a page in Prometheus' format."""
        for name, value in _GAUGE.findall(text):
            if name in ("kv_cache_usage_perc", "token_usage"):
                self.kv_usage.append((at_s, float(value)))
            elif name == "num_preemptions":
                self.num_preemptions.append(float(value))


@dataclass(slots=True)
class LoadRun:
    """The records of one test."""

    records: list[RequestRecord]
    samples: ServerSamples
    duration_s: float
    """From the first intended arrival to the end of the last request."""


async def run_load(
    client: StreamingClient,
    requests: Sequence[LoadRequest],
    *,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadRun:
    """Sends all requests on time and waits for the last one.

    ``on_done`` hears of every request in the order of their ends. Records come back by intended arrival.
    """
    samples = ServerSamples()
    started = clock()
    stop = asyncio.Event()
    scraper = asyncio.create_task(_scrape(client, samples, started, stop, clock))

    async def at_its_time(request: LoadRequest) -> RequestRecord:
        await asyncio.sleep(max(0.0, started + request.arrival_s - clock()))
        outcome = await client.send(request, started, clock)
        on_done(outcome.record)
        return outcome.record

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(at_its_time(request)) for request in requests]
        ended = clock()
    finally:
        stop.set()
        await scraper
    first = min((request.arrival_s for request in requests), default=0.0)
    records = sorted((task.result() for task in tasks), key=lambda record: record.arrival_s)
    return LoadRun(records, samples, max(ended - started - first, 1e-9))


async def _scrape(
    client: StreamingClient, samples: ServerSamples, started: float, stop: asyncio.Event, clock: Callable[[], float]
) -> None:
    """Reads ``/metrics`` from time to time; gives up where there is no such page."""
    while True:
        try:
            response = await client.get("/metrics")
        except httpx.HTTPError:
            return
        if not response.is_success:
            return
        samples.add(response.text, clock() - started)
        if stop.is_set():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), SCRAPE_INTERVAL_S)


def warm_up_requests(requests: Sequence[LoadRequest], num_requests: int) -> list[LoadRequest]:
    """Requests of the same form in other words: what loads late is loaded, and nothing of the test is cached."""
    return [
        LoadRequest(
            id=f"warm-up-{place}",
            arrival_s=0.0,
            body={
                **request.body,
                "max_tokens": 1,
                "messages": [{"role": "user", "content": f"Warm-up {place}: which one melts first?"}],
                **({"documents": _WARM_UP_DOCUMENTS} if "documents" in request.body else {}),
            },
        )
        for place, request in enumerate(requests[:num_requests])
    ]


_WARM_UP_DOCUMENTS = [
    {"id": "a", "text": "Copper melts at 1,085 °C."},
    {"id": "b", "text": "Tin melts at 232 °C."},
]
