"""What comes out of the reducer: the prompt, and what was kept, dropped and why."""

from typing import Any, Literal

import msgspec

PassageAction = Literal["kept", "trimmed", "merged", "dropped"]
TurnAction = Literal["kept", "summarised", "recalled", "dropped"]


class PassageOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where in the messages a recognised passage stood; its decision's spans count from ``start``."""

    message: int
    """Index of the message as received."""
    part: int | None = None
    """Index of its content part; ``None`` where the content is text."""
    start: int
    end: int


class PassageDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one passage the caller may read."""

    id: str
    action: PassageAction
    reason: str
    score: float | None = None
    """Fused relevance of the rank stage, 0 to 1."""
    label: str | None = None
    """Citation label in the prompt, e.g. ``[1]``; ``None`` unless its own text is in the prompt."""
    tokens_before: int
    tokens_after: int
    spans: list[tuple[int, int]] = []
    """Character offsets into the text as received; the kept text is exactly these spans."""
    merged_into: str | None = None
    """The passage that stands for this one."""
    sources: list[str] = []
    """Ids of all passages this one stands for, its own first."""
    origin: PassageOrigin | msgspec.UnsetType = msgspec.UNSET
    """Of a passage that was recognised inside a message."""


class TurnDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one message of the history; ``index`` is its place in the messages as received."""

    index: int
    action: TurnAction
    reason: str
    tokens_before: int
    tokens_after: int


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: tokens of passages and history before and after, its time, and whether it fell back."""

    stage: str
    tokens_before: int
    tokens_after: int
    ms: float
    degraded: str | None = None
    """Why the stage used a cheaper method than configured."""
    failure: str | msgspec.UnsetType = msgspec.UNSET
    """The error after which the stage was left out, as its type and place; nothing of the request is in it."""


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """The budget that was in force."""

    max_input_tokens: int
    source: str


class VolatileReport(msgspec.Struct, frozen=True, kw_only=True):
    """A field in system text that changes from request to request; no text of it, only where it stands."""

    kind: str
    """``clock``, ``date``, ``uuid``, ``request_id``, ``user_name`` or ``counter``."""
    message: int
    """Index of the message as received."""
    start: int
    end: int
    is_moved: bool
    """Whether it now stands behind the documents."""


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the prompt can be the same for every request."""

    stable_tokens: int
    """Tokens of system text and tools up to the first volatile field that is left there."""
    block_size: int
    lost_tokens: int
    """Tokens of the last, partly filled block: they are computed again each time."""
    is_exact: bool = True
    """Whether the tokens were compared; else the marks of the chat template are not counted."""
    volatile: list[VolatileReport] = []


class ReductionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The compacted prompt and the record that explains and reverses every decision."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt_tokens: int
    """Exact count of the rendered prompt, template and tools included."""
    original_prompt_tokens: int
    """The same count with every readable passage and turn in place."""
    budget: BudgetReport
    documents: list[PassageDecision]
    denied_documents: int
    turns: list[TurnDecision]
    stages: list[StageReport]
    prefix: PrefixReport | None = None
    """Facts for the engine's prefix cache; ``None`` where the request bypassed the reducer."""
    deadline_expired: bool = False
    """Whether the time limit passed and stages were left out; which, say their reports."""
    pass_through: str | None = None
    """Why nothing was changed, if nothing was."""
