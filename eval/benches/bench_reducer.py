"""The reducer against the baselines on the same passages: recall at equal tokens, and the time it takes.

    python -m eval.benches.bench_reducer DATA_FOLDER --output eval/results/reducer.json

For every case and every budget (a share of the tokens of its passages) each arm chooses what stays. Answer recall is
judged on the kept text where the set has short answers, over the cases of which a gold passage states one: a "no" that
happens to stand somewhere proves nothing. Evidence recall elsewhere; a gold passage counts as kept when at least half
of its characters are, so a shred of it earns nothing. Comparisons are paired over the cases.

Times of a set are of the reducer as the gateway calls it, once with no passage embedded before (``cold``) and once with
all of them cached (``cached``). ``--times`` adds what they are worth: see ``reduction_times``.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.chat_template import ChatTokenizer
from engine.model_store import resolve_model
from eval.baselines import Baselines, Kept, make_pool
from eval.benches.passages import passages_of
from eval.benches.reduction_times import PEER_SHARE, Stopwatch, Times, make_peer
from eval.compressor_process import CompressorProcess
from eval.datasets import Dataset, read_dataset
from eval.intervals import compare, percentile
from eval.manifest import Manifest, make_manifest
from eval.prompts import case_messages
from eval.samples import Case
from eval.scoring import SearchText, Span, answer_score, evidence_score, has_scored_answer
from reducer.config import ReducerConfig
from reducer.encoder import SentenceTransformerEncoder
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller, PromptParts

ANSWER_SETS = ("nq", "hotpotqa", "rgb-zh", "xquad", "locomo-rag")
EVIDENCE_SETS = ("mtrag", "qmsum", "pubmedqa", "cosqa")
BUDGETS = (0.05, 0.10, 0.25, 0.50)
OURS = "firsttoken"
NO_LIMIT = 1_000_000
KEPT_SHARE = 0.5


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One arm on one set at one budget."""

    arm: str
    budget: float | None
    """``None``: no budget given, dynamic top-k alone."""
    recall: float
    tokens_kept: float
    """Mean share of the passages' tokens."""


class Versus(msgspec.Struct, frozen=True, kw_only=True):
    """Ours against the baseline that is best on this set and budget."""

    budget: float
    baseline: str
    difference: float
    low: float
    high: float


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """One data set."""

    name: str
    metric: str
    sha256: str
    num_cases: int
    full_recall: float
    """Recall of the prompt with every passage."""
    cells: list[Cell]
    versus_best: list[Versus]
    cold_ms_median: float
    cached_ms_median: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    manifest: Manifest
    sets: list[SetResult]
    mean_recall: dict[str, float]
    """Per arm, over all sets and budgets."""
    times: Times | None = None


