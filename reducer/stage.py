"""The values that travel between the stages: candidates on their way in, and what each stage let go and why."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from reducer.prompt import Passage

FilterAction = Literal["merged", "dropped"]


class Span(NamedTuple):
    """Character offsets ``[start, end)`` into a passage's text as received."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SpanText:
    """A text made of spans of a received text, and the way back to them.

    Between two spans stands a joiner that is layout and belongs to neither: a line break where a tag ended a paragraph,
    a bar between two cells. What is kept of the text is therefore always spans of the received one:

        received  <p>Hello <b>world</b>.</p><p>Bye.</p>
        text      Hello world.\nBye.       spans (3, 9) (12, 17) (21, 22) | (29, 33)
    """

    text: str
    spans: tuple[Span, ...]
    """Offsets into the received text, ascending."""
    starts: tuple[int, ...]
    """Where each span begins in ``text``."""

    @classmethod
    def join(cls, received: str, pieces: Iterable[tuple[str, Span]]) -> "SpanText":
        """Build from ``(joiner before it, span)``; the first joiner is left out, touching spans are one."""
        parts: list[str] = []
        spans: list[Span] = []
        starts: list[int] = []
        length = 0
        for joiner, span in pieces:
            if span.end <= span.start:
                continue
            if spans and not joiner and spans[-1].end == span.start:
                spans[-1] = Span(spans[-1].start, span.end)
            else:
                if spans:
                    parts.append(joiner)
                    length += len(joiner)
                spans.append(span)
                starts.append(length)
            parts.append(received[span.start : span.end])
            length += span.end - span.start
        return cls("".join(parts), tuple(spans), tuple(starts))

    def narrow(self, received: str, inner: "SpanText") -> "SpanText":
        """The text that ``inner`` makes of this one, as spans of ``received``."""
        pieces: list[tuple[str, Span]] = []
        index, end, joiner = 0, 0, ""
        for kept, at in zip(inner.spans, inner.starts, strict=True):
            joiner += inner.text[end:at]
            end = at + kept.end - kept.start
            position = kept.start
            index = max(bisect_right(self.starts, kept.start) - 1, 0)
            while index < len(self.spans) and self.starts[index] < kept.end:
                start = self.starts[index]
                offset = self.spans[index].start - start
                low, high = max(position, start), min(kept.end, start + self.spans[index].end - self.spans[index].start)
                if low < high:
                    pieces.append((joiner + self.text[position:low], Span(low + offset, high + offset)))
                    joiner, position = "", high
                index += 1
            joiner += self.text[position : kept.end]
        return SpanText.join(received, pieces)

    def slice(self, start: int, end: int) -> "SpanText":
        """The part ``[start, end)`` of the text, which must begin and end inside a span."""
        pieces = [
            (Span(max(start, at) - at + span.start, min(end, at + span.end - span.start) - at + span.start), at)
            for span, at in zip(self.spans, self.starts, strict=True)
            if at < end and at + span.end - span.start > start
        ]
        return SpanText(
            self.text[start:end], tuple(span for span, _ in pieces), tuple(max(at - start, 0) for _, at in pieces)
        )

    def received_spans(self, kept: Iterable[Span]) -> tuple[Span, ...]:
        """Spans of the received text for spans of this one; joiners vanish."""
        found: list[Span] = []
        for start, end in kept:
            index = max(bisect_right(self.starts, start) - 1, 0)
            while index < len(self.spans) and self.starts[index] < end:
                offset = self.spans[index].start - self.starts[index]
                low = max(start, self.starts[index]) + offset
                high = min(end + offset, self.spans[index].end)
                if low < high:
                    if found and found[-1].end == low:
                        low = found.pop().start
                    found.append(Span(low, high))
                index += 1
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A readable passage that is still in the running."""

    passage: Passage
    position: int
    """Place in the request, from 0; the citation label is this plus one unless ``place`` is set."""
    num_tokens: int
    """Tokens of its text."""
    num_label_tokens: int
    """Tokens that label and title add when it is rendered."""
    sources: tuple[str, ...]
    """Ids it stands for, its own first."""
    is_linked: bool = False
    """Whether one of the best passages names it, or it names one of them."""
    score: float | None = None
    """Fused relevance, 0 to 1, from the rank stage on."""
    place: int | None = None
    """Place in the prompt, from 0, where the order calls for labels that follow it."""
    cleaned: SpanText | None = None
    """How the passage's text comes from the received one; ``None`` while it is the received text itself."""
    windows: tuple["Window", ...] = ()
    """The passages whose text this one's is stitched of, in reading order; none while it is one passage's own."""

    @property
    def label(self) -> str:
        """Citation label, e.g. ``[3]``."""
        return f"[{(self.position if self.place is None else self.place) + 1}]"


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a passage that stands in a stitched one; the next window begins inside it."""

    candidate: Candidate
    span: Span
    """Which characters of the candidate's text: all but white space at its edges."""
    start: int
    """Where they begin in the stitched text."""


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
        return self.candidate.cleaned is None and self.spans == whole_spans(self.candidate.passage.text)

    @property
    def received_spans(self) -> tuple[Span, ...]:
        """The kept spans as offsets into the text as received."""
        cleaned = self.candidate.cleaned
        return self.spans if cleaned is None else cleaned.received_spans(self.spans)


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
