"""What the gateway costs where it has nothing to reduce, against the same upstream called directly.

    python -m eval.benches.bench_gateway --output eval/results/gateway.json

A trivial upstream and ``firsttoken serve`` run as processes of their own on this machine. Direct calls and calls
through the gateway alternate; costs are processor time of the gateway's processes and slopes, so that neither the start
nor a busy machine counts.
"""

import asyncio
import contextlib
import os
import statistics
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from eval.benches.gateway_load import Timing, closed_loop, connect, make_request, open_loop
from eval.benches.gateway_processes import KEY, Running, running_gateway, running_upstream
from eval.benches.gateway_records import (
    AddedTtft,
    BesideLarge,
    GatewayReport,
    ManyProcesses,
    RequestCost,
    StartTime,
    TokenCost,
)
from eval.errors import EvalError
from eval.intervals import percentile
from eval.manifest import make_machine_manifest
from eval.records import encode_report

SENTENCE = "The quarterly report of the northern branch names the costs, the causes and the people in charge. "
PARTS = ("request", "token", "ttft", "large", "processes", "start")
SHORT, LONG = 16, 512
NUM_STREAMS = 16
LARGE_BYTES = 5_000_000
NUM_SMALL = 20
TARGET_STREAMS = 50


def make_body(**changes: Any) -> dict[str, Any]:
    """A chat of about 450 tokens that is passed on as it is."""
    messages = [
        {"role": "system", "content": "Answer in one sentence, and only from what was said."},
        {"role": "user", "content": SENTENCE * 24 + "What does the report name?"},
    ]
    body = {"model": "default", "messages": messages, "max_tokens": SHORT, "firsttoken": {"bypass": True}}
    return body | changes


async def cpu_of(processes: tuple[Running, ...], work: Coroutine[Any, Any, Any]) -> list[float]:
    """Processor seconds that ``work`` costs each of the processes; what they finish later is waited for."""
    before = [process.cpu_s() for process in processes]
    await work
    await asyncio.sleep(0.3)
    return [process.cpu_s() - start for process, start in zip(processes, before, strict=True)]


async def measure_requests(gateway: Running, rounds: int) -> list[RequestCost]:
    """Cost per request, where a bypass is asked for and where there is nothing to reduce."""
    few, many = 100, 900
    bodies = {"bypass": make_body(), "nothing to reduce": make_body(firsttoken={})}
    found: dict[str, list[float]] = {reason: [] for reason in bodies}
    for _ in range(rounds):
        for reason, body in bodies.items():
            request = make_request(gateway.port, body, KEY)
            costs = []
            for count in (few, many):
                work = closed_loop(gateway.port, request, num_requests=count, concurrency=8)
                (cost,) = await cpu_of((gateway,), work)
                costs.append(cost)
            found[reason].append(1000 * (costs[1] - costs[0]) / (many - few))
    return [
        RequestCost(reason=reason, rounds_ms=values, median_ms=statistics.median(values))
        for reason, values in found.items()
    ]


async def measure_tokens(gateway: Running, upstream: Running, rounds: int, per_write: int) -> TokenCost:
    """Cost per token of streams that get a token, or several together, every few milliseconds."""
    gateway_us: list[float] = []
    upstream_us: list[float] = []
    pace_ms = 8.0 if per_write == 1 else 8.0 * per_write / 2
    for _ in range(rounds):
        costs = []
        for num_tokens in (SHORT, LONG):
            body = make_body(stream=True, max_tokens=num_tokens, bench_pace_ms=pace_ms, bench_per_write=per_write)
            request = make_request(gateway.port, body, KEY)
            work = closed_loop(gateway.port, request, num_requests=NUM_STREAMS, concurrency=NUM_STREAMS)
            costs.append(await cpu_of((gateway, upstream), work))
        num_more = NUM_STREAMS * (LONG - SHORT)
        gateway_us.append(1e6 * (costs[1][0] - costs[0][0]) / num_more)
        upstream_us.append(1e6 * (costs[1][1] - costs[0][1]) / num_more)
    return TokenCost(
        tokens_per_write=per_write,
        rounds_us=gateway_us,
        median_us=statistics.median(gateway_us),
        upstream_us=statistics.median(upstream_us),
    )


