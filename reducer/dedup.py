"""Dedup: a passage that says nothing another one does not say is merged into it.

Pairs are proposed cheaply (equal text without marks; MinHash LSH over character shingles, which needs no spaces) and
then verified one by one by the fact guard. A merged passage points at a survivor it was verified against itself:

    A in B and B in C verified, A in C not:  B goes into C, and A stays; never all three along the chain.

The survivor states all that the merged ones state. Among equals the higher score wins, then the more recent date of
the metadata, then the smaller id, so the order of the request plays no part. A passage in the header and footer of a
site is read by its body (``frames``), so copies wrapped in two different ones are one.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt
from datasketch import MinHash, MinHashLSH

from reducer.config import DedupConfig
from reducer.facts import Statement, contains, plain_text, state
from reducer.frames import body_span
from reducer.sentences import is_code, is_dense_script
from reducer.stage import Candidate, Filtered, StageOutcome

HashArray = npt.NDArray[np.uint64]

MAX_PARTNERS = 64
"""Passages that one passage is compared with at most, the better survivors first: thousands of passages of one pattern
must not cost the square of their number."""

MIN_CAPPED = 20
"""Different texts from which the share of merged ones is limited; fewer may well be one."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SKETCH_BATCH = 4096  # bounds the memory of one sketch update at a few megabytes


DATE_KEYS = (
    "updated_at", "updated", "last_modified", "modified", "published_at", "published", "date", "timestamp",
    "created_at", "created",
)  # fmt: skip
"""Fields of a passage's metadata that say how recent it is, the first one present: ISO 8601 or Unix seconds."""

Pairs = Sequence[tuple[int, int]]
"""Pairs ``(i, j)``, ``i < j``, of places in a sequence of passages."""


def deduplicate(
    candidates: Sequence[Candidate], config: DedupConfig, asked: AbstractSet[str] = frozenset()
) -> StageOutcome[Candidate]:
    """Merge passages into others that state the same or more. Survivors keep request order.

    ``asked`` are the index words of the question; furniture that shares one counts as part of what a passage states.
    """
    if not config.enabled or len(candidates) < 2:
        return StageOutcome(tuple(candidates))
    # Sorted by preference from here on: a smaller index is the better survivor.
    ordered, copies = _collapse(sorted(candidates, key=preference))
    statements = _Statements(ordered, config.min_length_share, asked)
    return _merge(ordered, copies, statements, propose_pairs(statements.bodies, config), config.max_merged_share)


def merge_pairs(
    ordered: Sequence[Candidate],
    pairs: Pairs,
    earlier: Sequence[Filtered],
    config: DedupConfig,
    asked: AbstractSet[str] = frozenset(),
) -> StageOutcome[Candidate]:
    """``deduplicate`` for candidates sorted by ``preference``, with pairs proposed from elsewhere, verified as there.

    ``earlier`` are passages that were merged into some of these; they go along only where the new survivor states what
    they state as well.
    """
    places = {candidate.passage.id: place for place, candidate in enumerate(ordered)}
    members: dict[int, list[int]] = {}
    for number, gone in enumerate(earlier):
        if gone.merged_into in places:
            members.setdefault(places[gone.merged_into], []).append(len(ordered) + number)
    statements = _Statements([*ordered, *(gone.candidate for gone in earlier)], config.min_length_share, asked)
    return _merge(ordered, [[] for _ in ordered], statements, pairs, config.max_merged_share, members)


def _merge(
    ordered: Sequence[Candidate],
    copies: Sequence[list[Candidate]],
    statements: "_Statements",
    pairs: Pairs,
    max_merged_share: float,
    standing: Mapping[int, Sequence[int]] | None = None,
) -> StageOutcome[Candidate]:
    container: dict[int, set[int]] = {index: set() for index in range(len(ordered))}
    behind = standing or {}

    def holds(outer: int, inner: int) -> bool:
        return statements.contains(outer, inner) and all(
            statements.states(outer, member) for member in behind.get(inner, ())
        )

    for first, second in pairs:
        if holds(first, second):
            container[second].add(first)
        if holds(second, first):
            container[first].add(second)
    merged = choose_survivors(container)
    num_over = len(merged) - int(max_merged_share * len(ordered)) if len(ordered) >= MIN_CAPPED else 0
    alarm: str | None = None
    if num_over > 0:
        share = (
            f"{len(merged)} of {len(ordered)} texts stand in others, more than max_merged_share {max_merged_share:g}"
        )
        alarm = f"{share}: {num_over} kept apart"
        for index in sorted(merged)[:num_over]:
            del merged[index]
    kept: list[Candidate] = []
    filtered: list[Filtered] = []
    members: dict[int, list[Candidate]] = {}
    for index, survivor in merged.items():
        members.setdefault(survivor, []).extend((ordered[index], *copies[index]))
        is_same = index in container[survivor]
        reason = "states the same" if is_same else "contained in another passage"
        target = ordered[survivor].passage.id
        filtered.extend(Filtered(gone, "merged", reason, target) for gone in (ordered[index], *copies[index]))
    for index, candidate in enumerate(ordered):
        if index in merged:
            continue
        filtered.extend(Filtered(copy, "merged", "states the same", candidate.passage.id) for copy in copies[index])
        others = sorted((*members.get(index, ()), *copies[index]), key=lambda member: member.position)
        sources = dict.fromkeys(source for member in (candidate, *others) for source in member.sources)
        kept.append(replace(candidate, sources=tuple(sources)))
    kept.sort(key=lambda candidate: candidate.position)
    filtered.sort(key=lambda gone: gone.candidate.position)
    return StageOutcome(kept, filtered, alarm)


