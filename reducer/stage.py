"""The values that travel between the stages: candidates on their way in, and what each stage let go and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from reducer.prompt import Passage

FilterAction = Literal["merged", "dropped"]


class Span(NamedTuple):
    """Character offsets ``[start, end)`` into a passage's text as received."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A readable passage that is still in the running."""

    passage: Passage
    position: int
    """Place in the request, from 0; the citation label is this plus one."""
    num_tokens: int
    """Tokens of its text."""
    num_label_tokens: int
    """Tokens that label and title add when it is rendered."""
    sources: tuple[str, ...]
    """Ids it stands for, its own first."""
    score: float | None = None
    """Fused relevance, 0 to 1, from the rank stage on."""

    @property
    def label(self) -> str:
        """Citation label, e.g. ``[3]``."""
        return f"[{self.position + 1}]"


@dataclass(frozen=True, slots=True)
class Filtered:
    """A passage that a stage took out, and why."""

    candidate: Candidate
    action: FilterAction
    reason: str
    merged_into: str | None = None


@dataclass(frozen=True, slots=True)
class Selected:
    """A passage whose text goes into the prompt, whole or as spans."""

    candidate: Candidate
    spans: tuple[Span, ...]
    num_tokens: int
    """Tokens of the kept text."""
    reason: str

    @property
    def is_whole(self) -> bool:
        """Whether the whole text as received is kept."""
        return self.spans == whole_spans(self.candidate.passage.text)


KeptT = TypeVar("KeptT")


@dataclass(frozen=True, slots=True)
class StageOutcome(Generic[KeptT]):
    """What a stage kept and what it let go."""

    kept: Sequence[KeptT]
    filtered: Sequence[Filtered] = ()
    degraded: str | None = None
    """Why a cheaper method than configured was used."""


def whole_spans(text: str) -> tuple[Span, ...]:
    """The spans that keep all of ``text``; none for an empty text."""
    return (Span(0, len(text)),) if text else ()
