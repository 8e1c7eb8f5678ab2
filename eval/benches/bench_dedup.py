"""How well copies are removed, and whether what only looks like a copy stays, on sets with labelled copies.

    python -m eval.benches.bench_dedup DATA_FOLDER --output eval/results/dedup.json

Every case goes through the whole reducer with nothing else to cut for: no budget, the default models. Judged is what
was merged. Shares come with 95 % Wilson intervals over chunks or pairs:

* copies removed: chunks beyond the first of a cluster that are gone
* precision: removed chunks of whose cluster another one stays
* near kept: pairs that differ in one figure or fact, of which both sides stay
* statements kept: the same, where a side also stays by standing in a passage of its own that holds it
* evidence before and after: cases whose evidence is complete, with every passage, and with those left
* answers: cases in which an accepted answer stands in the passages, before and after
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.chat_template import ChatTokenizer
from engine.model_store import resolve_model
from eval.benches.passages import passages_of
from eval.datasets import Dataset, read_dataset
from eval.intervals import wilson
from eval.manifest import Manifest, make_manifest
from eval.prompts import case_messages
from eval.redundancy import RedundancyCounts, redundancy_counts
from eval.samples import Case
from eval.scoring import SearchText, answer_score, evidence_score
from reducer.config import ReducerConfig
from reducer.encoder import SentenceTransformerEncoder
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller, PromptParts

SETS = ("nq-redundant", "xquad-redundant", "cosqa-redundant", "rgb-zh-redundant", "rgb-conflict")
NO_LIMIT = 1_000_000


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A share with its 95 % interval; ``None`` where there is nothing to count."""

    num: int
    num_all: int
    share: float | None
    low: float | None
    high: float | None