def choose_survivors(container: Mapping[int, AbstractSet[int]]) -> dict[int, int]:
    """Which passage goes into which: ``{merged: survivor}``.

    ``container[i]`` are the passages that ``i`` may go into; smaller numbers are preferred, and of two that may go into
    each other the preferred one counts as the larger. A passage goes only into one that survives, and no two survivors
    may go into each other, so merging what is left again changes nothing.
    """
    larger = {
        index: {other for other in others if index not in container[other] or other < index}
        for index, others in container.items()
    }
    smaller: dict[int, list[int]] = {index: [] for index in container}
    for index, others in larger.items():
        for other in others:
            smaller[other].append(index)
    num_open = {index: len(others) for index, others in larger.items()}
    merged: dict[int, int] = {}
    decided: set[int] = set()
    # A passage is decided after all larger ones. In a circle, which no three texts should form, the best goes first.
    ready = sorted(index for index, num in num_open.items() if num == 0)
    while len(decided) < len(container):
        index = heappop(ready) if ready else min(container.keys() - decided)
        if index in decided:
            continue
        decided.add(index)
        survivors = larger[index] & (decided - merged.keys())
        if survivors:
            merged[index] = min(survivors)
        for other in smaller[index]:
            num_open[other] -= 1
            if num_open[other] == 0:
                heappush(ready, other)
    return merged


def _collapse(ordered: Sequence[Candidate]) -> tuple[list[Candidate], list[list[Candidate]]]:
    """Passages of different text or title, and the byte-equal copies of each: those need no comparison."""
    unique: list[Candidate] = []
    copies: list[list[Candidate]] = []
    places: dict[tuple[str | None, str], int] = {}
    for candidate in ordered:
        passage = candidate.passage
        place = len(unique)
        if passage.text.strip():  # an empty passage states nothing, so it repeats nothing
            place = places.setdefault((passage.title, passage.text), place)
        if place == len(unique):
            unique.append(candidate)
            copies.append([])
        else:
            copies[place].append(candidate)
    return unique, copies


class _Statements:
    """Statements of the passages, made when first needed."""

    def __init__(self, candidates: Sequence[Candidate], min_length_share: float, asked: AbstractSet[str]) -> None:
        self._min_length_share = min_length_share
        self._candidates = candidates
        self._styles: dict[int, str] = {}
        self._made: dict[tuple[int, str, bool], Statement] = {}
        self._titles: dict[int, Statement] = {}
        self.bodies = [_body(candidate, asked) for candidate in candidates]

    def contains(self, outer: int, inner: int) -> bool:
        """Whether ``outer`` states all that ``inner`` does, and is not so long that ``inner`` says it more briefly."""
        style = self._style(outer, inner)
        num_inner = len(self._statement(inner, style, is_body=True).tokens)
        num_outer = len(self._statement(outer, style, is_body=True).tokens)
        return num_inner >= self._min_length_share * num_outer and self.states(outer, inner)

    def states(self, outer: int, inner: int) -> bool:
        """Whether passage ``outer`` states all that ``inner`` states between its frames, its title included."""
        style = self._style(outer, inner)
        outer_statement = self._statement(outer, style, is_body=False)
        inner_statement = self._statement(inner, style, is_body=True)
        if not contains(outer_statement, inner_statement):
            return False
        inner_title = self._title(inner)
        if not inner_title.tokens or inner_title.tokens == self._title(outer).tokens:
            return True
        return inner_title.joined in outer_statement.joined

    def _style(self, first: int, second: int) -> str:
        """How a pair is read: as code or without spaces if either text asks for it."""
        styles = {self._own_style(first), self._own_style(second)}
        return "code" if "code" in styles else "dense" if "dense" in styles else "spaced"

    def _own_style(self, index: int) -> str:
        style = self._styles.get(index)
        if style is None:
            text = self._candidates[index].passage.text
            style = self._styles[index] = "code" if is_code(text) else "dense" if is_dense_script(text) else "spaced"
        return style

    def _statement(self, index: int, style: str, *, is_body: bool) -> Statement:
        text = self._candidates[index].passage.text
        is_body = is_body and self.bodies[index] != text
        made = self._made.get((index, style, is_body))
        if made is None:
            made = state(
                self.bodies[index] if is_body else text, as_code=style == "code", ignore_spaces=style == "dense"
            )
            self._made[index, style, is_body] = made
        return made

    def _title(self, index: int) -> Statement:
        made = self._titles.get(index)
        if made is None:
            made = self._titles[index] = state(self._candidates[index].passage.title or "")
        return made