async def measure_ttft(gateway: Running, upstream: Running, rounds: int) -> AddedTtft:
    """Added time to the first text with about fifty streams open at half of the saturation."""
    fast = make_request(gateway.port, make_body(stream=True, bench_pace_ms=1.0), KEY)
    await closed_loop(gateway.port, fast, num_requests=200, concurrency=TARGET_STREAMS)
    _, seconds = await closed_loop(gateway.port, fast, num_requests=1000, concurrency=2 * TARGET_STREAMS)
    saturation = 1000 / seconds
    rate = saturation / 2
    stream_s = TARGET_STREAMS / rate
    body = make_body(stream=True, bench_pace_ms=1000 * stream_s / (SHORT - 1))
    num_requests = max(200, int(rate * 4))
    found: dict[str, list[list[float]]] = {"direct": [], "gateway": []}
    spans: list[float] = []
    for _ in range(rounds):
        for name, port in (("direct", upstream.port), ("gateway", gateway.port)):
            timings = await open_loop(port, make_request(port, body, KEY), rate=rate, num_requests=num_requests)
            found[name].append([1000 * timing.first_text_s for timing in timings])
            if name == "gateway":
                spans += [timing.total_s for timing in timings]

    def of(name: str, share: float) -> list[float]:
        return [percentile(values, share) for values in found[name]]

    def added(share: float) -> float:
        pairs = zip(of("gateway", share), of("direct", share), strict=True)
        return statistics.median(ours - direct for ours, direct in pairs)

    return AddedTtft(
        saturation_per_s=saturation,
        rate_per_s=rate,
        mean_concurrent_streams=rate * statistics.fmean(spans),
        tokens_per_stream=SHORT,
        direct_ms_p50=of("direct", 0.5),
        gateway_ms_p50=of("gateway", 0.5),
        direct_ms_p95=of("direct", 0.95),
        gateway_ms_p95=of("gateway", 0.95),
        added_ms_p50=added(0.5),
        added_ms_p95=added(0.95),
    )


