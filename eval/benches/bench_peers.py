"""firsttoken against vLLM, OpenVINO GenAI and llama.cpp on one RAG workload, over HTTP, with one client.

    python -m eval.benches.bench_peers ../shared/data --output eval/results/peers.json

1. The workload (``peers_workload``) is written as a trace, once.
2. Every server in turn answers a few requests of other passages one at a time: the reference without load. The mean
   time of the slowest sets the common rate: the share ``--utilisation`` of what it can serve.
3. Two passes, the second in the opposite order: every server, started afresh, gets the same requests at the same
   open-loop arrivals. firsttoken gets documents and reduces them by its default policy, the peers get them all in the
   prompt.

Only one server runs at a time. What is finished is kept in ``--work``, and the same command goes on from there.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from rich.console import Console

from engine.model_store import resolve_model
from eval.benches.peers_servers import CONTEXT, OURS, MemoryWatch, Peer, make_peers
from eval.benches.peers_workload import (
    NUM_CORPORA,
    PeerTrace,
    TraceRequest,
    figures,
    load_request,
    make_corpora,
    make_trace,
    read_peer_trace,
    write_peer_trace,
)
from eval.datasets import Dataset, read_dataset
from eval.errors import EvalError
from eval.gateway import DEMO_KEYS, GatewayClient
from eval.launcher import started_gateway
from eval.load import run_load, warm_up_requests
from eval.load_records import DEFINITIONS, RequestRecord
from eval.load_summary import summarise_bucket
from eval.manifest import DataFile, Manifest, make_manifest
from eval.page_blocks import update
from eval.peers_page import MARKS, print_peers, result_table
from eval.peers_records import PeerArm, PeersReport
from eval.peers_summary import compare_servers, requirements
from eval.prompts import bypassing
from eval.records import encode_report
from eval.streaming_client import StreamingClient

MODEL = "smollm2-135m-instruct"
NUM_WARM_UP = 2
REQUEST_TIMEOUT_S = 240.0
MIN_REQUESTS = 12
_DRAIN_S = 15.0
"""What a pass takes after its last arrival, about."""


class StageRun(msgspec.Struct, frozen=True, kw_only=True):
    """One server once: started, measured, ended."""

    server: str
    stage: str
    identity: dict[str, Any]
    """What it depends on; a kept one of another identity is measured anew."""
    version: str = ""
    start_s: float = 0.0
    peak_memory_mib: float = 0.0
    records: list[RequestRecord] = []
    error: str | None = None
    """Why there are no records."""


@dataclass(slots=True)
class Bench:
    """Runs the stages, each once."""

    console: Console
    trace: PeerTrace
    trace_sha256: str
    work: Path
    fresh: bool = False
    runs: dict[tuple[str, str], StageRun] = field(default_factory=dict)

    def stage(self, peer: Peer, stage: str, requests: Sequence[TraceRequest], rate: float) -> StageRun:
        """Measures one server; ``rate`` 0 sends one request after the other. Taken from the folder where it is done."""
        identity = {
            "trace": self.trace_sha256,
            "num_requests": len(requests),
            "rate": rate,
            "settings": peer.settings,
            "command": [Path(part).name for part in peer.command(0)],
        }
        slug = peer.name.lower().replace(" ", "-")
        file = self.work / f"{stage}-{slug}.json"
        if not self.fresh and (kept := _kept(file, identity)) is not None:
            self.console.print(f"{stage}, {peer.name}: taken from {file.name}", style="dim")
        else:
            with self.console.status(f"{stage}: {peer.name}, {len(requests)} requests"):
                kept = self._measure(peer, stage, requests, rate, identity)
            file.write_bytes(encode_report(kept))
        self.runs[peer.name, stage] = kept
        self.console.print(_line(kept), highlight=False)
        return kept

    def _measure(
        self, peer: Peer, stage: str, requests: Sequence[TraceRequest], rate: float, identity: dict[str, Any]
    ) -> StageRun:
        sent = [load_request(item, knows_documents=peer.name == OURS, model=peer.model, rate=rate) for item in requests]
        started = time.perf_counter()
        try:
            with MemoryWatch() as memory, peer.started() as url:
                start_s = time.perf_counter() - started
                records = asyncio.run(_send(url, peer, sent, at_once=rate == 0.0))
        except EvalError as error:
            return StageRun(server=peer.name, stage=stage, identity=identity, error=str(error))
        return StageRun(
            server=peer.name,
            stage=stage,
            identity=identity,
            version=peer.version(),
            start_s=start_s,
            peak_memory_mib=memory.peak_mib,
            records=records,
        )


async def _send(url: str, peer: Peer, sent: Sequence[Any], *, at_once: bool) -> list[RequestRecord]:
    client = StreamingClient(url, peer.api_key, timeout_s=REQUEST_TIMEOUT_S)
    try:
        for request in warm_up_requests(sent, NUM_WARM_UP):
            await run_load(client, [request])
        if not at_once:
            return (await run_load(client, sent)).records
        return [record for request in sent for record in (await run_load(client, [request])).records]
    finally:
        await client.aclose()


def _kept(file: Path, identity: dict[str, Any]) -> StageRun | None:
    try:
        run = msgspec.json.decode(file.read_bytes(), type=StageRun)
    except (OSError, msgspec.MsgspecError):
        return None
    return run if run.identity == identity and run.error is None else None


def _line(run: StageRun) -> str:
    if run.error is not None:
        return f"{run.stage}, {run.server}: not measured, {run.error.splitlines()[0]}"
    overall = summarise_bucket("all", run.records)
    times = "no answer" if overall.ttft_ms is None else f"{overall.ttft_ms.p50:,.0f} / {overall.ttft_ms.p95:,.0f} ms"
    return (
        f"{run.stage}, {run.server}: TTFT P50 / P95 {times}, {overall.completed} of {overall.num_requests} answered, "
        f"contains {overall.contains or 0.0:.2f}, ready after {run.start_s:.0f} s, {run.peak_memory_mib:,.0f} MiB"
    )


def write_trace(path: Path, redundant: Dataset, questions: Dataset, options: "Options") -> None:
    """Draws the workload and has our own gateway render it with nothing reduced."""
    corpora = make_corpora(redundant, questions, num_corpora=NUM_CORPORA, seed=options.seed)
    with started_gateway(example=True) as url, GatewayClient(url=url, api_key=DEMO_KEYS[0]) as client:

        def render(request: Any) -> tuple[list[dict[str, Any]], int]:
            compaction = client.compact(bypassing(request))
            return compaction.messages, compaction.prompt_tokens

        trace = make_trace(
            corpora,
            render,
            num_requests=options.max_requests,
            num_warm_up=options.num_alone,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
    longest = max(item.prompt_tokens for item in (*trace.requests, *trace.warm_up))
    if longest + options.max_tokens > CONTEXT:
        raise EvalError(f"a prompt of {longest} tokens and {options.max_tokens} more do not fit into {CONTEXT}")
    write_peer_trace(path, trace)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the bench."""

    max_requests: int = 60
    num_alone: int = 6
    max_tokens: int = 24
    utilisation: float = 0.9
    rate: float | None = None
    minutes: float = 33.0
    seed: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from the servers' times without load."""

    rate: float
    utilisation: float
    num_requests: int


class KeptPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with what it depends on; another one makes it anew."""

    plan: Plan
    made_for: list[Any]


def make_plan(alone: Sequence[StageRun], options: Options, elapsed_s: float) -> Plan:
    """The common rate, and as many requests as the time left allows. Raises EvalError where no server answered."""
    means = [
        float(np.mean([record.e2el_ms for record in run.records if record.status == "ok"])) / 1000
        for run in alone
        if any(record.status == "ok" for record in run.records)
    ]
    if not means:
        raise EvalError("no server answered a request")
    rate = options.rate or round(options.utilisation / max(means), 3)
    left_s = options.minutes * 60 - elapsed_s - 2 * sum(run.start_s for run in alone)
    a_pass_s = left_s / (2 * len(means)) - _DRAIN_S
    num_requests = int(min(options.max_requests, max(MIN_REQUESTS, a_pass_s * rate)))
    return Plan(rate=rate, utilisation=rate * max(means), num_requests=num_requests)


def run_bench(bench: Bench, peers: Sequence[Peer], options: Options, begun: float) -> tuple[Plan, list[list[str]]]:
    """All stages."""
    ready = [peer for peer in peers if peer.missing is None]
    alone = [bench.stage(peer, "alone", bench.trace.warm_up, 0.0) for peer in ready]
    ready = [peer for peer, run in zip(ready, alone, strict=True) if run.error is None]
    plan_file = bench.work / "plan.json"
    made_for = [msgspec.to_builtins(options), [run.identity for run in alone]]
    try:
        kept = msgspec.json.decode(plan_file.read_bytes(), type=KeptPlan)
    except (OSError, msgspec.MsgspecError):
        kept = None
    if kept is not None and kept.made_for == made_for:
        plan = kept.plan
    else:
        plan = make_plan([run for run in alone if run.error is None], options, time.monotonic() - begun)
        plan_file.write_bytes(msgspec.json.encode(KeptPlan(plan=plan, made_for=made_for)))
    bench.console.print(
        f"{plan.num_requests} requests a pass at {plan.rate:.3f} a second: {plan.utilisation:.0%} of what the slowest "
        "server can do",
        highlight=False,
    )
    order = [ready, ready[::-1]]
    for place, servers in enumerate(order, start=1):
        for peer in servers:
            bench.stage(peer, f"pass{place}", bench.trace.requests[: plan.num_requests], plan.rate)
    return plan, [[peer.name for peer in servers] for servers in order]


def make_arm(peer: Peer, runs: Sequence[StageRun]) -> PeerArm:
    """One server's summary; ``runs`` are its stages, the one without load first."""
    failed = [run.error for run in runs if run.error is not None]
    if peer.missing is not None or failed or not runs:
        reason = peer.missing or next(iter(failed), "it was not run")
        return PeerArm(name=peer.name, version="", settings=peer.settings, missing=_last_line(reason))
    passes = [run.records for run in runs[1:]]
    return PeerArm(
        name=peer.name,
        version=runs[0].version,
        settings=peer.settings,
        start_s=float(np.median([run.start_s for run in runs])),
        peak_memory_mib=max(run.peak_memory_mib for run in runs),
        low=summarise_bucket("alone", runs[0].records),
        passes=[summarise_bucket(f"pass {place}", records) for place, records in enumerate(passes, start=1)],
        both=summarise_bucket("both passes", [record for records in passes for record in records]),
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]} {lines[-1]}"


