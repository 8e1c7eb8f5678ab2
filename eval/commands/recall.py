"""``firsttoken eval recall``: what a reduction does to answers and evidence, by budget, policy and baseline."""

import gzip
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from eval.arms import FULL, reduced_arms
from eval.datasets import Dataset, read_dataset
from eval.errors import EvalError
from eval.gate import Reference, Threshold, has_failed, judge_arm, parse_threshold
from eval.gateway import DEMO_KEYS, GatewayClient
from eval.generation_cache import GenerationCache
from eval.journal import Journal
from eval.judge import Judge
from eval.launcher import started_gateway
from eval.manifest import Manifest, make_manifest
from eval.progress import progress_bar
from eval.prompts import CITING_SYSTEM_PROMPT, HISTORY_SYSTEM_PROMPT, SYSTEM_PROMPT
from eval.readers import FORMATS
from eval.readers.base import NUM_CHUNKS
from eval.recall import RecallOptions, RecallRun, can_be_answered
from eval.records import CaseRecord, GateVerdict, RecallReport, encode_cases, encode_report
from eval.report import print_recall
from eval.selectors import COMPRESSORS, NAMES, SelectorFactory, Selectors
from eval.summary import make_report


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything the command was asked for beside the cases."""

    options: RecallOptions
    selectors: Selectors
    url: str | None
    api_key: str | None
    config: Path | None
    output: Path | None
    cache: Path | None
    fresh: bool
    judge: Judge | None


def _parse_budgets(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        budgets = tuple(float(part) for part in value.split(",") if part.strip())
        RecallOptions(budgets=budgets)
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: {error}") from None
    return budgets


def _parse_pythons(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for text in value:
        name, equals, file = text.partition("=")
        if name not in COMPRESSORS or not equals or not Path(file).is_file():
            raise click.BadParameter(f"{text!r} is not one of {', '.join(COMPRESSORS)}, '=', and a file that exists")
        found[name] = Path(file)
    return found


def parse_gate(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[Threshold, ...]:
    """The thresholds of ``--gate``."""
    try:
        return tuple(parse_threshold(part) for text in value for part in text.split(",") if part.strip())
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command("recall")
@click.option(
    "--data", type=click.Path(path_type=Path), required=True, help="Cases, one JSON object a line, may be gzip."
)
@click.option(
    "--format",
    type=click.Choice(("auto", "cases", *FORMATS)),
    default="auto",
    show_default=True,
    help="Format of the data; auto looks at its fields.",
)
@click.option("--corpus", type=click.Path(path_type=Path, exists=True), help="Knowledge source of a KILT set.")
@click.option(
    "--num-chunks",
    type=click.IntRange(min=1),
    default=NUM_CHUNKS,
    show_default=True,
    help="Passages of a case where a public format brings fewer.",
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
@click.option("--citations", is_flag=True, help="Ask the model to cite documents, and check what it cites.")
@click.option("--url", help="A running gateway; without it one is started for the run.")
@click.option("--api-key", help="Key of the tenant; without it the example configuration and its keys are used.")
@click.option("--policy", "policies", multiple=True, help="Policy of the reduction; several are compared.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    type=click.Choice((*NAMES, "all")),
    help="Named baselines to compare with.",
)
@click.option("--encoder", help="Model of the baseline embedding; by default the one that the gateway uses.")
@click.option("--compressor-model", help="Language model of the baseline longllmlingua.")
@click.option(
    "--baseline-python",
    "pythons",
    multiple=True,
    callback=_parse_pythons,
    metavar="NAME=FILE",
    help="Python of the environment that holds the package of longllmlingua or headroom.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of intervals and of the order of arms.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Of a generated answer.")
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Configuration of the started gateway.",
)
@click.option("--cache", type=click.Path(path_type=Path, dir_okay=False), help="File of generations to take and keep.")
@click.option("--fresh", is_flag=True, help="Begin anew where an earlier run with this output was ended.")
@click.option("--judge-url", help="OpenAI-compatible server of a judge model.")
@click.option("--judge-model", default="default", show_default=True)
@click.option("--judge-key", default="", help="API key of the judge's server.")
@click.option(
    "--gate",
    "gate",
    multiple=True,
    callback=parse_gate,
    metavar="THRESHOLDS",
    help="Conditions such as answer>=0.95,answer_drop<=0.01,failures<=0; a broken one is exit status 1.",
)
@click.option("--gate-against", help="Policy that drops are measured against; without it the full prompt.")
@click.option("--gate-strict", is_flag=True, help="A drop that chance explains fails too.")
def recall(
    data: Path,
    format: str,
    corpus: Path | None,
    num_chunks: int,
    budgets: tuple[float, ...],
    limit: int | None,
    output: Path | None,
    answers: bool,
    citations: bool,
    url: str | None,
    api_key: str | None,
    policies: tuple[str, ...],
    baselines: tuple[str, ...],
    encoder: str | None,
    compressor_model: str | None,
    pythons: dict[str, Path],
    seed: int,
    max_tokens: int,
    config: Path | None,
    cache: Path | None,
    fresh: bool,
    judge_url: str | None,
    judge_model: str,
    judge_key: str,
    gate: tuple[Threshold, ...],
    gate_against: str | None,
    gate_strict: bool,
) -> None:
    """Recall of answers and evidence in reduced prompts, by budget.

    Exit status: 1 if a request or a threshold failed, 2 for wrong usage or data.
    """
    console = Console()
    if url is not None and config is not None:
        raise click.UsageError("--config is for the gateway that is started here; it has no effect with --url")
    if gate_against is not None and gate_against not in policies:
        raise click.UsageError(f"--gate-against names the policy {gate_against!r}, which is no --policy of this run")
    try:
        options = RecallOptions(
            budgets=budgets, policies=policies, answers=answers, citations=citations, max_tokens=max_tokens, seed=seed
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        dataset = read_dataset(data, limit=limit, format=format, num_chunks=num_chunks, corpus=corpus)
        _check_answerable(dataset, options)
        check_folder("--output", output)
    except EvalError as error:
        raise click.UsageError(str(error)) from None
    names = NAMES if "all" in baselines else baselines
    factory = SelectorFactory(encoder=encoder, compressor_model=compressor_model, pythons=pythons)
    with ExitStack() as stack:
        stack.callback(factory.close)
        judge = None
        if judge_url is not None:
            judge = stack.enter_context(Judge(judge_url, judge_model, api_key=judge_key))
        run = _Run(options, factory.make(names), url, api_key, config, output, cache, fresh, judge)
        try:
            report, records, journal = _measure(console, dataset, run)
        except EvalError as error:
            raise click.ClickException(str(error)) from None
    report = msgspec.structs.replace(report, gate=_verdicts(gate, gate_against, report, records, options))
    print_recall(console, report)
    if output is not None:
        for written in _write(output, report, records):
            console.print(f"written: {written}", highlight=False)
    if journal is not None:
        journal.close()
    if report.num_errors or has_failed(report.gate, strict=gate_strict):
        sys.exit(1)


def _check_answerable(dataset: Dataset, options: RecallOptions) -> None:
    if options.answers and not all(can_be_answered(case) for case in dataset.cases):
        first = next(case.id for case in dataset.cases if not can_be_answered(case))
        raise EvalError(f"--answers needs short accepted answers, {dataset.name} has none for case {first!r}")


def check_folder(option: str, file: Path | None) -> None:
    """Raises EvalError if a file cannot be written because its folder is missing."""
    if file is not None and not file.parent.is_dir():
        raise EvalError(f"{option}: the folder {file.parent} does not exist")


def _measure(console: Console, dataset: Dataset, run: _Run) -> tuple[RecallReport, list[CaseRecord], Journal | None]:
    options, url = run.options, run.url
    with ExitStack() as stack:
        if url is None:
            with console.status("starting the gateway"):
                url = stack.enter_context(started_gateway(config=run.config, example=run.api_key is None))
        client = stack.enter_context(GatewayClient(url=url, api_key=run.api_key or DEMO_KEYS[0]))
        # Another tenant has a prefix cache of its own: full and reduced prompts of one case cannot warm each other.
        full_client = client
        if run.api_key is None:
            full_client = stack.enter_context(GatewayClient(url=url, api_key=DEMO_KEYS[1]))
        served = client.models()[0]
        manifest = make_manifest(
            dataset=dataset,
            settings=_settings(options),
            seed=options.seed,
            model=served.id,
            max_model_len=served.max_model_len,
            started_gateway=run.url is None,
            config=run.config,
        )
        server = {"model": served.id, "max_model_len": served.max_model_len, "config": manifest.config_sha256}
        cache = None if run.cache is None else GenerationCache(run.cache, server)
        journal = None
        if run.output is not None:
            file = run.output.with_name(f"{run.output.name}.partial.jsonl")
            journal = Journal(file, _identity(manifest, server, run), fresh=run.fresh)
            if journal.done:
                console.print(f"taken up: {len(journal.done)} cases are done", style="dim")
        with progress_bar(console, len(dataset.cases)) as progress:
            recall_run = RecallRun(
                client, full_client, dataset, options, progress, run.selectors.ready, cache, run.judge
            )
            recall_run.warm_up()
            done = dict(journal.done) if journal is not None else {}
            records = []
            for record in recall_run.cases(done):
                records.append(record)
                if journal is not None and record.id not in done:
                    journal.add(record)
    report = make_report(
        manifest,
        dataset,
        records,
        options,
        methods=[selector.name for selector in run.selectors.ready],
        skipped=run.selectors.skipped,
        judge_model=None if run.judge is None else run.judge.model,
    )
    return report, records, journal


def _settings(options: RecallOptions) -> dict[str, Any]:
    return {
        "budgets": list(options.budgets),
        "policies": list(options.policies),
        "answers": options.answers,
        "citations": options.citations,
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "system_prompt": CITING_SYSTEM_PROMPT if options.citations else SYSTEM_PROMPT,
        "history_system_prompt": HISTORY_SYSTEM_PROMPT,
    }


def _identity(manifest: Manifest, server: Mapping[str, Any], run: _Run) -> dict[str, Any]:
    """What two runs must share for their cases to be one result."""
    return {
        "data": msgspec.to_builtins(manifest.data),
        "commit": manifest.commit,
        "options": msgspec.to_builtins(asdict(run.options)),
        "server": dict(server),
        "baselines": [selector.name for selector in run.selectors.ready],
        "judge": None if run.judge is None else run.judge.model,
    }


def _verdicts(
    gate: tuple[Threshold, ...],
    against: str | None,
    report: RecallReport,
    records: list[CaseRecord],
    options: RecallOptions,
) -> list[GateVerdict]:
    rows = {row.arm.name: row for row in report.arms}
    arms = reduced_arms(options.budgets, options.policies)
    by_budget = {arm.budget: arm for arm in arms if arm.policy == against}
    verdicts = []
    for arm in arms:
        if against is not None and arm.policy == against:
            continue
        name = FULL.name if against is None else by_budget[arm.budget].name
        redundancy = rows[name].redundancy
        reference = Reference(records, name, None if redundancy is None else redundancy.near_kept)
        if against is None and any(row.redundancy for row in rows.values()):
            reference = Reference(records, name, 1.0)  # the full prompt holds every pair
        verdicts += [
            judge_arm(threshold, arm.name, records, reference, summary=rows[arm.name], seed=options.seed)
            for threshold in gate
        ]
    return verdicts


def _write(output: Path, report: RecallReport, records: list[CaseRecord]) -> list[Path]:
    """The report, and beside it what was measured and scored case by case."""
    cases_file = output.with_name(f"{output.name.removesuffix('.json')}.cases.jsonl.gz")
    report = msgspec.structs.replace(report, cases_file=cases_file.name)
    output.write_bytes(encode_report(report))
    cases_file.write_bytes(gzip.compress(encode_cases(records), mtime=0))
    return [output, cases_file]
