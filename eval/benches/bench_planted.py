"""Whether the gates stop what they are there for: planted regressions on real data and the real model.

    python -m eval.benches.bench_planted ../shared/data --output eval/results/planted.json

Every run is the product's own command in a process of its own, and its exit status is the verdict:

- ``firsttoken eval recall --gate`` on nq-redundant with the default policy (passes) and on a gateway whose fact guard
  is off (fails);
- on hotpotqa, whose questions need two passages, a policy that keeps one against the default policy (fails);
- two identical policies against each other, twenty times on other cases with another seed (all pass);
- ``firsttoken eval quantization`` of an int8 KV cache (passes), and with its scales multiplied or exchanged among the
  heads (both fail).
"""

import gzip
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from eval.datasets import read_dataset
from eval.errors import EvalError
from eval.launcher import COMMAND, started_gateway
from eval.manifest import Manifest, make_manifest
from eval.quantization import QuantizationReport
from eval.records import RecallReport, encode_report

GATE = "evidence>=0.97,answer_drop<=0.05,evidence_drop<=0.05,near_kept>=0.98,failures<=0"
"""As ``make eval-gate``."""
DROP_GATE = "answer_drop<=0.02,evidence_drop<=0.02,failures<=0"
POLICIES = {
    "FIRSTTOKEN__POLICIES__TOP1__REDUCER__SELECTION__TOP_K": "1",
    "FIRSTTOKEN__POLICIES__TWIN__REDUCER": "{}",
}
NUM_TWIN_RUNS = 20
TWINS = "identical policies"
FAULTS_MODULE = "eval.benches.planted_faults"
_TIMEOUT_S = 3600


class GateRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a gate."""

    name: str
    planted: str | None
    """What was broken; ``None`` where nothing was."""
    arguments: list[str]
    """Of ``firsttoken``, without folders."""
    seed: int
    num_cases: int | None
    exit_status: int
    is_right: bool
    """It failed with a fault and passed without."""
    broken: dict[str, float | None]
    """The thresholds that stopped it, and their values."""


class PlantedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench."""

    kind: str = "planted"
    manifest: Manifest
    gates: list[str]
    runs: list[GateRun]
    num_twin_runs: int
    num_twin_passed: int
    is_right: bool
    """Every fault was stopped, and nothing else."""


