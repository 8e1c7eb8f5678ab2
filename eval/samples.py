"""One evaluation case: a question, its retrieved chunks or its chat history, and what counts as a right answer.

The Structs mirror the JSON of the data files. Fields they do not know are ignored, so that a file may carry more.
"""

from typing import Any, Literal

import msgspec

Evidence = Literal["any", "all", "groups", "coverage", "history"]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One earlier message of a chat."""

    role: str
    content: str


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One retrieved passage with its labels."""

    id: str
    text: str
    title: str | None = None
    source: str | None = None
    score: float | None = None
    """The retriever's score, higher is better."""
    gold: bool = False
    gold_kind: str | None = None
    """``annotated``, ``answer`` (a distractor that states the answer) or ``copy``."""
    dup_of: str | None = None
    """Head of the cluster of copies that this chunk belongs to; ``None`` for the head itself."""
    variant: str | None = None
    near_of: str | None = None
    """Looks like a copy of that chunk and states another fact: both must stay."""
    span: tuple[int, int] | None = None
    """Character range of the window in its document."""
    group: int | str | list[int | str] | None = None
    """Answer group (or groups) that this chunk is evidence for."""
    support: list[str] = []
    """Sentences of the chunk that carry the evidence."""

    @property
    def cluster(self) -> str:
        """Id shared by a chunk and all its copies."""
        return self.dup_of or self.id

    @property
    def groups(self) -> frozenset[str]:
        """Answer groups, as text."""
        if self.group is None:
            return frozenset()
        members = self.group if isinstance(self.group, list) else [self.group]
        return frozenset(str(member) for member in members)


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A question that a chat history answers."""

    question: str
    answers: list[str]
    turns: list[int] = []
    """Indexes of the history messages that hold the fact."""
    category: str | None = None
    verbatim: bool = False
    """An answer stands word for word in the history."""


class GoldRange(msgspec.Struct, frozen=True, kw_only=True):
    """Characters of a document that a good selection covers; without ``source``, of the gold chunks' documents."""

    start: int
    end: int
    source: str | None = None


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a data file."""

    id: str
    question: str
    dataset: str = ""
    lang: str = ""
    answers: list[str] = []
    """Accepted short answers, any of them."""
    answer_groups: list[list[str]] | None = None
    """Lists of alternatives; one alternative of each list is needed."""
    reference: str | None = None
    history: list[Turn] = []
    chunks: list[Chunk] = []
    evidence: Evidence = "any"
    answer_in_gold: bool | None = None
    """A gold chunk states an accepted answer; ``None`` where there is no short answer."""
    probes: list[Probe] = []
    gold_spans: list[Any] | None = None
    """``[start, end]``, ``[source, start, end]`` or ``{"start", "end", "source"}``."""

    def __post_init__(self) -> None:
        ids = {chunk.id for chunk in self.chunks}
        if len(ids) != len(self.chunks):
            raise ValueError(f"case {self.id!r} has {len(self.chunks)} chunks, but only {len(ids)} different ids")
        for probe in self.probes:
            if any(not 0 <= turn < len(self.history) for turn in probe.turns):
                raise ValueError(
                    f"case {self.id!r} has a probe on turns {probe.turns}, but {len(self.history)} turns of history"
                )
        self.gold_ranges()

    @property
    def is_history(self) -> bool:
        """Scored by probes on the compacted history instead of by chunks."""
        return self.evidence == "history" or not self.chunks

    def gold_ranges(self) -> list[GoldRange]:
        """``gold_spans`` in one shape. Raises ``ValueError`` for a shape that is none of the known ones."""
        return [self._gold_range(item) for item in self.gold_spans or []]

    def _gold_range(self, item: Any) -> GoldRange:
        match item:
            case [int(start), int(end)]:
                return GoldRange(start=start, end=end)
            case [str(source), int(start), int(end)]:
                return GoldRange(start=start, end=end, source=source)
            case {"start": int(start), "end": int(end)}:
                return GoldRange(start=start, end=end, source=item.get("source"))
        raise ValueError(f"case {self.id!r} has a gold span of unknown shape: {item!r}")
