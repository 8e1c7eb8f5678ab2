"""``firsttoken eval quantization``: what a quantized format loses, and the record that lets it be served."""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from eval.commands.recall import check_folder
from eval.datasets import Dataset, read_dataset
from eval.errors import EvalError
from eval.progress import progress_bar
from eval.quantization import Limits
from eval.quantization_report import print_quantization
from eval.records import encode_report


def parse_limits(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> Limits:
    """``max_kl=0.02`` and so on, over the defaults."""
    limits: dict[str, Any] = {}
    for text in value:
        name, _, number = text.partition("=")
        try:
            limits[name.strip()] = float(number)
        except ValueError:
            raise click.BadParameter(f"a limit looks like max_kl=0.02, got {text!r}") from None
    try:
        return msgspec.convert(limits, Limits)
    except msgspec.ValidationError as error:
        known = ", ".join(Limits.__struct_fields__)
        raise click.BadParameter(f"{error}; known limits: {known}") from None


@click.command("quantization")
@click.option("--model", default="smollm2-135m-instruct", show_default=True, help="As engine.model.model.")
@click.option("--quantization", type=click.Choice(("none", "int8", "fp8")), default="none", show_default=True)
@click.option("--kv-cache-dtype", type=click.Choice(("auto", "int8", "fp8")), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(("auto", "fp32", "bf16", "fp16")), default="auto", show_default=True)
@click.option(
    "--max-length",
    type=click.IntRange(min=64),
    default=2048,
    show_default=True,
    help="Longest prompt, tokens; 8192 takes an hour on two cores.",
)
@click.option("--texts", "num_texts", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--needles", "needles_per_cell", type=click.IntRange(min=1), default=2, show_default=True, help="Per length, depth."
)
@click.option("--text", "text_file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Real text.")
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="Cases for task recall, and real text.")
@click.option("--limit", type=click.IntRange(min=1), default=30, show_default=True, help="Cases used.")
@click.option("--gate", "limits", multiple=True, callback=parse_limits, metavar="NAME=VALUE", help="Another limit.")
@click.option("--threads", "num_threads", type=click.IntRange(min=1), help="Of torch; by default one per core.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--record/--no-record", "keeps_record", default=True, show_default=True, help="Keep it for `serve`.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
def quantization(
    text_file: Path | None,
    data: Path | None,
    limit: int,
    keeps_record: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """What a quantized format loses against the unquantized model; `firsttoken serve` refuses one that fails.

    Perplexity and next-token distributions on real text, needles, and with --data the answers to questions, all by
    length and in one run with the unquantized model.

    Exit status: 1 if the format fails, 2 for wrong usage or data.
    """
    # torch takes seconds to import, and help and usage errors can do without
    from eval.benches.bench_quantization import (
        QuantizationOptions,
        RealText,
        keep_record,
        manual_text,
        measure_quantization,
        num_steps,
        passages_text,
    )

    console = Console()
    try:
        chosen = QuantizationOptions(**options)
        check_folder("--output", output)
        dataset = read_dataset(data, format="auto") if data is not None else None
        text = manual_text() if dataset is None else passages_text(dataset)
        if text_file is not None:
            text = RealText(text_file.name, _read_text(text_file))
        cases = _first_cases(dataset, limit)
    except EvalError as error:
        raise click.UsageError(str(error)) from None
    try:
        with progress_bar(console, num_steps(chosen, 0 if cases is None else len(cases.cases))) as bar:

            def step(what: str) -> None:
                bar.step(what)
                bar.case_done()

            report, record = measure_quantization(chosen, text, cases, step=step)
        if keeps_record:
            keep_record(record)
    except EvalError as error:
        raise click.ClickException(str(error)) from None
    print_quantization(console, report)
    if output is not None:
        output.write_bytes(encode_report(report))
        console.print(f"written: {output}", highlight=False)
    if not report.passed:
        sys.exit(1)


def _first_cases(dataset: Dataset | None, limit: int) -> Dataset | None:
    """The first cases with a short accepted answer."""
    if dataset is None:
        return None
    cases = [case for case in dataset.cases if case.answers and case.answer_in_gold is not False and case.chunks]
    if not cases:
        raise EvalError(f"{dataset.name} has no case with passages and a short accepted answer")
    return Dataset(dataset.name, dataset.sha256, cases[:limit], dataset.num_cases_in_file)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{file}: cannot be read as text: {error}") from None
