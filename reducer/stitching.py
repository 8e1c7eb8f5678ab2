"""Stitching: overlapping windows of one source become one passage, so that what they share is sent once.

Two windows are joined where the end of one is, character for character, the beginning of the other:

    window 1   The fee is 20 dollars. It is due in May.
    window 2                          It is due in May. Late payment costs 5 dollars.
    stitched   The fee is 20 dollars. It is due in May. Late payment costs 5 dollars.

Nothing is lost and nothing is written: every character of the stitched text is one of a window, a shared one of both.
``Candidate.windows`` leads back to them, so the receipt shows for each window which of its text is in the prompt. The
stitched passage stands for all its windows and bears the label of the one with the most kept text.

Windows are stitched once they are chosen. Before, each is judged by itself: a long passage made of many would be chosen
whole for the sake of one sentence. What is saved goes into another round of selection.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from reducer.config import DedupConfig
from reducer.dedup import preference
from reducer.sentences import text_weight
from reducer.stage import Candidate, Selected, Span, Window
from reducer.template import GAP
from reducer.tokens import TokenCounter

MAX_GROUP_WINDOWS = 200
"""Windows of one source that are looked at, the better ones first."""
MAX_PLACES = 8
"""Places in a window where another may begin; in a text that repeats itself the first ones must do."""

_BREAK = "\n\x00\n"


class _Link(NamedTuple):
    """Window ``first`` up to ``first_end`` is followed by window ``second`` from ``second_start`` on."""

    overlap: int
    first: int
    second: int
    first_end: int
    second_start: int


def stitch(selected: Sequence[Selected], config: DedupConfig, counter: TokenCounter) -> tuple[Selected, ...]:
    """The chosen passages in the order given, overlapping windows of one source as one at the place of the first."""
    if not config.enabled or not config.stitch:
        return tuple(selected)
    groups: dict[tuple[str, str | None], list[int]] = {}
    for place, item in enumerate(selected):
        passage = item.candidate.passage
        if passage.source:
            groups.setdefault((passage.source, passage.title), []).append(place)
    stitched: dict[int, Selected | None] = dict(enumerate(selected))
    for places in groups.values():
        places.sort(key=lambda place: preference(selected[place].candidate))
        ordered = [selected[place] for place in places[:MAX_GROUP_WINDOWS]]
        for chain in _chains(_links([item.candidate.passage.text for item in ordered], config.min_overlap_chars)):
            members = sorted(places[index] for index in (chain[0].first, *(link.second for link in chain)))
            stitched.update(dict.fromkeys(members))
            stitched[members[0]] = _join(ordered, chain, counter)
    return tuple(item for item in stitched.values() if item is not None)


def window_spans(item: Selected) -> list[tuple[Candidate, tuple[Span, ...]]]:
    """For each window of a stitched passage the kept spans of its received text, in reading order."""
    found: list[tuple[Candidate, tuple[Span, ...]]] = []
    for window in item.candidate.windows:
        offset = window.span.start - window.start
        low, high = window.start, window.start + window.span.end - window.span.start
        own = tuple(
            Span(max(span.start, low) + offset, min(span.end, high) + offset)
            for span in item.spans
            if span.start < high and span.end > low
        )
        cleaned = window.candidate.cleaned
        found.append((window.candidate, own if cleaned is None else cleaned.received_spans(own)))
    return found


def own_sizes(item: Selected) -> list[int]:
    """For each window the kept characters that no earlier window has."""
    sizes: list[int] = []
    taken = 0
    for window in item.candidate.windows:
        end = window.start + window.span.end - window.span.start
        low = max(window.start, taken)
        sizes.append(sum(max(min(span.end, end) - max(span.start, low), 0) for span in item.spans))
        taken = max(taken, end)
    return sizes


def covered_chars(spans: Iterable[Span]) -> int:
    """Characters in ``spans``."""
    return sum(end - start for start, end in spans)


def _chains(links: Sequence[_Link]) -> list[list[_Link]]:
    """Links joined end to end, the largest overlaps first; each window has at most one before and one behind it."""
    followers: dict[int, _Link] = {}
    preceded: dict[int, _Link] = {}
    for link in sorted(links, key=lambda link: (-link.overlap, link)):
        if link.first in followers or link.second in preceded:
            continue
        start = link.first
        while start in preceded:
            start = preceded[start].first
        if start == link.second:
            continue  # a text that repeats itself would follow itself
        followers[link.first] = preceded[link.second] = link
    chains: list[list[_Link]] = []
    for start in sorted(followers):
        if start not in preceded:
            chains.append([followers[start]])
            while chains[-1][-1].second in followers:
                chains[-1].append(followers[chains[-1][-1].second])
    return chains


def _links(texts: Sequence[str], min_overlap_chars: int) -> list[_Link]:
    """All pairs of windows of which the second begins with the end of the first, and how much they share."""
    ends = [len(text.rstrip()) for text in texts]
    starts: list[int] = []
    joined = ""
    for text in texts:
        starts.append(len(joined))
        joined += text + _BREAK
    links: list[_Link] = []
    for second, text in enumerate(texts):
        begin = len(text) - len(text.lstrip())
        probe = _probe(text, begin, min_overlap_chars)
        if not probe:
            continue
        first, num_places = 0, 0
        at = joined.find(probe)
        while at >= 0:
            while first + 1 < len(starts) and starts[first + 1] <= at:
                first += 1
                num_places = 0
            place = at - starts[first]
            length = ends[first] - place
            is_found = (
                first != second
                and length >= len(probe)
                and begin + length < len(text.rstrip())
                and texts[first].startswith(text[begin : begin + length], place)
                and place > 0
            )
            num_places += 1
            if is_found or num_places >= MAX_PLACES:
                if is_found:
                    links.append(_Link(length, first, second, ends[first], begin + length))
                # The first place is the longest overlap with this window: go on behind it.
                at = joined.find(probe, starts[first] + len(texts[first]))
            else:
                at = joined.find(probe, at + 1)
    return links


def _probe(text: str, begin: int, min_overlap_chars: int) -> str:
    """The shortest beginning of a text that weighs ``min_overlap_chars``; empty where the text is lighter."""
    if text_weight(text[begin:]) < min_overlap_chars:
        return ""
    length = max(min_overlap_chars // 4, 1)
    while text_weight(text[begin : begin + length]) < min_overlap_chars:
        length += 1
    return text[begin : begin + length]


def _join(ordered: Sequence[Selected], chain: Sequence[_Link], counter: TokenCounter) -> Selected:
    """One passage of the windows along ``chain``; what is kept of any of them is kept of it."""
    text = ordered[chain[0].first].candidate.passage.text
    windows = [Window(ordered[chain[0].first].candidate, Span(0, chain[0].first_end), 0)]
    for link, following in zip(chain, [*chain[1:], None], strict=True):
        own = ordered[link.second].candidate.passage.text
        stop = len(own) if following is None else following.first_end
        end = windows[-1].start + link.first_end - windows[-1].span.start
        begin = link.second_start - link.overlap
        windows.append(Window(ordered[link.second].candidate, Span(begin, stop), end - link.overlap))
        text = text[:end] + own[link.second_start : stop]
    members = [ordered[chain[0].first], *(ordered[link.second] for link in chain)]
    spans = _unite(
        Span(max(span.start, window.span.start) + offset, min(span.end, window.span.end) + offset)
        for window, member in zip(windows, members, strict=True)
        for offset in [window.start - window.span.start]
        for span in member.spans
    )
    sizes = [covered_chars(member.spans) for member in members]
    head = min(zip(sizes, members, strict=True), key=lambda pair: (-pair[0], preference(pair[1].candidate)))[1]
    sources = dict.fromkeys(source for member in (head, *members) for source in member.candidate.sources)
    candidate = replace(
        head.candidate,
        passage=replace(head.candidate.passage, text=text),
        score=max((member.candidate.score for member in members if member.candidate.score is not None), default=None),
        sources=tuple(sources),
        cleaned=None,
        windows=tuple(windows),
    )
    kept = [counter.count_text(text[span.start : span.end]) for span in spans]
    num_tokens = sum(kept) + counter.count_text(GAP) * (len(kept) - 1)
    return Selected(candidate, spans, num_tokens, f"{head.reason}, stitched of {len(windows)} windows")


def _unite(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same characters as spans that neither touch nor overlap, ascending."""
    united: list[Span] = []
    for span in sorted(span for span in spans if span.start < span.end):
        if united and span.start <= united[-1].end:
            united[-1] = Span(united[-1].start, max(united[-1].end, span.end))
        else:
            united.append(span)
    return tuple(united)
