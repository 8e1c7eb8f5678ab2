"""The committed recall of the default policy: ``firsttoken eval recall`` over all sets, and the table of RESULTS.md.

    python -m eval.benches.bench_committed ../shared/data --output eval/results/recall.json --page RESULTS.md

Every set is reduced without a budget and at shares of its passages' tokens, by one gateway with the example
configuration; with ``--answers`` also answered from full and reduced prompts. Cases are spread evenly over a file, so
that all its languages take part. Each set is a run of the product's command, whose result is kept in ``--work`` and
taken up by the same command; a result of another commit is measured anew, unless ``--keep`` says otherwise.
"""

import gzip
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
import msgspec
from rich.console import Console

from eval.datasets import Dataset, read_dataset
from eval.errors import EvalError
from eval.launcher import started_gateway
from eval.manifest import make_machine_manifest
from eval.page_blocks import update
from eval.recall_table import MARKS, CommittedRecall, CommittedSet, make_set, result_tables
from eval.records import RecallReport, encode_report

SETS = (
    *("nq", "hotpotqa", "rgb-zh", "xquad", "locomo-rag", "mtrag", "qmsum", "pubmedqa", "cosqa", "rgb-conflict"),
    *("nq-redundant", "xquad-redundant", "cosqa-redundant", "rgb-zh-redundant", "sgd-history", "locomo-history"),
)
ANSWERED = ("nq", "hotpotqa", "xquad")
SKIPPED = {"dialogsum": "its dialogues have summaries but no questions, which only a judge model could score"}
BUDGETS = (0.1, 0.25, 0.5)


def spread(dataset: Dataset, limit: int) -> list[int]:
    """Places of ``limit`` cases, evenly over the file; all where there are no more."""
    size = len(dataset.cases)
    return list(range(size)) if limit >= size else [place * size // limit for place in range(limit)]


def write_part(source: Path, places: Sequence[int], target: Path) -> None:
    """Some cases of a file as a file of the same form."""
    content = source.read_bytes()
    raw = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    lines = [line for line in raw.split(b"\n") if line.strip()]
    part = gzip.compress(b"\n".join(lines[place] for place in places) + b"\n", mtime=0)
    if not target.is_file() or target.read_bytes() != part:
        target.write_bytes(part)


def run_recall(data: Path, output: Path, url: str, arguments: Sequence[str], commit: str | None) -> RecallReport:
    """One run of the product's command, or the one that is there from ``commit`` (``None``: any). Raises EvalError."""
    if (kept := _kept(output, data, arguments, commit)) is not None:
        return kept
    # Without a key the command takes the demo tenants, whose prefix caches keep full and reduced prompts apart.
    command = [sys.executable, "-m", "app.cli", "eval", "recall", "--data", str(data), "--url", url]
    command += ["--output", str(output), *arguments]
    output.unlink(missing_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "belongs to another run" in " ".join((done.stdout + done.stderr).split()):
        done = subprocess.run([*command, "--fresh"], capture_output=True, text=True, check=False)
    if not output.is_file():
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise EvalError(f"{data.name}: exit status {done.returncode}: {' '.join(lines[-3:])}")
    output.with_suffix(".arguments").write_text(" ".join(arguments), encoding="utf-8")
    return msgspec.json.decode(output.read_bytes(), type=RecallReport)


def _kept(output: Path, data: Path, arguments: Sequence[str], commit: str | None) -> RecallReport | None:
    try:
        report = msgspec.json.decode(output.read_bytes(), type=RecallReport)
        same = output.with_suffix(".arguments").read_text(encoding="utf-8") == " ".join(arguments)
    except (OSError, msgspec.MsgspecError):
        return None
    is_same_data = report.manifest.data.sha256 == read_dataset(data).sha256
    is_same_commit = commit is None or report.manifest.commit == commit
    return report if same and is_same_data and is_same_commit and not report.num_errors else None


def measure_set(
    name: str, folder: Path, work: Path, url: str, sizes: tuple[int, int], commit: str | None
) -> CommittedSet:
    """The runs of one set; ``sizes``: cases to reduce, and to answer."""
    source = folder / f"{name}.jsonl.gz"
    dataset = read_dataset(source)
    part = work / f"{name}.jsonl.gz"
    write_part(source, spread(dataset, sizes[0]), part)
    budgets = ("--budget", ",".join(f"{budget:g}" for budget in BUDGETS))
    report = run_recall(part, work / f"{name}.json", url, budgets, commit)
    answers = None
    if name in ANSWERED and sizes[1]:
        part = work / f"{name}-answers.jsonl.gz"
        write_part(source, spread(dataset, sizes[1]), part)
        answers = run_recall(part, work / f"{name}-answers.json", url, ("--answers",), commit)
    return make_set(name, dataset.sha256, dataset.num_cases_in_file, report, answers)


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Most cases of a set.")
@click.option("--answers", "num_answers", type=click.IntRange(min=0), default=40, show_default=True, help="Answered.")
@click.option("--sets", default=",".join(SETS), help="Names by comma; all by default.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default="build/recall", show_default=True)
@click.option("--keep", is_flag=True, help="Take kept results of other commits too.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the result as JSON.")
@click.option("--page", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Put the table there.")
def main(
    data: Path,
    limit: int,
    num_answers: int,
    sets: str,
    work: Path,
    keep: bool,
    output: Path | None,
    page: Path | None,
) -> None:
    """Measure the default policy over the sets of DATA; exit status 1 where a request failed."""
    console = Console(width=200)
    work.mkdir(parents=True, exist_ok=True)
    names = [name for name in sets.split(",") if name]
    settings = {"limit": limit, "answers": num_answers, "budgets": list(BUDGETS), "sets": names, "policy": "default"}
    manifest = make_machine_manifest(settings=settings, seed=0)
    found: list[CommittedSet] = []
    begun = time.monotonic()
    try:
        with ExitStack() as stack:
            with console.status("starting the gateway"):
                url = stack.enter_context(started_gateway(example=True))
            for name in names:
                with console.status(f"{name}: at most {limit} cases"):
                    sizes = limit, num_answers
                    found.append(measure_set(name, data, work, url, sizes, None if keep else manifest.commit))
                console.print(f"{name}: done after {(time.monotonic() - begun) / 60:.1f} minutes", highlight=False)
        result = CommittedRecall(manifest=manifest, sets=found, skipped=SKIPPED)
        table = result_tables(result)
        if page is not None:
            update(page, MARKS, table)
    except (EvalError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if output is not None:
        output.write_bytes(encode_report(result))
    console.print(table, highlight=False, markup=False)
    if any(cell.num_errors or cell.num_empty for item in found for cell in item.cells):
        sys.exit(1)


if __name__ == "__main__":
    main()
