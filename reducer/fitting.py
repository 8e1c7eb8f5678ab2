"""Fitting: select, render and count until the exact count of the rendered prompt is within the budget.

Selection works with counts of pieces, which add up to the exact count but for a few tokens where pieces meet. So one
exact count mostly settles it; another round follows when it is over the limit, or when much of the budget is unused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reducer.history import Conversation, HistoryOutcome
from reducer.prompt import WireMessage
from reducer.selection import SelectionOutcome
from reducer.stage import Selected
from reducer.template import prepend_documents

MAX_ROUNDS = 6
"""Exact counts for one prompt, the empty one not included."""
USEFUL_SLACK_TOKENS = 16
"""Unused budget worth another round of selection."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt within the budget."""

    selection: SelectionOutcome
    messages: list[dict[str, Any]]
    prompt_tokens: int


def render_messages(
    messages: Sequence[WireMessage], history: HistoryOutcome, conversation: Conversation, block: str
) -> list[dict[str, Any]]:
    """The messages to be sent, in the order received.

    The record of older turns stands in front of the first kept turn; recalled turns and the documents block stand in
    the last user message.
    """
    kept = {*history.kept, *conversation.protected}
    first = min(history.kept, default=conversation.question)
    rendered: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if index not in kept:
            continue
        front = history.record if index == first else ""
        if index == conversation.question:
            rendered.append(prepend_documents(message, front + history.recalled + block))
        elif front and message.get("role") == "user":
            rendered.append(prepend_documents(message, front))
        else:
            if front:
                rendered.append({"role": "user", "content": front.rstrip("\n")})
            rendered.append(dict(message))
    return rendered


def fit_documents(
    select: Callable[[int], SelectionOutcome],
    render: Callable[[Sequence[Selected]], list[dict[str, Any]]],
    count: Callable[[Sequence[Mapping[str, Any]]], int],
    *,
    allowance: int,
    max_tokens: int,
) -> Fitted | None:
    """The largest selection found whose rendered prompt has at most ``max_tokens`` tokens.

    ``select`` chooses passages for an allowance in tokens. ``None`` when the prompt is too long without any passage.
    """
    best: Fitted | None = None
    for _ in range(MAX_ROUNDS):
        selection = select(allowance)
        if best is not None and selection.selected == best.selection.selected:
            return best
        messages = render(selection.selected)
        prompt_tokens = count(messages)
        if prompt_tokens > max_tokens:
            if best is not None or not selection.selected:
                return best
            allowance -= prompt_tokens - max_tokens
            continue
        best = Fitted(selection, messages, prompt_tokens)
        slack = max_tokens - prompt_tokens
        if not selection.is_budget_bound or slack < USEFUL_SLACK_TOKENS:
            return best
        allowance += slack
    if best is None:
        selection = select(0)
        messages = render(selection.selected)
        prompt_tokens = count(messages)
        best = Fitted(selection, messages, prompt_tokens) if prompt_tokens <= max_tokens else None
    return best
