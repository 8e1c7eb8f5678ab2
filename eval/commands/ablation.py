"""``firsttoken eval ablation``: what one change of the configuration does, and nothing else."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.ablation import AblationReport, AblationRun, make_ablation_report
from eval.arrivals import burst_arrivals, poisson_arrivals
from eval.commands.load import LoadPlan, measure, parse_burst
from eval.commands.recall import check_folder
from eval.datasets import read_dataset
from eval.errors import EvalError
from eval.experiments import READY_MADE, AblationArm, Experiment, parse_experiment
from eval.gateway import DEMO_KEYS
from eval.launcher import started_gateway
from eval.load import LoadRun
from eval.load_records import Distribution
from eval.load_report import contains_cell
from eval.manifest import make_machine_manifest
from eval.progress import progress_bar
from eval.readers import FORMATS
from eval.records import encode_report
from eval.report import NOTHING, milliseconds, percent
from eval.workload import RequestOptions

_SHOWN = ("ttft_ms", "tpot_ms", "e2el_ms")


def parse_vary(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> Experiment:
    """The experiment of ``--vary``."""
    try:
        return parse_experiment(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command("ablation")
@click.option(
    "--vary",
    "experiment",
    multiple=True,
    callback=parse_vary,
    required=True,
    metavar="VARIABLE[=VALUES]",
    help=f"One of {', '.join(READY_MADE)}, or a key of the configuration; the first value is the baseline.",
)
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="Cases to send.")
@click.option("--format", type=click.Choice(("auto", "cases", *FORMATS)), default="auto", show_default=True)
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N cases only; requests repeat them.")
@click.option("--num-requests", type=click.IntRange(min=1), default=20, show_default=True, help="Of a turn.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Per second.")
@click.option("--bursts", callback=parse_burst, metavar="SIZE:SECONDS", help="Arrivals in bursts instead.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--bypass", is_flag=True, help="Reduce nothing: for variables of the engine.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="What all arms share.")
@click.option("--api-key", help="Key of a tenant of that configuration.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
def ablation(
    experiment: Experiment,
    data: Path,
    format: str,
    limit: int | None,
    num_requests: int,
    rate: float,
    bursts: tuple[int, float] | None,
    rounds: int,
    max_tokens: int,
    bypass: bool,
    seed: int,
    config: Path | None,
    api_key: str | None,
    output: Path | None,
) -> None:
    """One variable at a time: arms in random order, each on a gateway, a salt and a cold cache of its own.

    An arm identical with the baseline is added; if the two do not tie, the exit status is 1, as it is if requests fail.
    """
    console = Console()
    if (config is None) != (api_key is None):
        raise click.UsageError("--config and --api-key belong together: a key must be one of the configuration's")
    try:
        check_folder("--output", output)
        dataset = read_dataset(data, limit=limit, format=format)
    except EvalError as error:
        raise click.UsageError(str(error)) from None
    arrivals = (
        poisson_arrivals(rate, num_requests, seed=seed) if bursts is None else burst_arrivals(*bursts, num_requests)
    )
    plan = LoadPlan(RequestOptions(max_tokens=max_tokens, bypass=bypass), dataset, None, arrivals, seed)
    quiet = Console(quiet=True)

    @contextmanager
    def start(arm: AblationArm, salt: str) -> Iterator[str]:
        settings = {"FIRSTTOKEN__SERVER__SALT_SECRET": salt}
        if arm.setting is not None:
            settings |= arm.setting.environment()
        with started_gateway(config=config, example=config is None, settings=settings) as url:
            yield url

    def send(url: str) -> LoadRun:
        return asyncio.run(measure(quiet, plan, url, api_key or DEMO_KEYS[0]))

    whole = experiment.with_twin()
    try:
        with progress_bar(console, rounds * len(whole.arms)) as progress:
            turns = AblationRun(whole, start, send, progress, num_rounds=rounds, seed=seed).turns()
    except EvalError as error:
        raise click.ClickException(str(error)) from None
    settings = {
        "vary": experiment.variable, "num_requests": num_requests, "rate": rate if bursts is None else None,
        "bursts": bursts, "max_tokens": max_tokens, "bypass": bypass, "rounds": rounds,
    }  # fmt: skip
    manifest = make_machine_manifest(settings=settings, seed=seed)
    report = make_ablation_report(whole, turns, manifest, data=plan.data, seed=seed)
    print_ablation(console, report)
    if output is not None:
        output.write_bytes(encode_report(report))
        console.print(f"written: {output}", highlight=False)
    if not report.is_believable or report.num_failed:
        sys.exit(1)


def print_ablation(console: Console, report: AblationReport) -> None:
    """The arms side by side, and whether they can be believed."""
    title = f"{report.variable}: {report.num_rounds} rounds, against {report.baseline}"
    table = Table(title=title, title_justify="left")
    for heading in ("arm", "completed", "TTFT ms P50", "TPOT ms P50"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for name in _SHOWN:
        table.add_column(f"{name.removesuffix('_ms').upper()} ratio", justify="right")
    rest = Table(title="Prompts, answers, cache", title_justify="left")
    for heading in ("arm", "prompt tokens ratio", "contains", "hit rate", "KV most"):
        rest.add_column(heading, justify="left" if heading == "arm" else "right")
    for arm in report.arms:
        ratios = {ratio.metric: f"{ratio.ratio:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" for ratio in arm.ratios}
        table.add_row(
            arm.name,
            f"{arm.overall.completed} of {arm.overall.num_requests}",
            _median(arm.overall.ttft_ms),
            _median(arm.overall.tpot_ms),
            *(ratios.get(name, NOTHING) for name in _SHOWN),
        )
        rest.add_row(
            arm.name,
            ratios.get("prompt_tokens", NOTHING),
            contains_cell(arm.overall),
            percent(arm.overall.hit_rate),
            percent(arm.kv_usage_max),
        )
    console.print(table)
    console.print(rest)
    console.print(
        "Ratios are geometric means over the same requests in the same rounds, with 95 % intervals; 1 is the baseline.",
        style="dim",
    )
    if report.is_believable:
        console.print("self-check: the identical arm ties with the baseline", style="green")
    for problem in report.self_check:
        console.print(Text(f"self-check failed, do not believe this run: the identical arm's {problem}", "bold red"))


def _median(found: Distribution | None) -> str:
    return NOTHING if found is None else milliseconds(found.p50)