class LostGold(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence whose whole cluster was merged, and whether its text stands in the passage it was merged into."""

    case: str
    chunk: str
    merged_into: str
    is_in_survivor: bool
    """Letter for letter after normalisation; a text cut off by an ellipsis without its last word."""


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """One data set."""

    name: str
    sha256: str
    num_cases: int
    copies_removed: Share
    precision: Share
    near_kept: Share
    statements_kept: Share
    evidence_before: float
    evidence_after: float
    """Evidence by label; merged evidence counts where its text stands in the survivor."""
    answers_before: float | None
    answers_after: float | None
    gold_merged_elsewhere: list[LostGold]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    manifest: Manifest
    sets: list[SetResult]


class Bench:
    """Holds the models; scores one set after the other."""

    def __init__(self) -> None:
        counter = ChatTokenizer.from_path(resolve_model("smollm2-135m-instruct"))
        encoder = SentenceTransformerEncoder(resolve_model("all-minilm-l6-v2"))
        self._reducer = Reducer(ReducerConfig(), counter, encoder)

    def run(self, dataset: Dataset, console: Console) -> SetResult:
        """All cases of a set."""
        name = dataset.name.removesuffix(".gz").removesuffix(".jsonl")
        counts = RedundancyCounts()
        num_statements = num_pairs = 0
        evidence: list[tuple[float, float]] = []
        answers: list[tuple[float, float]] = []
        elsewhere: list[LostGold] = []
        for case in track(dataset.cases, description=name, console=console):
            merged = self._merge(case)
            counts += redundancy_counts(case, merged.keys())
            kept_pairs, all_pairs = statement_pairs(case, merged)
            num_statements += kept_pairs
            num_pairs += all_pairs
            found = gold_elsewhere(case, merged)
            elsewhere.extend(found)
            covered = {gold.chunk for gold in found if gold.is_in_survivor}
            evidence.append((_evidence(case, set()), _evidence(case, merged.keys() - covered)))
            if case.answers:
                answers.append((_answer(case, set()), _answer(case, set(merged))))
        return SetResult(
            name=name,
            sha256=dataset.sha256,
            num_cases=len(dataset.cases),
            copies_removed=_share(counts.removed_right, counts.removed_right + counts.left_in),
            precision=_share(counts.removed_right, counts.removed_right + counts.removed_wrong),
            near_kept=_share(counts.near_pairs_kept, counts.near_pairs),
            statements_kept=_share(num_statements, num_pairs),
            evidence_before=_mean([before for before, _ in evidence]),
            evidence_after=_mean([after for _, after in evidence]),
            answers_before=_mean([before for before, _ in answers]) if answers else None,
            answers_after=_mean([after for _, after in answers]) if answers else None,
            gold_merged_elsewhere=elsewhere,
        )

    def _merge(self, case: Case) -> dict[str, str]:
        """Chunks that dedup merged, each with its survivor."""
        passages = passages_of(case)
        parts = PromptParts(messages=tuple(case_messages(case)), passages=passages)
        result = self._reducer.reduce(parts, budget=Budget(NO_LIMIT, "window"), caller=Caller())
        return {
            decision.id: decision.merged_into
            for decision in result.documents
            # A window with spans of its own was stitched: its text is still in the prompt.
            if decision.action == "merged" and decision.merged_into is not None and not decision.spans
        }


def statement_pairs(case: Case, merged: Mapping[str, str]) -> tuple[int, int]:
    """Near pairs whose two sides stand in two different passages that are left, and all near pairs."""
    ids = {chunk.id for chunk in case.chunks}
    pairs = [(chunk.id, chunk.near_of) for chunk in case.chunks if chunk.near_of in ids]
    kept = sum(merged.get(near, near) != merged.get(str(target), str(target)) for near, target in pairs)
    return kept, len(pairs)


def gold_elsewhere(case: Case, merged: Mapping[str, str]) -> list[LostGold]:
    """Annotated evidence of which no copy is left, each with what it was merged into."""
    texts = {chunk.id: chunk.text for chunk in case.chunks}
    clusters = {chunk.cluster for chunk in case.chunks if chunk.id not in merged}
    found: list[LostGold] = []
    for chunk in case.chunks:
        if chunk.gold and chunk.id in merged and chunk.cluster not in clusters:
            survivor = merged[chunk.id]
            text = chunk.text.rstrip(" .…\xa0")
            is_cut = text != chunk.text.rstrip() and chunk.text.rstrip().endswith(("..", "…"))
            text = text[:-4] if is_cut else text  # the last word may be cut inside
            is_in_survivor = SearchText(texts[survivor]).holds(text)
            found.append(LostGold(case=case.id, chunk=chunk.id, merged_into=survivor, is_in_survivor=is_in_survivor))
    return found


def _evidence(case: Case, gone: set[str]) -> float:
    kept = {chunk.id: [(0, len(chunk.text))] for chunk in case.chunks if chunk.id not in gone}
    return evidence_score(case, kept) or 0.0


def _answer(case: Case, gone: set[str]) -> float:
    texts = [f"{chunk.title or ''}\n{chunk.text}" for chunk in case.chunks if chunk.id not in gone]
    return answer_score(case, SearchText("\n".join(texts)))


def _share(num: int, num_all: int) -> Share:
    if num_all == 0:
        return Share(num=0, num_all=0, share=None, low=None, high=None)
    interval = wilson(num, num_all)
    return Share(num=num, num_all=num_all, share=num / num_all, low=interval.low, high=interval.high)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def print_result(console: Console, result: Result) -> None:
    """One row a set."""
    table = Table(title="dedup, in %, 95 % intervals")
    for name in ("set", "cases", "copies removed", "precision", "near kept", "statements kept", "evidence", "answers"):
        table.add_column(name)
    for item in result.sets:
        shares = (item.copies_removed, item.precision, item.near_kept, item.statements_kept)
        answers = "-" if item.answers_before is None else _change(item.answers_before, item.answers_after or 0.0)
        evidence = _change(item.evidence_before, item.evidence_after)
        table.add_row(item.name, str(item.num_cases), *map(_cell, shares), evidence, answers)
    console.print(table)


def _cell(share: Share) -> str:
    if share.share is None or share.low is None or share.high is None:
        return "-"
    interval = f"[{100 * share.low:.1f}, {100 * share.high:.1f}]"
    return f"{100 * share.share:.1f} {interval} {share.num}/{share.num_all}"


def _change(before: float, after: float) -> str:
    return f"{100 * before:.1f} → {100 * after:.1f}"


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--sets", default=",".join(SETS), show_default=True)
@click.option("--limit", type=int, default=None, help="Most cases of a set; all by default.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
def main(data: Path, sets: str, limit: int | None, output: Path | None) -> None:
    """Count what deduplication removes and keeps over the sets of a data folder."""
    console = Console(stderr=True)
    bench = Bench()
    datasets = [read_dataset(data / f"{name}.jsonl.gz", limit=limit) for name in sets.split(",")]
    results = [bench.run(dataset, console) for dataset in datasets]
    manifest = make_manifest(
        dataset=datasets[0],
        settings={"sets": sets, "limit": limit, "reducer": msgspec.to_builtins(ReducerConfig())},
        seed=0,
        model="smollm2-135m-instruct (tokenizer), all-minilm-l6-v2",
        max_model_len=None,
        started_gateway=False,
    )
    result = Result(manifest=manifest, sets=results)
    print_result(Console(width=200), result)
    encoded = msgspec.json.encode(result)
    if output is not None:
        output.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    sys.stdout.write(json.dumps(json.loads(encoded)) + "\n")


if __name__ == "__main__":
    main()
