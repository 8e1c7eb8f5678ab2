"""``firsttoken compact``: what a request would send to the model, from a running gateway or computed here."""

import sys
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.config_file import load_settings
from app.errors import GatewayError, answer_of
from app.local_compaction import compact_here
from engine.errors import EngineError
from reducer.errors import ReducerError

TIMEOUT_S = 120.0
MAX_CELL_CHARS = 200


@click.command()
@click.argument("file", type=click.File("rb"), default="-")
@click.option("--url", help="A running gateway, e.g. http://127.0.0.1:8080; without it the prompt is reduced here.")
@click.option("--api-key", envvar="FIRSTTOKEN_API_KEY", default="sk-acme-demo", show_default="the demo key of acme")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Configuration, where reduced here.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")
def compact(file: Any, url: str | None, api_key: str, config_file: Path | None, as_json: bool) -> None:
    """Show what the request in FILE (JSON; standard input by default) would send to the model."""
    body: bytes = file.read()
    if url is not None:
        answer = _ask(url, api_key, body)
    else:
        try:
            answer = compact_here(load_settings(config_file).settings, api_key, body)
        except (GatewayError, ReducerError, EngineError) as error:
            told = answer_of(error)
            text = str(error) if told.status >= 500 else told.message
            hint = " Name one of your configuration with --api-key." if told.status == 401 else ""
            raise click.ClickException(text + hint) from error
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(answer, indent=2) + b"\n")
        return
    show(msgspec.json.decode(answer))


def _ask(url: str, api_key: str, body: bytes) -> bytes:
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    try:
        response = httpx.post(f"{url.rstrip('/')}/v1/compact", content=body, headers=headers, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        raise click.ClickException(f"{url} does not answer: {error}") from error
    if response.status_code != 200:
        raise click.ClickException(f"HTTP {response.status_code}: {_message(response)}")
    return response.content


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def show(answer: dict[str, Any]) -> None:
    """Prints tokens by stage and the decision about every document."""
    console = Console()
    before, after, budget = answer["original_prompt_tokens"], answer["prompt_tokens"], answer["budget"]
    console.print(
        f"{before} tokens -> {after} tokens, {max(0, before - after)} saved; "
        f"budget {budget['max_input_tokens']} ({budget['source']})",
        highlight=False,
    )
    stages = Table("stage", "before", "after", "ms", "fell back because", title="tokens of documents and history")
    for stage in answer["stages"]:
        stages.add_row(
            stage["stage"],
            str(stage["tokens_before"]),
            str(stage["tokens_after"]),
            f"{stage['ms']:.1f}",
            plain(stage["degraded"] or ""),
        )
    console.print(stages)
    if answer["documents"]:
        documents = Table("document", "label", "action", "before", "after", "score", "reason", title="documents")
        for entry in answer["documents"]:
            documents.add_row(
                plain(entry["id"]),
                plain(entry["label"] or ""),
                entry["action"],
                str(entry["tokens_before"]),
                str(entry["tokens_after"]),
                "" if entry["score"] is None else f"{entry['score']:.2f}",
                plain(entry["reason"] + (f" -> {entry['merged_into']}" if entry["merged_into"] else "")),
            )
        console.print(documents)
    if answer["denied_documents"]:
        num_denied = answer["denied_documents"]
        console.print(f"{num_denied} document{'' if num_denied == 1 else 's'} denied", highlight=False)


def plain(text: str) -> Text:
    """A text as it is: brackets are no markup, and nothing in a document's id commands the terminal."""
    shown = text if len(text) <= MAX_CELL_CHARS else f"{text[:MAX_CELL_CHARS]}…"
    return Text("".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in shown))
