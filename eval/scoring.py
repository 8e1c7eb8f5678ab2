"""Deterministic scores: is the answer in a text, is the evidence in the prompt.

Texts are compared after NFKC and lower case. Latin answers must stand between word borders, answers with letters of
another script are looked up without spaces and punctuation::

    "The U.S. (1,998)"  ->  words " the u s 1 998 "        "iPhone 12 手机"  ->  squashed "iphone12手机"

Punctuation ends a word, and so does a change between Latin letters or digits and another script: in "1998年" the year
stands free, in "11998" it does not.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache

from eval.samples import Case, Chunk, GoldRange, Probe

Span = tuple[int, int]
KeptText = Mapping[str, Sequence[Span]]
"""Id of every chunk whose text is in the prompt -> character ranges of it that are."""


@lru_cache(maxsize=1 << 16)
def _is_latin(char: str) -> bool:
    return char.isascii() or unicodedata.name(char, "").startswith("LATIN")


def _stands_alone(char: str) -> bool:
    """A letter of a script that is compared without word borders."""
    return char.isalpha() and not _is_latin(char)


def words(text: str) -> str:
    """``text`` as words with one space around each, so that ``" word "`` is found with ``in``."""
    pieces: list[str] = []
    for char in unicodedata.normalize("NFKC", text).lower():
        if _stands_alone(char):
            pieces.append(f" {char} ")
        elif char.isalnum() or unicodedata.category(char).startswith("M"):
            pieces.append(char)
        else:
            pieces.append(" ")
    return f" {' '.join(''.join(pieces).split())} "


def squash(text: str) -> str:
    """``text`` reduced to its letters and digits."""
    return "".join(char for char in unicodedata.normalize("NFKC", text).lower() if char.isalnum())


class SearchText:
    """A text prepared once for many look-ups."""

    __slots__ = ("squashed", "words")

    def __init__(self, text: str) -> None:
        self.words = words(text)
        self.squashed = squash(text)

    def states(self, answer: str) -> bool:
        """Whether the text contains the answer. An answer without letters and digits is never contained."""
        if any(_stands_alone(char) for char in unicodedata.normalize("NFKC", answer)):
            return squash(answer) in self.squashed
        looked_up = words(answer)
        return bool(looked_up.strip()) and looked_up in self.words

    def holds(self, passage: str) -> bool:
        """Whether all letters and digits of ``passage`` stand in the text in one piece."""
        squashed = squash(passage)
        return bool(squashed) and squashed in self.squashed


def answer_score(case: Case, text: SearchText) -> float:
    """1 if the text states an accepted answer (one alternative of every answer group), else 0."""
    groups = case.answer_groups or [case.answers]
    return float(all(any(text.states(answer) for answer in group) for group in groups))


def has_scored_answer(case: Case) -> bool:
    """Whether the passages can be asked for an answer at all: it is short, and a gold chunk states it."""
    return bool(case.answers) and case.answer_in_gold is not False and not case.is_history


def evidence_score(case: Case, kept: KeptText) -> float | None:
    """Share of the evidence that is kept, by the rule that the case names; ``None`` without gold chunks.

    A gold chunk counts when it or a gold copy of it is kept. Nothing kept is 0 by every rule.
    """
    gold = [chunk for chunk in case.chunks if chunk.gold]
    if case.evidence == "coverage":
        ranges = case.gold_ranges()
        return _coverage(case, kept, ranges) if ranges else None
    if not gold:
        return None
    if case.evidence == "groups":
        wanted = {group for chunk in gold for group in chunk.groups}
        if wanted:
            found = {group for chunk in gold if chunk.id in kept for group in chunk.groups}
            return len(found) / len(wanted)
    if case.evidence in ("all", "groups"):
        clusters = {chunk.cluster for chunk in gold if chunk.gold_kind == "annotated"} or {c.cluster for c in gold}
        found = {chunk.cluster for chunk in gold if chunk.id in kept}
        return len(clusters & found) / len(clusters)
    return float(any(chunk.id in kept for chunk in gold))


def support_score(case: Case, text: SearchText) -> float | None:
    """Share of the annotated supporting sentences that stand in the text; ``None`` where none are annotated."""
    sentences = {sentence for chunk in case.chunks if chunk.gold for sentence in chunk.support}
    if not sentences:
        return None
    return sum(text.holds(sentence) for sentence in sentences) / len(sentences)


def gold_text_share(case: Case, kept: KeptText) -> float | None:
    """How much of the kept gold chunks' text is in the prompt, 0 to 1: trimming shows here.

    Mean over the clusters with a kept gold chunk, each by its most complete copy; ``None`` where none is kept.
    """
    shares: dict[str, float] = {}
    for chunk in case.chunks:
        if chunk.gold and chunk.id in kept and chunk.text:
            share = sum(end - start for start, end in kept[chunk.id]) / len(chunk.text)
            shares[chunk.cluster] = max(share, shares.get(chunk.cluster, 0.0))
    return sum(shares.values()) / len(shares) if shares else None


def scored_probes(case: Case) -> list[Probe]:
    """Probes that a text can be asked for: their answer stands word for word in the history."""
    return [probe for probe in case.probes if probe.verbatim]


def probe_score(case: Case, text: SearchText) -> float | None:
    """Share of the probes whose answer the compacted history states; ``None`` without probes to ask."""
    probes = scored_probes(case)
    if not probes:
        return None
    return sum(any(text.states(answer) for answer in probe.answers) for probe in probes) / len(probes)


def turns_score(case: Case, text: SearchText) -> float | None:
    """Share of the probes whose turns stand verbatim in the compacted history.

    One of its turns is enough where each states the answer (``verbatim``), else all are needed.
    """
    probes = [probe for probe in case.probes if probe.turns]
    if not probes:
        return None
    standing = {turn for probe in probes for turn in probe.turns if text.holds(case.history[turn].content)}
    found = sum((any if probe.verbatim else all)(turn in standing for turn in probe.turns) for probe in probes)
    return found / len(probes)


def _coverage(case: Case, kept: KeptText, ranges: Sequence[GoldRange]) -> float:
    """Share of the characters of the gold ranges that lie in kept windows of their document."""
    gold_sources = {chunk.source for chunk in case.chunks if chunk.gold}
    wanted: set[tuple[str | None, int]] = set()
    covered: set[tuple[str | None, int]] = set()
    for gold in ranges:
        sources = {gold.source} if gold.source is not None else gold_sources
        # Without a source the range lies in one document, whichever gold chunk names it: key it by None.
        wanted.update((gold.source, place) for place in range(gold.start, gold.end))
        for chunk in case.chunks:
            if chunk.id in kept and chunk.span is not None and (chunk.source in sources or not sources):
                for start, end in _places(chunk, kept[chunk.id]):
                    covered.update((gold.source, place) for place in range(start, end))
    return len(wanted & covered) / len(wanted) if wanted else 0.0


def _places(chunk: Chunk, spans: Sequence[Span]) -> list[Span]:
    """The kept spans of a window as ranges of its document.

    A copy with other whitespace has another length than its window; offsets do not map there, so all of it counts.
    """
    assert chunk.span is not None, "only windows have a place in their document"
    start, end = chunk.span
    if len(chunk.text) != end - start:
        return [(start, end)]
    return [(start + low, start + high) for low, high in spans]
