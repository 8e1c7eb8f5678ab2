"""Command line of the evaluation; the gateway's command line mounts it as ``firsttoken eval``."""

import gzip
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import msgspec
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

from eval.datasets import Dataset, read_dataset
from eval.errors import EvalError
from eval.gateway import DEMO_KEYS, GatewayClient
from eval.launcher import started_gateway
from eval.manifest import make_manifest
from eval.prompts import HISTORY_SYSTEM_PROMPT, SYSTEM_PROMPT
from eval.recall import RecallOptions, RecallRun, can_be_answered
from eval.records import CaseRecord, RecallReport, encode_cases, encode_report
from eval.report import print_recall
from eval.summary import make_report


@click.group("eval")
def eval_group() -> None:
    """Measure what a reduction does to answers."""


def _parse_budgets(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        budgets = tuple(float(part) for part in value.split(",") if part.strip())
        RecallOptions(budgets=budgets)
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: {error}") from None
    return budgets


@eval_group.command("recall")
@click.option(
    "--data", type=click.Path(path_type=Path), required=True, help="Cases, one JSON object a line, may be gzip."
)
@click.option(
    "--budget",
    "budgets",
    default="",
    callback=_parse_budgets,
    metavar="SHARES",
    help="Shares of the passages' tokens to keep, e.g. 0.1,0.25.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N cases only.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
@click.option("--answers", is_flag=True, help="Also generate from full and reduced prompts and compare the answers.")
@click.option("--url", help="A running gateway; without it one is started for the run.")
@click.option("--api-key", help="Key of the tenant; without it the example configuration and its keys are used.")
@click.option("--policy", help="Policy of the reduction.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of intervals and of the order of arms.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Of a generated answer.")
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Configuration of the started gateway.",
)
def recall(
    data: Path,
    budgets: tuple[float, ...],
    limit: int | None,
    output: Path | None,
    answers: bool,
    url: str | None,
    api_key: str | None,
    policy: str | None,
    seed: int,
    max_tokens: int,
    config: Path | None,
) -> None:
    """Recall of answers and evidence in reduced prompts, by budget.

    Exit status: 1 if a request failed, 2 for wrong usage or data.
    """
    console = Console()
    if url is not None and config is not None:
        raise click.UsageError("--config is for the gateway that is started here; it has no effect with --url")
    options = RecallOptions(budgets=budgets, policy=policy, answers=answers, max_tokens=max_tokens, seed=seed)
    try:
        dataset = read_dataset(data, limit=limit)
        _check_answerable(dataset, options)
        _check_writable(output)
    except EvalError as error:
        raise click.UsageError(str(error)) from None
    try:
        report, records = _run(console, dataset, options, url=url, api_key=api_key, config=config)
    except EvalError as error:
        raise click.ClickException(str(error)) from None
    print_recall(console, report)
    if output is not None:
        for written in _write(output, report, records):
            console.print(f"written: {written}", highlight=False)
    if report.num_errors:
        sys.exit(1)


def _check_answerable(dataset: Dataset, options: RecallOptions) -> None:
    if options.answers and not all(can_be_answered(case) for case in dataset.cases):
        first = next(case.id for case in dataset.cases if not can_be_answered(case))
        raise EvalError(f"--answers needs short accepted answers, {dataset.name} has none for case {first!r}")


def _check_writable(output: Path | None) -> None:
    if output is not None and not output.parent.is_dir():
        raise EvalError(f"--output: the folder {output.parent} does not exist")


def _run(
    console: Console,
    dataset: Dataset,
    options: RecallOptions,
    *,
    url: str | None,
    api_key: str | None,
    config: Path | None,
) -> tuple[RecallReport, list[CaseRecord]]:
    started = url is None
    with ExitStack() as stack:
        if url is None:
            with console.status("starting the gateway"):
                url = stack.enter_context(started_gateway(config=config, example=api_key is None))
        key = api_key or DEMO_KEYS[0]
        client = stack.enter_context(GatewayClient(url=url, api_key=key))
        # Another tenant has a prefix cache of its own: full and reduced prompts of one case cannot warm each other.
        full_client = client
        if api_key is None:
            full_client = stack.enter_context(GatewayClient(url=url, api_key=DEMO_KEYS[1]))
        served = client.models()[0]
        with _progress(console, len(dataset.cases)) as progress:
            run = RecallRun(client, full_client, dataset, options, progress)
            run.warm_up()
            records = list(run.cases())
    manifest = make_manifest(
        dataset=dataset,
        settings={
            "budgets": list(options.budgets),
            "policy": options.policy,
            "answers": options.answers,
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "system_prompt": SYSTEM_PROMPT,
            "history_system_prompt": HISTORY_SYSTEM_PROMPT,
        },
        seed=options.seed,
        model=served.id,
        max_model_len=served.max_model_len,
        started_gateway=started,
        config=config,
    )
    return make_report(manifest, dataset, records, options), records


class _Bar:
    """Shows which case is at what."""

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
def _progress(console: Console, num_cases: int) -> Iterator[_Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, progress.add_task("", total=num_cases))


def _write(output: Path, report: RecallReport, records: list[CaseRecord]) -> list[Path]:
    """The report, and beside it what was measured and scored case by case."""
    cases_file = output.with_name(f"{output.name.removesuffix('.json')}.cases.jsonl.gz")
    report = msgspec.structs.replace(report, cases_file=cases_file.name)
    output.write_bytes(encode_report(report))
    cases_file.write_bytes(gzip.compress(encode_cases(records), mtime=0))
    return [output, cases_file]
