"""Clean: passages lose what no reader came for, and what stays is spans of the text as received.

HTML becomes its text; navigation, cookie notices and copyright lines go; a header or footer that several passages of
the request repeat stays in one of them; runs of white space become one character of themselves. Code, tables, JSON and
Markdown pass byte for byte. A passage of furniture only is dropped, and so is an empty one.

A line that shares a word with the question is never boilerplate: who asks about the copyright gets the copyright line.
"""

import html
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from reducer.boilerplate import is_boilerplate, is_navigation, may_hold_boilerplate, may_hold_notice
from reducer.config import CleanConfig
from reducer.html_text import CELL_JOINER, extract_html, is_html, scan_blocks
from reducer.lexical import words
from reducer.sentences import is_code, is_table
from reducer.stage import Candidate, Filtered, Span, SpanText, StageOutcome, whole_spans
from reducer.tokens import TokenCounter

MAX_EDGE_LINES = 3
"""Lines at the head and at the foot of a passage that may be a running header or footer."""
TOPIC_FACTOR = 3
"""A plain first line must be repeated this many times as often as a last one."""
MAX_ROUNDS = 8
"""Times that a text is looked at anew after lines went; a header of more than 24 lines is not one."""
MAX_EDGE_CHARS = 160
"""A longer line is text, however often it is repeated."""