class Bench:
    """Holds the models; scores one set after the other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._counter = ChatTokenizer.from_path(resolve_model("smollm2-135m-instruct"))
        self._encoder_path = resolve_model("all-minilm-l6-v2")
        self._encoder = SentenceTransformerEncoder(self._encoder_path)

    def time(self, cases: Sequence[Case], peer: CompressorProcess | None) -> Times:
        """What reducing these cases costs beside prefilling them unreduced."""
        return Stopwatch(self._counter, self._encoder, peer).measure(cases)

    def run(self, dataset: Dataset, budgets: Sequence[float], console: Console) -> SetResult:
        """All arms on all cases of a set."""
        name = dataset.name.removesuffix(".gz").removesuffix(".jsonl")
        metric = "answer" if name in ANSWER_SETS else "evidence"
        recalls: dict[tuple[str, float | None], list[float]] = {}
        tokens: dict[tuple[str, float | None], list[float]] = {}
        full: list[float] = []
        cold: list[float] = []
        cached: list[float] = []
        reducer = Reducer(ReducerConfig(), self._counter, self._encoder)

        def note(arm: str, budget: float | None, case: Case, kept: Mapping[int, Sequence[Span]], share: float) -> None:
            recalls.setdefault((arm, budget), []).append(recall(case, kept, metric))
            tokens.setdefault((arm, budget), []).append(share)

        for case in track(dataset.cases, description=name, console=console):
            everything = {place: [(0, len(chunk.text))] for place, chunk in enumerate(case.chunks)}
            full.append(recall(case, everything, metric))
            messages = tuple(case_messages(case))
            parts = PromptParts(messages=messages, passages=passages_of(case))
            fixed = self._counter.count_prompt(messages)
            self._encoder.cache.clear()
            started = time.perf_counter()
            free = reducer.reduce(parts, budget=Budget(NO_LIMIT, "window"), caller=Caller())
            cold.append((time.perf_counter() - started) * 1000)
            original = free.original_prompt_tokens - fixed
            note(OURS, None, case, kept_places(case, free), (free.prompt_tokens - fixed) / original)
            baselines = Baselines(case.question, make_pool(case.chunks, self._counter.count_text), self._embed)
            for budget in budgets:
                room = int(budget * original)
                started = time.perf_counter()
                ours = reducer.reduce(parts, budget=Budget(fixed + room, "request"), caller=Caller())
                cached.append((time.perf_counter() - started) * 1000)
                note(OURS, budget, case, kept_places(case, ours), (ours.prompt_tokens - fixed) / original)
                for arm in Baselines.names:
                    kept = baselines.keep(arm, room)
                    note(arm, budget, case, kept, budget)
        return SetResult(
            name=name,
            metric=metric,
            sha256=dataset.sha256,
            num_cases=len(dataset.cases),
            full_recall=float(np.mean(full)),
            cells=[
                Cell(arm=arm, budget=budget, recall=float(np.mean(values)), tokens_kept=_mean(tokens[arm, budget]))
                for (arm, budget), values in recalls.items()
            ],
            versus_best=[self._versus_best(recalls, budget) for budget in budgets],
            cold_ms_median=percentile(cold, 0.5),
            cached_ms_median=percentile(cached, 0.5),
        )

    def _versus_best(self, recalls: Mapping[tuple[str, float | None], Sequence[float]], budget: float) -> Versus:
        best = max(Baselines.names, key=lambda arm: float(np.mean(recalls[arm, budget])))
        paired = compare(recalls[OURS, budget], recalls[best, budget], seed=self._seed)
        return Versus(
            budget=budget,
            baseline=best,
            difference=paired.difference,
            low=paired.interval.low,
            high=paired.interval.high,
        )

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._encoder.encode(texts)


def scored_cases(dataset: Dataset, limit: int) -> Dataset:
    """The first ``limit`` cases that can be scored."""
    cases = dataset.cases
    if dataset.name.partition(".")[0] in ANSWER_SETS:
        cases = [case for case in cases if has_scored_answer(case)]
    return replace(dataset, cases=cases[:limit])


def recall(case: Case, kept: Mapping[int, Sequence[Span]], metric: str) -> float:
    """Score of a selection: the answer stands in the kept text, or the share of the evidence that is kept."""
    if metric == "answer":
        texts = [
            f"{case.chunks[place].title or ''}\n" + " … ".join(case.chunks[place].text[a:b] for a, b in spans)
            for place, spans in sorted(kept.items())
        ]
        return answer_score(case, SearchText("\n".join(texts)))
    mostly = {
        case.chunks[place].id: list(spans)
        for place, spans in kept.items()
        if sum(b - a for a, b in spans) >= KEPT_SHARE * len(case.chunks[place].text)
    }
    return evidence_score(case, mostly) or 0.0


def kept_places(case: Case, result: Any) -> Kept:
    """The reducer's decisions as kept characters by place."""
    places = {chunk.id: place for place, chunk in enumerate(case.chunks)}
    kept: Kept = {}
    for decision in result.documents:
        if decision.spans:
            kept[places[decision.id]] = [(start, end) for start, end in decision.spans]
    return kept