def peers_manifest(dataset: Dataset, options: Options) -> Manifest:
    """What the run is made with; taken before it, for the checkout may change meanwhile."""
    return make_manifest(
        dataset=dataset,
        settings={**msgspec.to_builtins(options), "data": "nq-redundant with the questions of nq"},
        seed=options.seed,
        model=MODEL,
        max_model_len=CONTEXT,
        started_gateway=True,
    )


def make_report(
    bench: Bench,
    peers: Sequence[Peer],
    plan: Plan,
    order: list[list[str]],
    datasets: Sequence[Dataset],
    options: Options,
    manifest: Manifest,
) -> PeersReport:
    """The whole result."""
    stages = ("alone", "pass1", "pass2")
    runs = {
        peer.name: [bench.runs[peer.name, stage] for stage in stages if (peer.name, stage) in bench.runs]
        for peer in peers
    }
    arms = [make_arm(peer, runs[peer.name]) for peer in peers]
    measured = [arm.name for arm in arms if arm.missing is None]
    requests = bench.trace.requests[: plan.num_requests]
    questions = {item.id: item.case.id for item in requests}
    passes: Callable[[str], list[list[RequestRecord]]] = lambda name: [run.records for run in runs[name][1:]]  # noqa: E731
    comparisons = [
        compare_servers(
            name,
            passes(OURS),
            passes(name),
            (runs[OURS][0].records, runs[name][0].records),
            questions,
            seed=options.seed,
        )
        for name in measured
        if name != OURS and OURS in measured
    ]
    num_failed = sum(record.status != "ok" for records in passes(OURS) for record in records)
    return PeersReport(
        manifest=manifest,
        data_files=[
            DataFile(
                name=dataset.name,
                sha256=dataset.sha256,
                num_cases=len(dataset.cases),
                num_cases_in_file=dataset.num_cases_in_file,
            )
            for dataset in datasets
        ],
        trace_sha256=bench.trace_sha256,
        workload=dict(figures(requests)),
        rate=plan.rate,
        utilisation=plan.utilisation,
        order=order,
        definitions={name: DEFINITIONS[name] for name in ("ttft", "hit_rate", "status")},
        arms=arms,
        comparisons=comparisons,
        requirements=requirements(comparisons, num_failed),
    )


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--peers", "folder", type=click.Path(path_type=Path), default=Path(".venv/peers"), show_default=True)
@click.option(
    "--work", type=click.Path(file_okay=False, path_type=Path), default=Path("build/peers"), show_default=True
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the result as JSON.")
@click.option("--page", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Put the table there.")
@click.option("--only", multiple=True, help="Servers by name; all by default.")
@click.option("--requests", "max_requests", type=click.IntRange(min=MIN_REQUESTS), default=60, show_default=True)
@click.option("--alone", "num_alone", type=click.IntRange(min=2), default=6, show_default=True, help="Without load.")
@click.option("--utilisation", type=click.FloatRange(0.05, 1.5), default=0.9, show_default=True)
@click.option("--rate", type=click.FloatRange(min=0.01), help="Requests a second, instead of by utilisation.")
@click.option("--minutes", type=click.FloatRange(min=1), default=33.0, show_default=True, help="Of the whole bench.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=24, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--fresh", is_flag=True, help="Measure everything anew.")
def main(
    data: Path,
    folder: Path,
    work: Path,
    output: Path | None,
    page: Path | None,
    only: tuple[str, ...],
    fresh: bool,
    **given: Any,
) -> None:
    """Compare firsttoken with other servers; exit status 1 where it does not show what it has to."""
    console, begun = Console(width=160), time.monotonic()
    options = Options(**given)
    work.mkdir(parents=True, exist_ok=True)
    peers = [peer for peer in make_peers(folder.resolve(), resolve_model(MODEL)) if not only or peer.name in only]
    try:
        datasets = [read_dataset(data / "nq-redundant.jsonl.gz"), read_dataset(data / "nq.jsonl.gz")]
        manifest = peers_manifest(datasets[0], options)
        trace_file = work / "trace.json.gz"
        if fresh:
            for file in work.glob("*.json*"):
                file.unlink()
        if not trace_file.is_file():
            with console.status("writing the trace"):
                write_trace(trace_file, datasets[0], datasets[1], options)
        bench = Bench(console, *read_peer_trace(trace_file), work)
        plan, order = run_bench(bench, peers, options, begun)
        report = make_report(bench, peers, plan, order, datasets, options, manifest)
    except (EvalError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    print_peers(console, report)
    if output is not None:
        output.write_bytes(encode_report(report))
    if page is not None:
        update(page, MARKS, result_table(report))
    console.print(f"{(time.monotonic() - begun) / 60:.1f} minutes", highlight=False)
    if not all(item.is_met for item in report.requirements):
        sys.exit(1)


if __name__ == "__main__":
    main()