def run_gate(
    name: str, planted: str | None, prefix: Sequence[str], arguments: Sequence[str], *, seed: int, output: Path
) -> GateRun:
    """Runs a command of ``firsttoken`` and reads from its result what stopped it. Raises EvalError where it broke."""
    command = [*prefix, *arguments, "--seed", str(seed), "--output", str(output)]
    output.unlink(missing_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode not in (0, 1) or not output.is_file():
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise EvalError(f"{name}: exit status {done.returncode}: {' '.join(lines[-3:])}")
    content = output.read_bytes()
    broken: dict[str, float | None]
    num_cases = None
    if "quantization" in arguments:
        figures = msgspec.json.decode(content, type=QuantizationReport).figures
        broken = {figure.name: figure.value for figure in figures if not figure.is_met}
    else:
        report = msgspec.json.decode(content, type=RecallReport)
        num_cases = report.manifest.data.num_cases
        broken = {f"{item.arm}: {item.threshold}": item.value for item in report.gate if item.outcome == "fail"} | {
            f"error: {error}": None for error in report.first_errors[:1]
        }
    return GateRun(
        name=name,
        planted=planted,
        arguments=_shown(arguments),
        seed=seed,
        num_cases=num_cases,
        exit_status=done.returncode,
        is_right=(done.returncode == 1 and bool(broken)) == (planted is not None),
        broken=broken,
    )


def _shown(arguments: Sequence[str]) -> list[str]:
    """Without what belongs to this machine alone."""
    own = {place for place, text in enumerate(arguments) if text == "--url"}
    return [
        Path(text).name if "/" in text else text
        for place, text in enumerate(arguments)
        if place not in own and place - 1 not in own
    ]


FIRSTTOKEN = (sys.executable, "-m", "app.cli")


def _recall(url: str, data: Path, *arguments: str) -> list[str]:
    return ["eval", "recall", "--data", str(data), "--url", url, *arguments]


def recall_runs(folder: Path, limit: int, num_twin_runs: int, work: Path) -> list[GateRun]:
    """All runs of the gate of recall; ``folder`` holds the data."""
    output = work / "recall.json"
    redundant, multi_hop = folder / "nq-redundant.jsonl.gz", folder / "hotpotqa.jsonl.gz"
    some = ("--limit", str(limit))

    def against_default(policy: str) -> list[str]:
        return ["--policy", "default", "--policy", policy, "--gate-against", "default", "--gate", DROP_GATE]

    with started_gateway(example=True, settings=POLICIES) as url:
        command = _recall(url, redundant, *some, "--gate", GATE)
        runs = [run_gate("default policy", None, FIRSTTOKEN, command, seed=0, output=output)]
        command = _recall(url, multi_hop, *some, *against_default("top1"))
        about = "a policy that keeps one passage"
        runs.append(run_gate("top-1", about, FIRSTTOKEN, command, seed=0, output=output))
        for seed, part in enumerate(parts_of(redundant, num_twin_runs, work)):
            command = _recall(url, part, *against_default("twin"), "--gate-strict")
            runs.append(run_gate(TWINS, None, FIRSTTOKEN, command, seed=seed, output=output))
    planted = (COMMAND[0], "-m", FAULTS_MODULE, "fact-guard", "serve")
    with started_gateway(example=True, command=planted) as url:
        command = _recall(url, redundant, *some, "--gate", GATE)
        about = "texts that look alike are merged"
        runs.append(run_gate("fact guard off", about, FIRSTTOKEN, command, seed=0, output=output))
    return runs


def parts_of(data: Path, num_parts: int, folder: Path, size: int = 10) -> list[Path]:
    """The cases of a set by tens, one file each; it begins anew where the set ends."""
    lines = [line for line in gzip.decompress(data.read_bytes()).splitlines() if line.strip()]
    files = []
    for part in range(num_parts):
        places = [(part * size + place) % len(lines) for place in range(min(size, len(lines)))]
        files.append(folder / f"{data.name.removesuffix('.jsonl.gz')}-part{part}.jsonl.gz")
        files[-1].write_bytes(gzip.compress(b"\n".join(lines[place] for place in places) + b"\n", mtime=0))
    return files


def quantization_runs(max_length: int, folder: Path) -> list[GateRun]:
    """All runs of the gate of quantized formats, on the real weights."""
    arguments = [
        *("eval", "quantization", "--kv-cache-dtype", "int8", "--max-length", str(max_length)),
        *("--texts", "3", "--needles", "1", "--no-record"),
    ]
    output = folder / "quantization.json"
    runs = [run_gate("int8 KV cache", None, FIRSTTOKEN, arguments, seed=0, output=output)]
    for fault, about in (("scales-multiplied", "scales times 1.5"), ("scales-permuted", "scales of the next head")):
        prefix = (sys.executable, "-m", FAULTS_MODULE, fault)
        runs.append(run_gate(f"int8 KV cache, {fault}", about, prefix, arguments, seed=0, output=output))
    return runs


def print_planted(console: Console, report: PlantedReport) -> None:
    """One row a run; the identical ones together."""
    table = Table()
    for heading in ("run", "planted", "cases", "exit status", "right", "stopped by"):
        table.add_column(heading)
    twins = [run for run in report.runs if run.name == TWINS]
    for run in report.runs:
        if run in twins and (run.is_right or run.exit_status == 0):
            continue
        broken = ", ".join(
            f"{name} ({'no value' if value is None else f'{value:.3g}'})" for name, value in run.broken.items()
        )
        table.add_row(
            run.name, run.planted or "–", str(run.num_cases or "–"), str(run.exit_status), str(run.is_right), broken
        )
    console.print(table)
    console.print(
        f"identical policies: {report.num_twin_passed} of {report.num_twin_runs} runs passed", highlight=False
    )


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), default=60, show_default=True, help="Cases of a run of recall.")
@click.option("--twin-runs", type=click.IntRange(min=1), default=NUM_TWIN_RUNS, show_default=True)
@click.option("--max-length", type=click.IntRange(min=64), default=512, show_default=True, help="Of texts and needles.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
def main(data: Path, output: Path | None, **settings: Any) -> None:
    """Plant regressions and see whether the gates stop them; exit status 1 where one does not."""
    console = Console(width=160)
    file = data / "nq-redundant.jsonl.gz"
    try:
        dataset = read_dataset(file, limit=settings["limit"])
        # Before the runs: what is committed meanwhile is not what was measured.
        manifest = make_manifest(
            dataset=dataset,
            settings=settings,
            seed=0,
            model="smollm2-135m-instruct",
            max_model_len=None,
            started_gateway=True,
        )
        with tempfile.TemporaryDirectory() as name, console.status("running the gates"):
            folder = Path(name)
            runs = quantization_runs(settings["max_length"], folder)
            runs += recall_runs(data, settings["limit"], settings["twin_runs"], folder)
    except EvalError as error:
        raise click.ClickException(str(error)) from None
    twins = [run for run in runs if run.name == TWINS]
    report = PlantedReport(
        manifest=manifest,
        gates=[GATE, DROP_GATE],
        runs=runs,
        num_twin_runs=len(twins),
        num_twin_passed=sum(run.exit_status == 0 for run in twins),
        is_right=all(run.is_right for run in runs),
    )
    print_planted(console, report)
    if output is not None:
        output.write_bytes(encode_report(report))
    if not report.is_right:
        sys.exit(1)


if __name__ == "__main__":
    main()
