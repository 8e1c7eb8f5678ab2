"""What choosing tokens adds to a decode step, by kind of request, and the batched sampler against one row at a time.

    python -m eval.benches.bench_sampling --output eval/results/sampling.json

Kinds take turns, step by step, on one thread; times are its processor time, and a ratio is the median of the ratios
within a round, so that what else the machine does hits both sides alike. The reference is the formula as everybody
writes it first: for each row softmax, sort, cumulated sum, draw.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec
import torch
from rich.console import Console
from rich.table import Table

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.grammar import GrammarCompiler
from engine.model_catalogue import DEFAULT_LANGUAGE_MODEL
from engine.model_runner import ModelRunner
from engine.model_store import resolve_model
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.scheduler_output import ScheduledSequence, SchedulerOutput
from engine.tokenizer import Tokenizer
from eval.manifest import MachineManifest, make_machine_manifest
from eval.records import encode_report

CONTEXT, BLOCK_SIZE, SEED = 64, 16, 0
_SCHEMA = json.dumps({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "top_k": SamplingParams(top_k=50),
    "top_p": SamplingParams(temperature=0.7, top_p=0.95),
    "top_p, seed": SamplingParams(temperature=0.7, top_p=0.95, seed=1),
    "penalties": SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "logprobs": SamplingParams(temperature=0.0, top_logprobs=20),
    "json": SamplingParams(temperature=0.0, json_schema=_SCHEMA),
}
_REFERENCE_KINDS = ("greedy", "plain", "top_k", "top_p")


class KindResult(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request in one batch size."""

    kind: str
    batch_size: int
    step_ms: float
    """Of the whole decode step: forward pass, logits, choice."""
    over_greedy: float
    """Step over the greedy step of its round."""
    reference_over_sampler: float | None
    """Choosing one row at a time over choosing all at once, without the forward pass; above 1 is better for ours."""


class SamplingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench."""

    manifest: MachineManifest
    vocab_size: int
    num_rounds: int
    kinds: list[KindResult]


def sample_ref(logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> list[int]:
    """One row at a time, as the formulas say."""
    tokens = []
    for row, params in zip(logits, sampling, strict=True):
        if params.temperature == 0.0:
            tokens.append(int(row.argmax()))
            continue
        values, ids = (row / params.temperature).sort(descending=True)
        if params.top_k:
            values, ids = values[: params.top_k], ids[: params.top_k]
        probabilities = values.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= params.top_p, 0.0)
        tokens.append(int(ids[torch.multinomial(probabilities, 1)]))
    return tokens


class DecodeSteps:
    """Decode steps of one runner, each at the same place, so that all kinds compute the same."""

    def __init__(self, runner: ModelRunner, batch_size: int) -> None:
        """Computes the prompts."""
        self.runner = runner
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(0, runner.spec.vocab_size, (batch_size, CONTEXT), generator=generator)
        self.prompts: list[list[int]] = ids.tolist()
        num_blocks = CONTEXT // BLOCK_SIZE + 1
        self.blocks = [list(range(row * num_blocks, (row + 1) * num_blocks)) for row in range(batch_size)]
        for row, prompt in enumerate(self.prompts):
            self._execute([self._scheduled(row, prompt, 0, SamplingParams(), "prompt")])

    def step(self, kind: str) -> None:
        """One token for every sequence."""
        params = KINDS[kind]
        self._execute([self._scheduled(row, [5], CONTEXT, params, kind) for row in range(len(self.prompts))])

    def _scheduled(
        self, row: int, token_ids: list[int], start: int, params: SamplingParams, kind: str
    ) -> ScheduledSequence:
        known = self.prompts[row]
        return ScheduledSequence(
            request_id=f"{kind} {row}",
            token_ids=token_ids,
            start=start,
            block_ids=self.blocks[row],
            sampling=params,
            needs_sample=True,
            num_output_tokens=0 if params.json_schema else CONTEXT // 2,
            known_token_ids=known,
        )

    def _execute(self, scheduled: list[ScheduledSequence]) -> None:
        output = self.runner.execute(SchedulerOutput(scheduled=scheduled))
        assert not output.failed, f"a step failed: {output.failed}"


def measure(runner: ModelRunner, batch_size: int, num_rounds: int) -> list[KindResult]:
    """All kinds in turns."""
    steps = DecodeSteps(runner, batch_size)
    logits = runner.logits(steps.prompts[0])[:batch_size].contiguous()
    logits = logits.repeat(-(-batch_size // len(logits)), 1)[:batch_size]
    sampler = Sampler()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ratios: dict[str, list[float]] = {kind: [] for kind in _REFERENCE_KINDS}
    for number in range(num_rounds + 1):
        for kind, params in KINDS.items():
            seconds = _seconds(lambda kind=kind: steps.step(kind))  # type: ignore[misc]
            if number:  # the first round warms up
                times[kind].append(seconds)
            if kind in ratios and number:
                rows = [params] * batch_size
                ours = _seconds(lambda rows=rows: sampler.sample(logits, rows, [0] * batch_size))  # type: ignore[misc]
                theirs = _seconds(lambda rows=rows: sample_ref(logits, rows))  # type: ignore[misc]
                ratios[kind].append(theirs / ours)
    return [
        KindResult(
            kind=kind,
            batch_size=batch_size,
            step_ms=round(statistics.median(times[kind]) * 1e3, 3),
            over_greedy=round(
                statistics.median(mine / greedy for mine, greedy in zip(times[kind], times["greedy"], strict=True)), 4
            ),
            reference_over_sampler=round(statistics.median(ratios[kind]), 2) if kind in ratios else None,
        )
        for kind in KINDS
    ]


def _seconds(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


@click.command()
@click.option("--model", default=DEFAULT_LANGUAGE_MODEL, show_default=True)
@click.option("--batch", "batch_sizes", type=int, multiple=True, default=(1, 8, 32), show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
def main(model: str, batch_sizes: tuple[int, ...], rounds: int, output: Path | None) -> None:
    """Measure choosing tokens."""
    path = resolve_model(model)
    tokenizer = Tokenizer.from_path(path)
    config = EngineConfig(
        model=ModelConfig(dtype="bf16"),
        cache=CacheConfig(num_blocks=max(batch_sizes) * (CONTEXT // BLOCK_SIZE + 1), block_size=BLOCK_SIZE),
        num_threads=1,
    )
    runner = ModelRunner(config, path, eos_token_ids=tokenizer.eos_token_ids, grammars=GrammarCompiler(tokenizer))
    kinds = [result for size in batch_sizes for result in measure(runner, size, rounds)]
    settings = {"model": model, "batch_sizes": list(batch_sizes), "rounds": rounds, "context": CONTEXT}
    report = SamplingReport(
        manifest=make_machine_manifest(settings=settings, seed=SEED),
        vocab_size=runner.spec.vocab_size,
        num_rounds=rounds,
        kinds=kinds,
    )
    table = Table(title="choosing tokens: processor time of one thread", title_justify="left")
    for column in ("batch", "kind", "step ms", "over greedy", "reference / sampler"):
        table.add_column(column, justify="right" if column != "kind" else "left")
    for result in kinds:
        ratio = "–" if result.reference_over_sampler is None else f"{result.reference_over_sampler:.1f}"
        table.add_row(str(result.batch_size), result.kind, f"{result.step_ms:.2f}", f"{result.over_greedy:.3f}", ratio)
    Console(file=sys.stderr).print(table)
    encoded = encode_report(report)
    if output is not None:
        output.write_bytes(encoded)
    click.echo(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    main()
