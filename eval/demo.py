"""``make demo``: one realistic request, with and without reduction, on a gateway of its own.

Thirty retrieved passages, a chat of ten turns and a small budget go through the whole path. Shown are the tokens after
every stage, what happened to each passage and why, the time to the first token of the full and of the reduced prompt,
both without help from the prefix cache, the same request again with it, and the answers.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.errors import ContextLengthError, EvalError
from eval.gateway import DEMO_KEYS, Compaction, DocumentDecision, GatewayClient, Generation, PromptRequest
from eval.launcher import started_gateway
from eval.report import NOTHING, bar, milliseconds
from eval.samples import Turn
from eval.scoring import SearchText

REQUEST_FILE = Path(__file__).with_name("demo_request.json")
_BAR_WIDTH = 44
_MAX_TOKENS = 48
_COLOURS = {"kept": "green", "trimmed": "cyan", "merged": "yellow", "dropped": "dim"}
_ORDER = ("kept", "trimmed", "merged", "dropped")


class DemoDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A passage of the request."""

    id: str
    text: str
    title: str | None = None
    source: str | None = None
    score: float | None = None
    acl: list[str] | None = None


class DemoRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of the demo, as written in ``demo_request.json``."""

    description: str
    question: str
    accepted_answers: list[str]
    max_input_tokens: int
    messages: list[Turn]
    """System prompt and history, without the question."""
    documents: list[DemoDocument]

    def prompt_request(self, *, bypass: bool = False) -> PromptRequest:
        """What the application sends; with ``bypass`` nothing is reduced."""
        turns = [*self.messages, Turn(role="user", content=self.question)]
        return PromptRequest(
            messages=[{"role": turn.role, "content": turn.content} for turn in turns],
            documents=[msgspec.to_builtins(document) for document in self.documents],
            max_input_tokens=None if bypass else self.max_input_tokens,
            bypass=bypass,
            max_tokens=_MAX_TOKENS,
        )


class DemoRun(NamedTuple):
    """Everything that was measured. ``full`` is ``None`` where the full prompt does not fit into the window."""

    full: Generation | None
    reduced: Generation
    repeated: Generation
    compaction: Compaction


def load_request() -> DemoRequest:
    """The request shipped with the package."""
    return msgspec.json.decode(REQUEST_FILE.read_bytes(), type=DemoRequest)


def measure(console: Console, client: GatewayClient, other: GatewayClient, request: DemoRequest) -> DemoRun:
    """Sends the request as two tenants, whose prefix caches are apart, so that full and reduced both start cold."""
    with console.status("warming up") as status:
        for tenant in (other, client):
            tenant.chat(_warm_up_request())
        status.update("answering from the full prompt (first tenant)")
        try:
            full = other.stream(request.prompt_request(bypass=True))
        except ContextLengthError:
            full = None
        status.update("answering from the reduced prompt (second tenant)")
        reduced = client.stream(request.prompt_request())
        status.update("the same request again")
        repeated = client.stream(request.prompt_request())
        # Last, because it finds the passages' embeddings cached; the measured requests must not.
        status.update("asking for the record of the reduction")
        compaction = client.compact(request.prompt_request())
    return DemoRun(full, reduced, repeated, compaction)


def _warm_up_request() -> PromptRequest:
    # Another system prompt than the demo's, so that no block of its prompts is cached.
    documents = [{"id": "a", "text": "Copper melts at 1,085 °C."}, {"id": "b", "text": "Tin melts at 232 °C."}]
    messages = [
        {"role": "system", "content": "Warm-up."},
        {"role": "user", "content": "Which one melts first, tin or copper?"},
    ]
    return PromptRequest(messages=messages, documents=documents, max_tokens=4)


def print_demo(console: Console, request: DemoRequest, run: DemoRun) -> None:
    """Prints the run, part by part."""
    compaction = run.compaction
    console.print()
    console.print(Text(request.question, style="bold"))
    console.print(
        f"{len(request.documents)} passages, {len(request.messages) - 1} earlier turns, at most "
        f"{compaction.budget.max_input_tokens:,} prompt tokens ({compaction.budget.source}); "
        f"{compaction.denied_documents} not readable by this tenant",
        style="dim",
    )
    console.print()
    console.print(_waterfall(compaction))
    console.print(_documents(compaction.documents))
    if compaction.turns:
        console.print(f"Earlier turns: {_counted([turn.action for turn in compaction.turns])}")
    console.print()
    console.print(_times(run))
    console.print(_answers(request, run))


def _waterfall(compaction: Compaction) -> Table:
    table = Table(title="Tokens of passages and history, stage by stage", title_justify="left", box=None)
    table.add_column("stage")
    table.add_column("tokens", justify="right")
    table.add_column("saved", justify="right")
    table.add_column("")
    table.add_column("ms", justify="right")
    stages = compaction.stages
    if stages:
        most = max(1, stages[0].tokens_before)
        table.add_row("received", f"{stages[0].tokens_before:,}", "", Text(bar(1.0, _BAR_WIDTH), style="blue"), "")
        for stage in stages:
            saved = stage.tokens_before - stage.tokens_after
            kept = bar(stage.tokens_after / most, _BAR_WIDTH)
            shown = Text(kept, style="blue")
            shown.append("░" * (round(stage.tokens_before / most * _BAR_WIDTH) - len(kept)), style="dim")
            note = f"{stage.stage} ({stage.degraded})" if stage.degraded else stage.stage
            table.add_row(note, f"{stage.tokens_after:,}", f"-{saved:,}" if saved else "", shown, f"{stage.ms:.1f}")
    saved = compaction.original_prompt_tokens - compaction.prompt_tokens
    table.add_section()
    table.add_row(
        "whole prompt", f"{compaction.prompt_tokens:,}", f"-{saved:,}", f"of {compaction.original_prompt_tokens:,}", ""
    )
    return table


def _documents(documents: Sequence[DocumentDecision]) -> Table:
    table = Table(title=f"Passages: {_counted([item.action for item in documents])}", title_justify="left")
    table.add_column("passage", no_wrap=True)
    table.add_column("action")
    table.add_column("tokens", justify="right")
    table.add_column("score", justify="right")
    table.add_column("why")
    ranks = {action: place for place, action in enumerate(_ORDER)}
    for item in sorted(documents, key=lambda decision: ranks.get(decision.action, len(ranks))):
        label = f"{item.id} {item.label}" if item.label else item.id
        reason = f"{item.reason} → {item.merged_into}" if item.merged_into else item.reason
        table.add_row(
            Text(label),
            item.action,
            f"{item.tokens_before} → {item.tokens_after}",
            NOTHING if item.score is None else f"{item.score:.2f}",
            Text(reason),
            style=_COLOURS.get(item.action, ""),
        )
    return table


def _counted(actions: Sequence[str]) -> str:
    counts = {action: actions.count(action) for action in sorted(set(actions))}
    return ", ".join(f"{count} {action}" for action, count in counts.items()) or "none"


def _times(run: DemoRun) -> Table:
    table = Table(title="Time to the first token", title_justify="left")
    table.add_column("prompt")
    for heading in ("prompt tokens", "cached tokens", "TTFT ms", "times faster"):
        table.add_column(heading, justify="right")
    rows = (
        ("full, cold cache", run.full),
        ("reduced, cold cache", run.reduced),
        ("reduced, sent again", run.repeated),
    )
    base = run.full.ttft_ms if run.full is not None else None
    for name, generation in rows:
        if generation is None:
            table.add_row(name, "does not fit", NOTHING, NOTHING, NOTHING)
            continue
        ttft = generation.ttft_ms
        table.add_row(
            name,
            f"{generation.prompt_tokens:,}",
            f"{generation.cached_tokens:,}",
            milliseconds(ttft),
            f"{base / ttft:.1f}" if base and ttft and generation is not run.full else NOTHING,
        )
    return table


def _answers(request: DemoRequest, run: DemoRun) -> Table:
    table = Table(title="Answers", title_justify="left", show_lines=True)
    table.add_column("full prompt", ratio=1)
    table.add_column("reduced prompt", ratio=1)
    texts = ["(does not fit)" if run.full is None else run.full.text.strip(), run.reduced.text.strip()]
    table.add_row(*(Text(text) for text in texts))
    verdicts = []
    for text in texts:
        search = SearchText(text)
        found = any(search.states(answer) for answer in request.accepted_answers)
        verdicts.append(Text("states the right fare" if found else "does not state the right fare", style="dim"))
    table.add_row(*verdicts)
    return table


def main() -> None:
    """Starts the gateway, runs the demo, stops the gateway."""
    console = Console()
    started = time.monotonic()
    request = load_request()
    try:
        with console.status("starting the gateway (loads the models)") as status, started_gateway(example=True) as url:
            status.stop()
            with (
                GatewayClient(url=url, api_key=DEMO_KEYS[0]) as client,
                GatewayClient(url=url, api_key=DEMO_KEYS[1]) as other,
            ):
                run = measure(console, client, other, request)
    except EvalError as error:
        console.print(Text(str(error), style="red"))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    print_demo(console, request, run)
    console.print(f"\nThe gateway is stopped. The demo took {time.monotonic() - started:.0f} s.", style="dim")


if __name__ == "__main__":
    main()