def print_result(console: Console, result: Result, budgets: Sequence[float]) -> None:
    """One table: recall in % by arm, set and budget."""
    table = Table(title="recall in %, at " + " / ".join(f"{budget:.0%}" for budget in budgets) + " of the tokens")
    table.add_column("arm")
    for item in result.sets:
        table.add_column(f"{item.name}\n({item.metric}, n={item.num_cases})")
    table.add_column("mean", justify="right")
    for arm in (*Baselines.names, OURS):
        cells = [_row(item, arm, budgets) for item in result.sets]
        table.add_row(arm, *cells, f"{100 * result.mean_recall[arm]:.1f}")
    table.add_section()
    table.add_row("all passages", *(f"{100 * item.full_recall:.0f}" for item in result.sets), "")
    table.add_row(
        f"{OURS}, no budget (recall at tokens kept)",
        *(f"{100 * c.recall:.0f} at {100 * c.tokens_kept:.0f}" for item in result.sets for c in [_free(item)]),
        "",
    )
    table.add_row("ms cold / cached", *(f"{i.cold_ms_median:.0f} / {i.cached_ms_median:.0f}" for i in result.sets), "")
    console.print(table)
    if (times := result.times) is not None:
        console.print(f"prefill of {times.prompt_tokens_median:.0f} tokens: {times.prefill_s_median:.2f} s")
        console.print(
            f"reducing takes {times.cold_share_median:.1%} of that with nothing cached, "
            f"{times.cached_share_median:.1%} with all vectors cached"
        )
        if times.peer is not None:
            console.print(
                f"{times.peer} takes {times.peer_over_cold_median:.0f} times as long as reducing with nothing cached; "
                f"recall at {PEER_SHARE:.0%} of the tokens {times.peer_recall:.0%} against {times.own_recall:.0%}"
            )
    for item in result.sets:
        for versus in item.versus_best:
            if versus.difference < 0:
                console.print(
                    f"{item.name} at {versus.budget:.0%}: {100 * versus.difference:+.1f} points to {versus.baseline}, "
                    f"95 % interval [{100 * versus.low:+.1f}, {100 * versus.high:+.1f}]"
                )


def _row(item: SetResult, arm: str, budgets: Sequence[float]) -> str:
    found = {cell.budget: cell.recall for cell in item.cells if cell.arm == arm}
    return " ".join(f"{100 * found[budget]:.0f}" for budget in budgets)


def _free(item: SetResult) -> Cell:
    return next(cell for cell in item.cells if cell.budget is None)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--sets", default=",".join((*ANSWER_SETS, *EVIDENCE_SETS)), show_default=True)
@click.option("--limit", default=200, show_default=True, help="Most cases of a set.")
@click.option("--seed", default=0, show_default=True)
@click.option("--times", default=0, show_default=True, help="Cases of the first set timed beside the engine's prefill.")
@click.option(
    "--peer", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Made by make_longllmlingua.sh."
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
def main(data: Path, sets: str, limit: int, seed: int, times: int, peer: Path | None, output: Path | None) -> None:
    """Compare the reducer with the baselines over the sets of a data folder."""
    console = Console(stderr=True)
    bench = Bench(seed)
    datasets = [scored_cases(read_dataset(data / f"{name}.jsonl.gz"), limit) for name in sets.split(",")]
    timed: Times | None = None
    if times:
        opponent = None if peer is None else make_peer(peer / "bin" / "python", peer / "model", torch.get_num_threads())
        timed = bench.time(datasets[0].cases[:times], opponent)
        if opponent is not None:
            opponent.close()
    results = [bench.run(dataset, BUDGETS, console) for dataset in datasets]
    means = {
        arm: _mean([cell.recall for item in results for cell in item.cells if cell.arm == arm and cell.budget])
        for arm in (*Baselines.names, OURS)
    }
    manifest = make_manifest(
        dataset=datasets[0],
        settings={
            "sets": sets,
            "limit": limit,
            "budgets": list(BUDGETS),
            "reducer": msgspec.to_builtins(ReducerConfig()),
        },
        seed=seed,
        model="smollm2-135m-instruct (tokenizer), all-minilm-l6-v2",
        max_model_len=None,
        started_gateway=False,
    )
    result = Result(manifest=manifest, sets=results, mean_recall=means, times=timed)
    print_result(Console(width=200), result, BUDGETS)
    encoded = msgspec.json.encode(result)
    if output is not None:
        output.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    sys.stdout.write(json.dumps(json.loads(encoded)) + "\n")


if __name__ == "__main__":
    main()