async def measure_beside_large(gateway: Running) -> BesideLarge:
    """Small requests alone, then while messages of 5 MB are read, reduced as far as they can be, and passed on."""
    small = make_request(gateway.port, make_body(firsttoken={}), KEY)
    text = SENTENCE * (LARGE_BYTES // len(SENTENCE))
    messages = [{"role": "user", "content": text + " What does the report name?"}]
    large = make_request(gateway.port, make_body(messages=messages, firsttoken={}), KEY)
    num_small = 25 * NUM_SMALL
    await closed_loop(gateway.port, small, num_requests=100, concurrency=NUM_SMALL)
    alone, _ = await closed_loop(gateway.port, small, num_requests=num_small, concurrency=NUM_SMALL)
    spans: list[float] = []
    is_over = False

    async def send_large() -> None:
        (connection,) = await connect(gateway.port, 1)
        while not is_over or not spans:
            spans.append((await connection.ask(large)).total_s)
        connection.close()

    sender = asyncio.create_task(send_large())
    await asyncio.sleep(0.05)
    beside: list[Timing] = []
    while not sender.done() and (not spans or len(beside) < num_small):
        timings, _ = await closed_loop(gateway.port, small, num_requests=NUM_SMALL * 5, concurrency=NUM_SMALL)
        beside += timings
    is_over = True
    await sender
    alone_ms = [1000 * timing.total_s for timing in alone]
    beside_ms = [1000 * timing.total_s for timing in beside]
    return BesideLarge(
        large_bytes=len(text),
        num_small=len(beside),
        num_large=len(spans),
        large_s=statistics.median(spans),
        alone_ms_p50=percentile(alone_ms, 0.5),
        alone_ms_p99=percentile(alone_ms, 0.99),
        beside_ms_p50=percentile(beside_ms, 0.5),
        beside_ms_p99=percentile(beside_ms, 0.99),
        beside_ms_max=max(beside_ms),
    )


async def measure_processes(upstream: Running, rounds: int) -> ManyProcesses:
    """Throughput with one process and with two, both started at once, asked in turns."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    costs: dict[int, list[float]] = {1: [], 2: []}
    with contextlib.ExitStack() as stack:
        gateways = {
            count: stack.enter_context(running_gateway(upstream, num_processes=count, has_storage=False))
            for count in rates
        }
        for place in range(rounds + 1):
            for count, gateway in gateways.items():
                request = make_request(gateway.port, make_body(), KEY)
                before = gateway.cpu_s()
                _, seconds = await closed_loop(gateway.port, request, num_requests=1200, concurrency=32)
                if place:  # the first round warms up
                    rates[count].append(1200 / seconds)
                    costs[count].append(1000 * (gateway.cpu_s() - before) / 1200)
    return ManyProcesses(
        num_cores=len(os.sched_getaffinity(0)),
        one_per_s=rates[1],
        two_per_s=rates[2],
        ratio=statistics.median(two / one for one, two in zip(rates[1], rates[2], strict=True)),
        one_cpu_ms=statistics.median(costs[1]),
        two_cpu_ms=statistics.median(costs[2]),
    )


def measure_start(upstream: Running, rounds: int) -> StartTime:
    """From the command to the line that says it is ready."""
    spans, costs = [], []
    for _ in range(rounds):
        with running_gateway(upstream) as gateway:
            spans.append(gateway.start_s)
            costs.append(gateway.start_cpu_s)
    return StartTime(rounds_s=spans, median_s=statistics.median(spans), cpu_s=statistics.median(costs))


def print_report(console: Console, report: GatewayReport) -> None:
    """A table of all that was measured."""
    table = Table(title="Gateway", title_justify="left")
    for heading in ("question", "figure", "wanted"):
        table.add_column(heading)
    for cost in report.request_cost:
        table.add_row(f"processor time per request, {cost.reason}", f"{cost.median_ms:.2f} ms", "≤ 2 ms")
    for token in report.token_cost:
        figure = f"{token.median_us:.0f} µs (upstream {token.upstream_us:.0f})"
        table.add_row(f"per streamed token, {token.tokens_per_write} a write", figure, "≤ 50 µs")
    if (ttft := report.added_ttft) is not None:
        table.add_row("saturation", f"{ttft.saturation_per_s:.0f} streams/s", "")
        streams = f"{ttft.mean_concurrent_streams:.0f} streams"
        table.add_row(f"added TTFT at half of it, {streams}, median", f"{ttft.added_ms_p50:.2f} ms", "≤ 5 ms")
        table.add_row("the same, P95", f"{ttft.added_ms_p95:.2f} ms", "")
    if (large := report.beside_large) is not None:
        table.add_row("20 small requests alone, P99", f"{large.alone_ms_p99:.0f} ms", "")
        figure = f"{large.beside_ms_p99:.0f} ms (largest {large.beside_ms_max:.0f}; {large.num_large} large)"
        table.add_row(f"beside messages of {large.large_bytes / 1e6:.0f} MB, P99", figure, "bounded")
    if (many := report.many_processes) is not None:
        table.add_row(f"two processes over one, {many.num_cores} cores", f"{many.ratio:.2f}", "grows with cores")
    if report.start is not None:
        figure = f"{report.start.median_s:.2f} s ({report.start.cpu_s:.2f} s of processor time)"
        table.add_row("start to ready", figure, "")
    console.print(table)


async def measure(parts: set[str], rounds: int, console: Console) -> GatewayReport:
    """Runs the parts one after the other."""
    request_cost: list[RequestCost] = []
    token_cost: list[TokenCost] = []
    added_ttft = beside_large = many_processes = start = None
    with running_upstream() as upstream:
        with running_gateway(upstream) as gateway:
            warm = make_request(gateway.port, make_body(stream=True), KEY)
            await closed_loop(gateway.port, warm, num_requests=200, concurrency=8)
            if "request" in parts:
                console.print("requests")
                request_cost = await measure_requests(gateway, rounds)
            if "token" in parts:
                console.print("tokens")
                token_cost = [await measure_tokens(gateway, upstream, rounds, per_write) for per_write in (1, 8)]
            if "ttft" in parts:
                console.print("time to first token")
                added_ttft = await measure_ttft(gateway, upstream, rounds)
            if "large" in parts:
                console.print("beside large messages")
                beside_large = await measure_beside_large(gateway)
        if "processes" in parts:
            console.print("processes")
            many_processes = await measure_processes(upstream, rounds)
        if "start" in parts:
            console.print("start")
            start = measure_start(upstream, rounds)
    return GatewayReport(
        manifest=make_machine_manifest(settings={"rounds": rounds, "parts": sorted(parts)}, seed=0),
        request_cost=request_cost,
        token_cost=token_cost,
        added_ttft=added_ttft,
        beside_large=beside_large,
        many_processes=many_processes,
        start=start,
    )


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Only this part; may be repeated.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
def main(rounds: int, parts: tuple[str, ...], output: Path | None) -> None:
    """Measure the gateway in front of a trivial upstream; four minutes."""
    console = Console(stderr=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = uvloop.run(measure(set(parts or PARTS), rounds, console))
    except EvalError as error:
        raise click.ClickException(str(error)) from None
    print_report(console, report)
    if output is not None:
        output.write_bytes(encode_report(report))
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


if __name__ == "__main__":
    main()
