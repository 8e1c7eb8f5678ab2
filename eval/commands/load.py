"""``firsttoken eval load``: open-loop load over HTTP against firsttoken or any OpenAI-compatible server."""

import asyncio
import gzip
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from eval.arrivals import burst_arrivals, poisson_arrivals, trace_arrivals
from eval.commands.recall import check_folder
from eval.datasets import Dataset, read_dataset
from eval.errors import EvalError
from eval.exports import aiperf_document, guidellm_document
from eval.gateway import DEMO_KEYS
from eval.launcher import started_gateway
from eval.load import LoadRun, run_load, warm_up_requests
from eval.load_records import LoadReport, encode_requests, vllm_fields
from eval.load_report import print_load
from eval.load_summary import make_load_report, parse_objectives
from eval.manifest import DataFile, make_machine_manifest
from eval.progress import progress_bar
from eval.readers import FORMATS
from eval.records import encode_report
from eval.streaming_client import StreamingClient, tokens_per_word
from eval.traces import Trace, TraceLine, read_trace
from eval.workload import LoadRequest, RequestOptions, case_requests, trace_requests, trace_text

NUM_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is sent and when."""

    options: RequestOptions
    dataset: Dataset | None
    trace: Trace | None
    arrivals: Sequence[float]
    seed: int

    @property
    def data(self) -> DataFile:
        """The file that the requests are made of."""
        if self.dataset is not None:
            return DataFile(
                name=self.dataset.name,
                sha256=self.dataset.sha256,
                num_cases=len(self.dataset.cases),
                num_cases_in_file=self.dataset.num_cases_in_file,
            )
        assert self.trace is not None, "a plan has cases or a trace"
        num_lines = len(self.trace.lines)
        return DataFile(
            name=self.trace.name, sha256=self.trace.sha256, num_cases=num_lines, num_cases_in_file=num_lines
        )


def parse_burst(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, float] | None:
    """``16:10``: sixteen requests every ten seconds."""
    if value is None:
        return None
    size, _, period = value.partition(":")
    try:
        burst = int(size), float(period)
        burst_arrivals(*burst, 1)
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: {error}") from None
    return burst


def parse_goodput(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, float]:
    """The objectives of ``--goodput``."""
    try:
        return parse_objectives(part for text in value for part in text.replace(",", " ").split())
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command("load")
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="Cases that the requests are made of.")
@click.option("--format", type=click.Choice(("auto", "cases", *FORMATS)), default="auto", show_default=True)
@click.option("--trace", "trace_file", type=click.Path(path_type=Path, exists=True), help="Trace to replay.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Per second.")
@click.option(
    "--burstiness",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="1 is Poisson, less is burstier.",
)
@click.option("--bursts", callback=parse_burst, metavar="SIZE:SECONDS", help="So many at once, every so many seconds.")
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Of a trace's arrivals; 0.5 is twice as fast.",
)
@click.option(
    "--num-requests", type=click.IntRange(min=1), default=100, show_default=True, help="Of a trace, the first ones."
)
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N cases only; requests repeat them.")
@click.option("--max-input-tokens", type=click.IntRange(min=1), help="Leave out longer requests of the trace.")
@click.option("--url", help="A running server; without it a gateway is started.")
@click.option("--api-key", help="Key for it; the demo key by default.")
@click.option("--target", type=click.Choice(("firsttoken", "openai")), default="firsttoken", show_default=True)
@click.option("--model", default="default", show_default=True)
@click.option("--policy", help="Policy of the reduction.")
@click.option("--bypass", is_flag=True, help="firsttoken reduces nothing.")
@click.option("--system-prompt", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="File with it.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--goodput", "objectives", multiple=True, callback=parse_goodput, metavar="ttft:MS tpot:MS e2el:MS")
@click.option("--timeout-s", type=click.FloatRange(min=1), default=600.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--name", default="load", show_default=True, help="Of this run in reports.")
@click.option("--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Of the started gateway.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
@click.option(
    "--max-failed", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Share; more is status 1."
)
def load(
    data: Path | None,
    format: str,
    trace_file: Path | None,
    rate: float,
    burstiness: float,
    bursts: tuple[int, float] | None,
    time_scale: float,
    num_requests: int,
    limit: int | None,
    max_input_tokens: int | None,
    url: str | None,
    api_key: str | None,
    target: str,
    model: str,
    policy: str | None,
    bypass: bool,
    system_prompt: Path | None,
    max_tokens: int,
    objectives: dict[str, float],
    timeout_s: float,
    seed: int,
    name: str,
    config: Path | None,
    output: Path | None,
    max_failed: float,
) -> None:
    """Latency, throughput, hits and answers under open-loop load.

    Requests come from --data (arrivals by --rate or --bursts) or from --trace (its own arrivals). Exit status: 1 if
    more requests failed or were refused than --max-failed allows, 2 for wrong usage or data.
    """
    console = Console()
    if (data is None) == (trace_file is None):
        raise click.UsageError("exactly one of --data and --trace is needed")
    options = RequestOptions(
        model=model,
        target="openai" if target == "openai" else "firsttoken",
        max_tokens=max_tokens,
        policy=policy,
        bypass=bypass,
        system_prompt=None if system_prompt is None else system_prompt.read_text(encoding="utf-8"),
    )
    try:
        check_folder("--output", output)
        if data is not None:
            dataset, trace = read_dataset(data, limit=limit, format=format), None
            arrivals: Sequence[float] = (
                poisson_arrivals(rate, num_requests, seed=seed, burstiness=burstiness)
                if bursts is None
                else burst_arrivals(*bursts, num_requests)
            )
        else:
            assert trace_file is not None, "checked above"
            dataset, trace = None, _shortened(read_trace(trace_file), max_input_tokens, num_requests)
            arrivals = trace_arrivals(trace.lines, time_scale)
    except EvalError as error:
        raise click.UsageError(str(error)) from None
    plan = LoadPlan(options, dataset, trace, arrivals, seed)
    with ExitStack() as stack:
        try:
            if url is None:
                with console.status("starting the gateway"):
                    url = stack.enter_context(started_gateway(config=config, example=api_key is None))
            key = api_key or (DEMO_KEYS[0] if target == "firsttoken" else "")
            run = asyncio.run(measure(console, plan, url, key, timeout_s))
        except (EvalError, ValueError) as error:
            raise click.ClickException(str(error)) from None
    settings = {
        "target": target, "model": model, "policy": policy, "bypass": bypass, "max_tokens": max_tokens,
        "arrivals": _arrivals_name(plan, rate, burstiness, bursts, time_scale), "num_requests": len(arrivals),
    }  # fmt: skip
    manifest = make_machine_manifest(settings=settings, seed=seed)
    report = make_load_report(name, run, manifest, data=plan.data, objectives=objectives)
    print_load(console, report)
    if output is not None:
        for written in write_load(output, report, run):
            console.print(f"written: {written}", highlight=False)
    if report.failed > max_failed * len(run.records):
        sys.exit(1)


def _shortened(trace: Trace, max_input_tokens: int | None, num_requests: int) -> Trace:
    lines = [line for line in trace.lines if max_input_tokens is None or line.input_tokens <= max_input_tokens]
    if not lines:
        raise EvalError(f"{trace.name}: no request has at most {max_input_tokens} tokens")
    return Trace(trace.name, trace.sha256, lines[:num_requests])


def _arrivals_name(
    plan: LoadPlan, rate: float, burstiness: float, bursts: tuple[int, float] | None, time_scale: float
) -> dict[str, Any]:
    if plan.trace is not None:
        return {"kind": "trace", "time_scale": time_scale}
    if bursts is not None:
        return {"kind": "bursts", "size": bursts[0], "period_s": bursts[1]}
    return {"kind": "poisson" if burstiness == 1.0 else "gamma", "rate": rate, "burstiness": burstiness}


async def measure(console: Console, plan: LoadPlan, url: str, api_key: str, timeout_s: float = 600.0) -> LoadRun:
    """Warms the server up, then runs the plan. Raises ``ValueError`` if a trace cannot be calibrated."""
    client = StreamingClient(url, api_key, timeout_s=timeout_s)
    try:
        requests = await plan_requests(plan, client)
        for request in warm_up_requests(requests, NUM_WARM_UP):
            await run_load(client, [request])
        with progress_bar(console, len(requests)) as progress:
            progress.step("requests done")
            return await run_load(client, requests, on_done=lambda record: progress.case_done())
    finally:
        await client.aclose()


async def plan_requests(plan: LoadPlan, client: StreamingClient) -> list[LoadRequest]:
    """The requests of a plan; a trace's are written in words whose tokens the server is asked for first."""
    if plan.dataset is not None:
        return case_requests(plan.dataset.cases, plan.arrivals, plan.options, seed=plan.seed)
    assert plan.trace is not None, "a plan has cases or a trace"
    sample = trace_requests(plan.trace.lines[:1], [0.0], plan.options, tokens_per_word=1.0, seed=plan.seed)[0]
    short, long = (
        trace_text(TraceLine(t=0.0, input_tokens=size, output_tokens=1), tokens_per_word=1.0, unique=f"words/{size}")
        for size in (16, 144)
    )
    ratio = await tokens_per_word(client, sample.body, (short, long))
    return trace_requests(plan.trace.lines, plan.arrivals, plan.options, tokens_per_word=ratio, seed=plan.seed)


def write_load(output: Path, report: LoadReport, run: LoadRun) -> list[Path]:
    """The report with the flat names of vLLM, the records beside it, and the documents of guidellm and aiperf."""
    stem = output.name.removesuffix(".json")
    requests_file = output.with_name(f"{stem}.requests.jsonl.gz")
    report = msgspec.structs.replace(report, requests_file=requests_file.name)
    whole = msgspec.to_builtins(report) | vllm_fields(report)
    output.write_bytes(encode_report(whole))
    requests_file.write_bytes(gzip.compress(encode_requests(run.records), mtime=0))
    written = [output, requests_file]
    for suffix, document in (("guidellm", guidellm_document), ("aiperf", aiperf_document)):
        file = output.with_name(f"{stem}.{suffix}.json")
        file.write_bytes(encode_report(document(report, run.records)))
        written.append(file)
    return written
