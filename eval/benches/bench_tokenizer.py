"""The engine's tokenizer, which encodes by tiktoken where it may, against the ``tokenizers`` library.

    python -m eval.benches.bench_tokenizer --output eval/results/tokenizer.json

Both encode the same text in turns, in one process, by the processor time of one thread; a ratio is the median of the
ratios within a round. Ids are compared on the way: they are equal, or the bench fails.
"""

import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from engine.fast_encoder import PROBES
from engine.model_catalogue import DEFAULT_LANGUAGE_MODEL
from engine.model_store import resolve_model
from engine.tokenizer import Tokenizer
from engine.tokenizer_source import load_tokenizer_source
from eval.manifest import MachineManifest, make_machine_manifest
from eval.records import encode_report

_PROSE = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
TEXTS = {
    "a question": "Where does the summer party take place, and who brings the towels?",
    "prose, 2,000 characters": _PROSE[:2_000],
    "prose, 400,000 characters": _PROSE[:400_000],
    "every script, 20,000 characters": ("".join(PROBES) * 40)[:20_000],
    "Chinese and Japanese, 20,000 characters": (PROBES[3][:40] * 600)[:20_000],
}


class TextResult(msgspec.Struct, frozen=True, kw_only=True):
    """One text."""

    text: str
    num_tokens: int
    tokens_per_s: float
    """Of ours."""
    tokenizers_over_ours: float
    """Time of the library over ours; above 1 is better for ours."""


class TokenizerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench."""

    manifest: MachineManifest
    texts: list[TextResult]


def _seconds(work: Callable[[], list[int]], repeats: int) -> tuple[float, list[int]]:
    started = time.thread_time()
    for _ in range(repeats):
        token_ids = work()
    return (time.thread_time() - started) / repeats, token_ids


@click.command()
@click.option("--model", default=DEFAULT_LANGUAGE_MODEL, show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
def main(model: str, rounds: int, output: Path | None) -> None:
    """Measure encoding."""
    path = resolve_model(model)
    tokenizer, backend = Tokenizer.from_path(path), load_tokenizer_source(path).backend
    backend.encode_special_tokens = True
    if not tokenizer.wait_for_fast_encoder():
        raise click.ClickException(f"{model} has no fast encoder")
    results = []
    for name, text in TEXTS.items():
        repeats = max(1, 20_000 // len(text))
        ours, ratios = [], []
        for number in range(rounds + 1):
            theirs_s, expected = _seconds(
                lambda text=text: backend.encode_batch([text], add_special_tokens=False)[0].ids,  # type: ignore[misc]
                repeats,
            )
            ours_s, token_ids = _seconds(lambda text=text: tokenizer.encode(text), repeats)  # type: ignore[misc]
            if token_ids != expected:
                raise click.ClickException(f"the ids of {name!r} differ")
            if number:  # the first round warms up
                ours.append(ours_s)
                ratios.append(theirs_s / ours_s)
        results.append(
            TextResult(
                text=name,
                num_tokens=len(token_ids),
                tokens_per_s=round(len(token_ids) / statistics.median(ours)),
                tokenizers_over_ours=round(statistics.median(ratios), 2),
            )
        )
    report = TokenizerReport(
        manifest=make_machine_manifest(settings={"model": model, "rounds": rounds}, seed=0), texts=results
    )
    table = Table(title="encoding: processor time of one thread", title_justify="left")
    for column in ("text", "tokens", "tokens/s", "tokenizers / ours"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for result in results:
        table.add_row(
            result.text, f"{result.num_tokens:,}", f"{result.tokens_per_s:,.0f}", f"{result.tokenizers_over_ours:.1f}"
        )
    Console(file=sys.stderr).print(table)
    if output is not None:
        output.write_bytes(encode_report(report))
    click.echo(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    main()