def propose_pairs(texts: Sequence[str], config: DedupConfig) -> list[tuple[int, int]]:
    """Pairs ``(i, j)``, ``i < j``, worth verifying, the most similar first."""
    squashed = [squash(text) for text in texts]
    groups: dict[bytes, list[int]] = {}
    for index, text in enumerate(squashed):
        if text:
            groups.setdefault(hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest(), []).append(index)
    similar: dict[tuple[int, int], float] = {}
    for members in groups.values():
        for place, member in enumerate(members):
            similar.update(((other, member), 1.0) for other in members[: min(place, MAX_PARTNERS)])
    shingles = {index: shingle(text, config.shingle_size) for index, text in enumerate(squashed) if text}
    for first, second in _similar_pairs(shingles, config):
        if (first, second) in similar:
            continue
        share = containment(shingles[first], shingles[second])
        if share >= config.min_containment:
            similar[first, second] = share
    ranked = sorted(similar, key=lambda pair: (-similar[pair], pair))
    return ranked[: config.max_alignments]


def squash(text: str) -> str:
    """Letters and digits of a text, case folded: what is left when white space and punctuation do not count."""
    return "".join(filter(str.isalnum, plain_text(text).casefold()))


def shingle(text: str, size: int) -> HashArray:
    """Distinct hashes of all runs of ``size`` characters, ascending; a shorter text is one shingle."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    size = min(size, len(codes))
    hashes = np.zeros(len(codes) - size + 1, dtype=np.uint64)
    for offset in range(size):
        hashes = (hashes ^ codes[offset : offset + len(hashes)]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes >> np.uint64(32))


def containment(first: HashArray, second: HashArray) -> float:
    """Share of the smaller set's shingles that the other one holds."""
    smaller = min(len(first), len(second))
    return len(np.intersect1d(first, second, assume_unique=True)) / smaller if smaller else 0.0


def _similar_pairs(shingles: dict[int, HashArray], config: DedupConfig) -> Iterator[tuple[int, int]]:
    num_perm = config.num_bands * config.band_size
    index = MinHashLSH(num_perm=num_perm, params=(config.num_bands, config.band_size))
    for key, hashes in shingles.items():
        sketch = MinHash(num_perm=num_perm, hashfunc=int)
        for start in range(0, len(hashes), _SKETCH_BATCH):
            sketch.update_batch(hashes[start : start + _SKETCH_BATCH].tolist())
        matches: list[int] = sorted(index.query(sketch))
        for other in matches[:MAX_PARTNERS]:
            yield other, key
        if len(matches) < MAX_PARTNERS:  # else the passages there are the better survivors, and enough of them
            index.insert(key, sketch)


def preference(candidate: Candidate) -> tuple[float, float, str]:
    """Sort key among passages that state the same: the best survivor first."""
    passage = candidate.passage
    return (-(passage.score if passage.score is not None else 0.0), -recency_s(passage.metadata), passage.id)


MAX_UNIX_S = 10**15
"""Later than any date; a number beyond it is no moment."""


def recency_s(metadata: Mapping[str, Any]) -> float:
    """Unix seconds of the first date among ``DATE_KEYS``; minus infinity where there is none that can be read."""
    for key in DATE_KEYS:
        value = metadata.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            # Clamped: a whole number may be too long for a float.
            return float(max(-MAX_UNIX_S, min(value, MAX_UNIX_S)))
        if isinstance(value, str):
            try:
                moment = datetime.fromisoformat(value.strip())
                return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):
                continue
    return float("-inf")


def _body(candidate: Candidate, asked: AbstractSet[str]) -> str:
    passage = candidate.passage
    span = body_span(passage.text, passage.title, asked)
    return passage.text[span.start : span.end]
