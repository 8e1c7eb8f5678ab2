"""Stitching: overlapping windows of one source become one passage, so that what they share is sent once.

Two windows are joined where the end of one is, character for character, the beginning of the other:

    window 1   The fee is 20 dollars. It is due in May.
    window 2                          It is due in May. Late payment costs 5 dollars.
    stitched   The fee is 20 dollars. It is due in May. Late payment costs 5 dollars.

Nothing is lost and nothing is written: every character of the stitched text is one of a window, a shared one of both.
``Candidate.windows`` leads back to them, so the receipt shows for each window which of its text is in the prompt. The
stitched passage stands for all its windows and bears the label of the one with the most kept text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from reducer.config import DedupConfig
from reducer.dedup import preference
from reducer.sentences import text_weight
from reducer.stage import Candidate, Selected, Span, Window
from reducer.tokens import TokenCounter

MAX_GROUP_WINDOWS = 400
"""Windows of one source that are looked at, the better ones first."""

_BREAK = "\n\x00\n"


class _Link(NamedTuple):
    """Window ``first`` up to ``first_end`` is followed by window ``second`` from ``second_start`` on."""

    overlap: int
    first: int
    second: int
    first_end: int
    second_start: int


def stitch(candidates: Sequence[Candidate], config: DedupConfig, counter: TokenCounter) -> list[Candidate]:
    """The passages in request order, overlapping windows of one source as one."""
    if not config.enabled or not config.stitch:
        return list(candidates)
    groups: dict[tuple[str, str | None], list[Candidate]] = {}
    kept: list[Candidate] = []
    for candidate in candidates:
        source = candidate.passage.source
        if source:
            groups.setdefault((source, candidate.passage.title), []).append(candidate)
        else:
            kept.append(candidate)
    for group in groups.values():
        kept.extend(_stitch_group(group, config, counter))
    return sorted(kept, key=lambda candidate: candidate.position)


def settle(selected: Iterable[Selected]) -> tuple[Selected, ...]:
    """Each stitched passage under the id and label of the window that most of its kept text comes from."""
    return tuple(_settle(item) for item in selected)


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


def _settle(item: Selected) -> Selected:
    if not item.candidate.windows:
        return item
    sizes = [(-covered_chars(spans), preference(own), own) for own, spans in window_spans(item)]
    head = min(sizes, key=lambda entry: entry[:2])[2]
    if head.passage.id == item.candidate.passage.id:
        return item
    passage = replace(head.passage, text=item.candidate.passage.text)
    others = tuple(source for source in item.candidate.sources if source != head.passage.id)
    moved = replace(item.candidate, passage=passage, position=head.position, sources=(head.passage.id, *others))
    return replace(item, candidate=moved)


def _stitch_group(group: Sequence[Candidate], config: DedupConfig, counter: TokenCounter) -> list[Candidate]:
    ordered = sorted(group, key=preference)
    followers: dict[int, _Link] = {}
    preceded: set[int] = set()
    chain_of = list(range(len(ordered)))
    weights = [text_weight(candidate.passage.text) for candidate in ordered]
    for link in sorted(
        _links(ordered[:MAX_GROUP_WINDOWS], config.min_overlap_chars), key=lambda link: (-link.overlap, link)
    ):
        if link.first in followers or link.second in preceded:
            continue
        first, second = chain_of[link.first], chain_of[link.second]
        shared = ordered[link.second].passage.text[: link.second_start]
        weight = weights[first] + weights[second] - text_weight(shared)
        if first == second or weight > config.max_stitched_chars:
            continue
        followers[link.first] = link
        preceded.add(link.second)
        weights[first] = weight
        chain_of = [first if chain == second else chain for chain in chain_of]
    stitched: list[Candidate] = []
    for start in range(len(ordered)):
        if start in preceded:
            continue
        links: list[_Link] = []
        place = start
        while place in followers:
            links.append(followers[place])
            place = followers[place].second
        stitched.append(_join(ordered, start, links, counter) if links else ordered[start])
    return stitched


def _links(ordered: Sequence[Candidate], min_overlap_chars: int) -> list[_Link]:
    """All pairs of windows of which the second begins with the end of the first, and how much they share."""
    texts = [candidate.passage.text for candidate in ordered]
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
        first = 0
        at = joined.find(probe)
        while at >= 0:
            while first + 1 < len(starts) and starts[first + 1] <= at:
                first += 1
            place = at - starts[first]
            length = ends[first] - place
            is_found = (
                first != second
                and length >= len(probe)
                and begin + length < len(text.rstrip())
                and texts[first].startswith(text[begin : begin + length], place)
                and place > 0
            )
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


def _join(ordered: Sequence[Candidate], start: int, links: Sequence[_Link], counter: TokenCounter) -> Candidate:
    """One candidate of the windows along ``links``, under the id of the best one."""
    text = ordered[start].passage.text
    windows = [Window(ordered[start], Span(0, links[0].first_end), 0)]
    for link, following in zip(links, [*links[1:], None], strict=True):
        own = ordered[link.second].passage.text
        stop = len(own) if following is None else following.first_end
        end = windows[-1].start + link.first_end - windows[-1].span.start
        begin = link.second_start - link.overlap
        windows.append(Window(ordered[link.second], Span(begin, stop), end - link.overlap))
        text = text[:end] + own[link.second_start : stop]
    places = [start, *(link.second for link in links)]
    head = ordered[min(places)]
    sources = dict.fromkeys((head.passage.id, *(source for place in places for source in ordered[place].sources)))
    return replace(
        head,
        passage=replace(head.passage, text=text),
        num_tokens=counter.count_text(text),
        sources=tuple(sources),
        cleaned=None,
        windows=tuple(windows),
    )