_MARKDOWN = re.compile(
    r"(?m)^ {0,3}#{1,6} \S|^ {0,3}(?:```|~~~)"
    r"|^ {0,3}\|?[^\S\n]*:?-{3,}:?[^\S\n]*\||\]\((?:https?:|/|#)|\*\*\S[^*\n]{0,200}\*\*"
)
_COLUMNS = re.compile(r"\S(?: {2,}|\t)\S")
# Begins where its run of white space begins, else a long run without a line break costs the square of its length.
_LINE_GAP = re.compile(r"(?<![^\S\n])[^\S\n]*+\n(?:[^\S\n]*+\n)*+")
_RUN_GAP = re.compile(r"(?<=\S)(?:[^\S\n]{2,}|[\t\r\v\f\u3000])")
_SENTENCE_GAP = re.compile(r"(?<=[。！？])(?=[^\s。！？”’」』）)])|(?<=[。！？.!?])[^\S\n](?=\S)")
_SPEAKER = re.compile(r"[\w .'’-]{1,40}[:：]\s*\S")
_SENTENCE = re.compile(r"[.!?。！？…][\"'”’」』）)]*$")
_NOTICE = re.compile(
    r"information only|constitute advice|confidential|disclaimer|do not distribute|internal use|reserved"
    r"|免责声明|仅供参考|请勿外传|机密|vertraulich|confidencial|confidentiel|конфиденциально",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"(?:page|section|part|slide|seite|abschnitt|página|sección|стр\.?|第)\W{0,2}\d", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class _Cleaned:
    """A passage on its way through: what is left, and whether its lines may still be looked at."""

    candidate: Candidate
    kept: SpanText
    is_fixed: bool


def clean(
    candidates: Sequence[Candidate], question: str, config: CleanConfig, counter: TokenCounter
) -> StageOutcome[Candidate]:
    """Passages with their text cleaned, in the order received; ``candidate.cleaned`` leads to the received one."""
    if not config.enabled:
        return StageOutcome(tuple(candidates))
    asked = frozenset(words(question))
    reasons: list[str] = []
    read: list[_Cleaned] = []
    for candidate in candidates:
        kept, is_fixed, reason = _clean_text(candidate.passage.text, asked, config)
        read.append(_Cleaned(candidate, kept, is_fixed))
        if reason is not None and reason not in reasons:
            reasons.append(reason)
    if config.min_repeats:
        read = _drop_repeated(read, asked, config.min_repeats)
    remaining: list[Candidate] = []
    filtered: list[Filtered] = []
    for item in read:
        if not item.candidate.passage.text.strip():
            filtered.append(Filtered(item.candidate, "dropped", "empty"))
        elif not item.kept.text.strip():
            filtered.append(Filtered(item.candidate, "dropped", "page furniture only"))
        else:
            remaining.append(_with_text(item.candidate, item.kept, counter))
    return StageOutcome(remaining, filtered, "; ".join(reasons) or None)


def plain_text(text: str) -> str:
    """The text of a passage for comparison, not for a prompt: HTML as its visible text, entities decoded.

    Cells are separated by bars and rows by line breaks; white space, outer bars and the delimiter row of a Markdown
    table are left out. So a table in HTML equals its Markdown twin.
    """
    if is_html(text):
        pieces: list[str] = []
        for block in scan_blocks(text, trust_names=False):
            pieces.append(CELL_JOINER if block.is_cell else "\n")
            pieces.extend(joiner + text[span.start : span.end] for joiner, span in block.pieces)
        text = "".join(pieces)
    if "&" in text:
        text = html.unescape(text)
    lines = [" ".join(line.strip().strip("|").split()) for line in text.splitlines()]
    return "\n".join(line for line in lines if line.strip("|:- "))


def is_structured(text: str) -> bool:
    """Whether the layout of a text carries meaning: code, JSON, Markdown, a table or aligned columns."""
    head = text[:20_000]
    if _MARKDOWN.search(head) or is_code(head) or is_table(head):
        return True
    if head.lstrip()[:1] in ("{", "[") and _is_json(text):
        return True
    return _has_columns(head)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _has_columns(text: str) -> bool:
    """Whether three lines in a row are set in columns by white space or bars."""
    num_aligned = 0
    for line in text.split("\n"):
        is_row = line.count("|") >= 2 or len(_COLUMNS.findall(line)) >= 1
        num_aligned = num_aligned + 1 if is_row and not is_boilerplate(line) else 0
        if num_aligned >= 3:
            return True
    return False


def _clean_text(text: str, asked: frozenset[str], config: CleanConfig) -> tuple[SpanText, bool, str | None]:
    """What stays of one text, whether its layout is fixed, and why less was done than configured."""
    whole = SpanText.join(text, [("", span) for span in whole_spans(text)])
    if config.html and is_html(text):
        found = extract_html(text)
        if found.text is None or len(found.text.text.strip()) < min(config.min_html_chars, len(text) // 20):
            return whole, True, found.degraded
        prose, is_fixed = _clean_prose(found.text.text, asked, config)
        kept = found.text if prose is None else found.text.narrow(text, prose)
        return kept, is_fixed, found.degraded
    prose, is_fixed = _clean_prose(text, asked, config)
    return prose or whole, is_fixed, None


def _clean_prose(text: str, asked: frozenset[str], config: CleanConfig) -> tuple[SpanText | None, bool]:
    """Text that is not HTML without its furniture, ``None`` for all of it; and whether its layout is fixed.

    Goes on until nothing changes: what stands together once a line is gone may be furniture only now.
    """
    kept, is_fixed = _clean_once(text, asked, config)
    for _ in range(MAX_ROUNDS):
        if kept is None or is_fixed:
            break
        again, is_fixed = _clean_once(kept.text, asked, config)
        if again is None:
            break
        kept = kept.narrow(text, again)
    return kept, is_fixed


def _clean_once(text: str, asked: frozenset[str], config: CleanConfig) -> tuple[SpanText | None, bool]:
    if not may_hold_boilerplate(text):
        return None, False
    if is_structured(text):
        return None, True
    kept = SpanText.join(text, _prose_pieces(text, asked, config))
    if kept.text == text:
        return None, False
    # What only looks like HTML once its first line is gone was not meant as a page.
    return (None, True) if is_html(kept.text) else (kept, False)


def _prose_pieces(text: str, asked: frozenset[str], config: CleanConfig) -> Iterator[tuple[str, Span]]:
    """Spans of prose without boilerplate and without runs of white space, each with the joiner before it."""
    owed = ""
    owed_span: Span | None = None
    was_kept, has_kept = True, False
    for segment, gap, is_kept in _segments(text, asked, config.boilerplate):
        if segment.end > segment.start:
            if is_kept:
                if owed_span is not None and was_kept:
                    yield "", owed_span
                    owed = ""
                yield owed if has_kept else "", segment
                has_kept, owed, owed_span = True, "", None
            was_kept = is_kept
        if gap.end > gap.start:
            run = text[gap.start : gap.end]
            wanted = _collapse(run) if config.white_space else run
            owed = max(owed, wanted, key=lambda space: (space.count("\n"), len(space)))
            at = run.find(wanted)
            owed_span = Span(gap.start + at, gap.start + at + len(wanted)) if at >= 0 else None
    if owed_span is not None and was_kept:
        yield "", owed_span


def _segments(text: str, asked: frozenset[str], removes: bool) -> Iterator[tuple[Span, Span, bool]]:
    """``(segment, white space after it, whether it stays)``, tiling the text.

    A line is judged first, then what stands between its runs of white space, then its sentences; the widest piece that
    is boilerplate goes.
    """
    for line, line_gap in _split(text, Span(0, len(text)), _LINE_GAP):
        if removes and is_furniture(text[line.start : line.end], False, asked):
            yield line, line_gap, False
            continue
        for part, part_gap in _split(text, line, _RUN_GAP):
            after = part_gap if part.end < line.end else line_gap
            piece = text[part.start : part.end]
            if removes and is_furniture(piece, False, asked):
                yield part, after, False
            elif removes and may_hold_notice(piece):
                for sentence, gap in _split(text, part, _SENTENCE_GAP):
                    is_kept = not is_furniture(text[sentence.start : sentence.end], True, asked)
                    yield sentence, gap if sentence.end < part.end else after, is_kept
            else:
                yield part, after, True


def _split(text: str, span: Span, gaps: re.Pattern[str]) -> Iterator[tuple[Span, Span]]:
    """``(piece, white space after it)``, tiling ``span``; the last piece has none."""
    start = span.start
    for match in gaps.finditer(text, span.start, span.end):
        yield Span(start, match.start()), Span(*match.span())
        start = match.end()
    yield Span(start, span.end), Span(span.end, span.end)


def is_furniture(piece: str, is_sentence: bool, asked: frozenset[str]) -> bool:
    """Whether a line, or a sentence, is page furniture and shares no word with what is ``asked``."""
    # One word of navigation in running text ("More.") may be an answer, so sentences are held to the stronger marks.
    if not is_boilerplate(piece) or (is_sentence and is_navigation(piece)):
        return False
    return asked.isdisjoint(words(piece))


def _collapse(run: str) -> str:
    """What stays of a run of white space: at most one empty line, else one space."""
    num_lines = run.count("\n")
    if num_lines > 2:
        return "\n\n"
    if num_lines:
        return run if len(run) <= num_lines + 1 else "\n" * num_lines
    if len(run) < 3:
        return run
    return " " if " " in run else run[0]


def _drop_repeated(items: Sequence[_Cleaned], asked: frozenset[str], min_repeats: int) -> list[_Cleaned]:
    """Take running headers and footers from all passages but the best one."""
    current = list(items)
    for _ in range(MAX_ROUNDS):
        edges = [_edge_lines(item.kept.text) if not item.is_fixed else {} for item in current]
        # A copy of a whole passage is dedup's business and proves nothing about its lines.
        pairs = list(zip(current, edges, strict=True))
        distinct = {item.kept.text: set(lines.values()) for item, lines in pairs}
        counts = Counter(key for keys in distinct.values() for key in keys)
        feet = Counter(
            key
            for keys in {item.kept.text: _feet(item.kept.text, lines) for item, lines in pairs}.values()
            for key in keys
        )
        repeated = {
            key
            for key, count in counts.items()
            if count >= min_repeats
            # A first line that a few passages share may be the name of their topic.
            and (
                feet[key] >= min_repeats
                or count >= TOPIC_FACTOR * min_repeats
                or bool(_NUMBERED.search(key) or _NOTICE.search(key))
            )
            and asked.isdisjoint(words(key))
        }
        if not repeated:
            return current
        holders: dict[str, int] = {}
        for index in sorted(range(len(current)), key=lambda index: _preference(current[index].candidate)):
            for key in edges[index].values():
                holders.setdefault(key, index)
        changed = False
        for index, item in enumerate(current):
            gone = {span for span, key in edges[index].items() if key in repeated and holders[key] != index}
            kept = _strip_edges(item.kept, gone)
            changed = changed or kept is not item.kept
            current[index] = replace(item, kept=kept)
        if not changed:
            break
    return current


def _edge_lines(text: str) -> dict[Span, str]:
    """Lines at head and foot that may be running ones, by their place; the key leaves page numbers out."""
    if "\n" not in text:
        return {}
    lines = [Span(*match.span()) for match in re.finditer(r"[^\n]*\S[^\n]*", text)]
    found: dict[Span, str] = {}
    for line in {*lines[:MAX_EDGE_LINES], *lines[-MAX_EDGE_LINES:]}:
        raw = text[line.start : line.end].strip()
        is_text = len(raw) > MAX_EDGE_CHARS or _SPEAKER.match(raw) or len(raw) < 4
        if is_text or (_SENTENCE.search(raw) and not _NOTICE.search(raw)):
            continue
        key = " ".join(raw.split()).casefold()
        found[line] = _DIGITS.sub("#", key) if _NUMBERED.search(key) else key
    return found


def _feet(text: str, lines: dict[Span, str]) -> set[str]:
    """The key of the last line of a text, if it is one of ``_edge_lines``."""
    end = len(text.rstrip())
    return {key for span, key in lines.items() if span.end >= end}


def _strip_edges(kept: SpanText, gone: set[Span]) -> SpanText:
    """Without the lines ``gone`` that stand at head or foot; one line always stays."""
    if not gone:
        return kept
    lines = [Span(*match.span()) for match in re.finditer(r"[^\n]*\S[^\n]*", kept.text)]
    first, last = 0, len(lines) - 1
    while first < last and lines[first] in gone:
        first += 1
    while last > first and lines[last] in gone:
        last -= 1
    if first == 0 and last == len(lines) - 1:
        return kept
    start = lines[first].start if first else 0
    end = lines[last].end if last < len(lines) - 1 else len(kept.text)
    return kept.slice(start, end)


def _preference(candidate: Candidate) -> tuple[float, str]:
    """Best first. The length plays no part: it changes as lines go, and cleaning twice must change nothing."""
    passage = candidate.passage
    return (-(passage.score if passage.score is not None else 0.0), passage.id)


def _with_text(candidate: Candidate, kept: SpanText, counter: TokenCounter) -> Candidate:
    passage = candidate.passage
    if kept.text == passage.text:
        return candidate
    num_tokens = counter.count_text(kept.text)
    if num_tokens >= candidate.num_tokens:
        return candidate  # nothing gained, so the received text stays
    return replace(candidate, passage=replace(passage, text=kept.text), num_tokens=num_tokens, cleaned=kept)
