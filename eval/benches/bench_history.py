"""Compacted histories: probes that the prompt still answers, against the usual ways to shorten a conversation.

    python -m eval.benches.bench_history DATA_FOLDER --output eval/results/history.json

Every case is a conversation with probes whose answers stand word for word in it. It is compacted to a share of its
tokens for the case's own question, and every probe is looked up in what is sent; the probes are unknown to all arms
but the oracle. ``unrelated`` sends a question that has nothing to do with the conversation. ``asked`` asks the probes
themselves, each in a request of its own: all of them, or some of a case, evenly over it, where they are many.

Beside it: how often the record of older turns is rewritten while a conversation grows, and which pinned facts are lost
when a client goes on with compacted messages and they are compacted again, six times.
"""

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track

from engine.chat_template import ChatTokenizer
from engine.model_store import resolve_model
from eval.benches.history_arms import (
    Conversation,
    Messages,
    asked_turns,
    bm25_turns,
    last_turns,
    one_selection,
    oracle_turns,
    sent_text,
    share_answered,
)
from eval.benches.history_records import (
    BUDGET,
    NUM_COMPACTIONS,
    OURS,
    Asked,
    Cell,
    Compactions,
    Growth,
    Result,
    SetResult,
    print_result,
)
from eval.datasets import Dataset, read_dataset
from eval.intervals import PairedDifference, compare, estimate, percentile
from eval.manifest import make_manifest
from reducer.blocks import RECORD_CLOSING, RECORD_OPENING
from reducer.config import ReducerConfig
from reducer.encoder import SentenceTransformerEncoder
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller, PromptParts
from reducer.result import ReductionResult
from reducer.summary import SummaryCache
from reducer.template import message_text
from reducer.turn_extracts import TurnExtract, is_secondary
from reducer.turns import read_turn

SETS = ("sgd-history", "locomo-history")
BASELINES = ("last turns", "bm25 turns")
NUM_ASKED: Mapping[str, int | None] = {"sgd-history": 3, "locomo-history": None}
"""Probes of a case that are asked, all where none is said."""
UNRELATED = "Write a haiku about the sea."
NUM_GROWN = 5
NUM_COMPACTED = 20


