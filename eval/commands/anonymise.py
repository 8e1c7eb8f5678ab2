"""``firsttoken eval anonymise``: a production log becomes a trace that holds lengths, times and hashes, no text."""

import secrets
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from eval.commands.recall import check_folder
from eval.errors import DataError, EvalError
from eval.traces import Anonymiser, write_trace


@click.command("anonymise")
@click.argument("log", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--block-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="tokenizer.json of the served model; without it four bytes are a token.",
)
@click.option(
    "--salt", help="Key of the hashes, for several logs with common prefixes; by default drawn and forgotten."
)
def anonymise(log: Path, output: Path, block_tokens: int, tokenizer: Path | None, salt: str | None) -> None:
    """Keeps when requests came, how long they were and which began alike.

    LOG has one request a line: a time, the prompt or messages, and where known usage and session. OUTPUT is a trace for
    `firsttoken eval load --trace`.
    """
    key = secrets.token_bytes(32) if salt is None else salt.encode()
    try:
        check_folder("OUTPUT", output)
        anonymiser = Anonymiser(key, block_tokens, None if tokenizer is None else _encoder(tokenizer))
        lines = anonymiser.lines(log)
    except EvalError as error:
        raise click.UsageError(str(error)) from None
    write_trace(output, lines)
    total = sum(line.input_tokens for line in lines)
    span = lines[-1].t - lines[0].t
    console = Console()
    console.print(f"{len(lines)} requests over {span:,.0f} s, {total:,} input tokens: {output}", highlight=False)


class _Encoder:
    """Text to ids by a tokenizer file."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain exceptions for files that are none
            raise DataError(f"{file}: no tokenizer: {error}") from None

    def __call__(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _encoder(file: Path) -> _Encoder:
    return _Encoder(file)