class Bench:
    """Holds tokenizer and encoder; scores one set after the other."""

    def __init__(self, budgets: Sequence[float], seed: int, num_asked: int | None) -> None:
        self._budgets = budgets
        self._seed = seed
        self._num_asked = num_asked
        self._counter = ChatTokenizer.from_path(resolve_model("smollm2-135m-instruct"))
        self._encoder = SentenceTransformerEncoder(resolve_model("all-minilm-l6-v2"))

    def run(self, dataset: Dataset, console: Console) -> SetResult:
        """All arms on all cases of a set."""
        scores: dict[tuple[str, float], list[float]] = {}
        tokens: dict[tuple[str, float], list[float]] = {}
        asked: dict[str, list[float]] = {}
        unrelated: list[float] = []
        num_probes: list[int] = []
        times_ms: list[float] = []
        name = dataset.name.removesuffix(".gz").removesuffix(".jsonl")
        conversations = [Conversation(case, self._counter) for case in dataset.cases]
        conversations = [conversation for conversation in conversations if conversation.probes]
        for conversation in track(conversations, description=name, console=console):
            num_probes.append(len(conversation.probes))
            question = conversation.case.question
            for budget in self._budgets:
                room = int(budget * conversation.full)
                started = time.perf_counter()
                result = self._reduce(conversation.messages, conversation.fixed + room)
                times_ms.append((time.perf_counter() - started) * 1000)
                kept: dict[str, tuple[str, int]] = {
                    OURS: (sent_text(result, question), result.prompt_tokens - conversation.fixed),
                    "last turns": last_turns(conversation, room),
                    "bm25 turns": bm25_turns(conversation, question, room),
                    "one selection": one_selection(conversation, self._counter, room),
                    "oracle turns": oracle_turns(conversation, room),
                }
                for arm, (text, num_tokens) in kept.items():
                    scores.setdefault((arm, budget), []).append(share_answered(conversation.probes, text))
                    tokens.setdefault((arm, budget), []).append(num_tokens / conversation.full)
            unrelated.append(share_answered(conversation.probes, self._sent_for(conversation, UNRELATED)))
            self._ask(conversation, asked)
        return SetResult(
            name=name,
            sha256=dataset.sha256,
            num_cases=len(conversations),
            num_probes=sum(num_probes),
            cells=[
                Cell(
                    arm=arm,
                    budget=budget,
                    answered=estimate(values, seed=self._seed),
                    answered_of_all=float(np.average(values, weights=num_probes)),
                    tokens_kept=float(np.mean(tokens[arm, budget])),
                )
                for (arm, budget), values in scores.items()
            ],
            versus_best=[self._versus_best(scores, budget) for budget in self._budgets],
            num_asked=len(asked[OURS]),
            asked=[
                Asked(
                    arm=arm,
                    budget=BUDGET,
                    answered=estimate(values, seed=self._seed),
                    ours_minus=None if arm == OURS else compare(asked[OURS], values, seed=self._seed),
                )
                for arm, values in asked.items()
            ],
            unrelated=estimate(unrelated, seed=self._seed),
            growth=self._growth(conversations[:NUM_GROWN]),
            compactions=self._compactions(conversations[:NUM_COMPACTED]),
            ms_median=percentile(times_ms, 0.5),
        )

    def _ask(self, conversation: Conversation, asked: dict[str, list[float]]) -> None:
        """The probes as questions, or some of them, evenly over the conversation."""
        cache = SummaryCache()
        num_asked = self._num_asked or len(conversation.probes)
        step = max(len(conversation.probes) // num_asked, 1)
        room = int(BUDGET * conversation.full)
        for probe in conversation.probes[::step][:num_asked]:
            sent = {OURS: self._sent_for(conversation, probe.question, cache)}
            sent |= asked_turns(conversation, probe.question, room, self._encoder.encode)
            for arm, text in sent.items():
                asked.setdefault(arm, []).append(share_answered([probe], text))

    def _sent_for(self, conversation: Conversation, question: str, cache: SummaryCache | None = None) -> str:
        """What is sent for another question than the case's own."""
        messages = [*conversation.messages[:-1], {"role": "user", "content": question}]
        fixed = self._counter.count_prompt([messages[0], messages[-1]])
        return sent_text(self._reduce(messages, fixed + int(BUDGET * conversation.full), cache), question)

    def _growth(self, conversations: Sequence[Conversation]) -> Growth:
        appended: list[int] = []
        rewritten: list[int] = []
        for conversation in conversations:
            cache = SummaryCache()
            limit = conversation.fixed + int(BUDGET * conversation.full)
            records = [
                record_of(self._reduce([*conversation.messages[:end], conversation.messages[-1]], limit, cache))
                for end in range(1, len(conversation.messages))
            ]
            pairs = [pair for pair in itertools.pairwise(records) if pair[0] != pair[1]]
            appended.append(sum(after.startswith(before) for before, after in pairs))
            rewritten.append(sum(not after.startswith(before) for before, after in pairs))
        return Growth(
            num_conversations=len(conversations),
            num_turns=float(np.mean([len(conversation.history) for conversation in conversations])),
            num_appended=float(np.mean(appended)),
            num_rewritten=float(np.mean(rewritten)),
        )

    def _compactions(self, conversations: Sequence[Conversation]) -> Compactions:
        """Facts of the older turns that are in no form in the last prompt."""
        num_facts = num_lost = num_reported = 0
        for conversation in conversations:
            limit = conversation.fixed + int(BUDGET * conversation.full)
            system, question = conversation.messages[0], conversation.messages[-1]
            bounds = np.linspace(0, len(conversation.history), NUM_COMPACTIONS + 1).astype(int)
            sent: list[Mapping[str, Any]] = [system]
            notes: list[str] = []
            for start, end in itertools.pairwise(bounds):
                result = self._reduce([*sent, *conversation.history[start:end], question], limit)
                notes += [stage.degraded for stage in result.stages if stage.degraded and "no room" in stage.degraded]
                sent = list(result.messages[:-1])
            text = "\n".join(message_text(message) for message in result.messages)
            said = TurnExtract([read_turn(0, {"role": "user", "content": text}, self._counter)], set())
            for pin in said.turns[0].pins:
                said.say_fact(pin.fact)
            folded = " ".join(text.casefold().split())
            for turn in conversation.turns(self._counter):
                for pin in turn.pins:
                    if not is_secondary(turn, pin.fact):
                        num_facts += 1
                        num_lost += not said.is_said(pin.fact) and pin.fact.key not in folded
            num_reported += bool(notes)
        return Compactions(
            num_conversations=len(conversations), num_facts=num_facts, num_lost=num_lost, num_reported=num_reported
        )

    def _reduce(self, messages: Messages, limit: int, cache: SummaryCache | None = None) -> ReductionResult:
        reducer = Reducer(ReducerConfig(min_prompt_tokens=0), self._counter, self._encoder, summary_cache=cache)
        parts = PromptParts(messages=tuple(messages))
        scope = "" if cache is None else "bench"
        return reducer.reduce(parts, budget=Budget(limit, "request"), caller=Caller(), cache_scope=scope)

    def _versus_best(
        self, scores: Mapping[tuple[str, float], Sequence[float]], budget: float
    ) -> tuple[float, str, PairedDifference]:
        mean: Callable[[str], float] = lambda arm: float(np.mean(scores[arm, budget]))  # noqa: E731
        best = max(BASELINES, key=mean)
        return budget, best, compare(scores[OURS, budget], scores[best, budget], seed=self._seed)


def record_of(result: ReductionResult) -> str:
    """The record of older turns in the messages, or nothing."""
    for message in result.messages:
        text = message_text(message)
        if text.startswith(RECORD_OPENING):
            return text.removeprefix(RECORD_OPENING).partition(RECORD_CLOSING.rstrip())[0]
    return ""


def run_set(dataset: Dataset, budgets: Sequence[float], seed: int, num_asked: int | None) -> SetResult:
    """One set, in a process of its own."""
    return Bench(budgets, seed, num_asked).run(dataset, Console(stderr=True))


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--budgets", default=str(BUDGET), show_default=True, help="Shares of the tokens, by comma.")
@click.option("--limit", type=int, help="Most cases of a set; all by default.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
def main(data: Path, budgets: str, limit: int | None, seed: int, output: Path | None) -> None:
    """Compare compacted histories with the usual ways to shorten a conversation."""
    shares = [float(budget) for budget in budgets.split(",")]
    datasets = [read_dataset(data / f"{name}.jsonl.gz", limit=limit) for name in SETS]
    manifest = make_manifest(
        dataset=datasets[0],
        settings={
            "sets": list(SETS),
            "limit": limit,
            "budgets": shares,
            "asked": {name: NUM_ASKED[name] or "all" for name in SETS},
            "unrelated": UNRELATED,
            "reducer": msgspec.to_builtins(ReducerConfig(min_prompt_tokens=0)),
        },
        seed=seed,
        model="smollm2-135m-instruct (tokenizer), all-minilm-l6-v2",
        max_model_len=None,
        started_gateway=False,
    )
    with ProcessPoolExecutor(len(datasets), multiprocessing.get_context("spawn")) as pool:
        runs = [
            pool.submit(run_set, data_set, shares, seed, NUM_ASKED[name])
            for name, data_set in zip(SETS, datasets, strict=True)
        ]
        result = Result(manifest=manifest, sets=[run.result() for run in runs])
    print_result(Console(width=160), result, shares)
    encoded = msgspec.json.encode(result)
    if output is not None:
        output.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    sys.stdout.write(json.dumps(json.loads(encoded)) + "\n")


if __name__ == "__main__":
    main()
