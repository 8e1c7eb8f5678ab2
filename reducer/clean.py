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

from reducer.boilerplate import is_boilerplate, is_navigation, may_hold_boilerplate
from reducer.config import CleanConfig
from reducer.html_text import CELL_JOINER, extract_html, is_html, scan_blocks
from reducer.lexical import words
from reducer.sentences import is_code, is_table
from reducer.stage import Candidate, Filtered, Span, SpanText, StageOutcome, whole_spans
from reducer.tokens import TokenCounter

MAX_EDGE_LINES = 3
"""Lines at the head and at the foot of a passage that may be a running header or footer."""
MAX_ROUNDS = 8
"""Times that edges are looked at anew after lines went; a header of more than 24 lines is not one."""
MAX_EDGE_CHARS = 160
"""A longer line is text, however often it is repeated."""

_MARKDOWN = re.compile(
    r"(?m)^ {0,3}#{1,6} \S|^ {0,3}(?:```|~~~)|^ {0,3}\|?\s*:?-{3,}:?\s*\||\]\((?:https?:|/|#)|\*\*\S[^*\n]{0,200}\*\*"
)
_COLUMNS = re.compile(r"\S(?: {2,}|\t)\S")
_GAP = re.compile(
    r"(?P<lines>[^\S\n]*\n(?:[^\S\n]*\n)*)|(?P<run>(?<=\S)[^\S\n]{2,}|(?<=\S)[\t\r\v\f\u3000])"
    r"|(?P<sentence>(?<=[。！？])(?=[^\s。！？”’」』）)])|(?<=[。！？.!?])[^\S\n](?=\S))"
)
"""Where a segment of prose ends: line breaks, a run of white space, the end of a sentence."""
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
    """Passages with their text cleaned, in the order received; ``candidate.cleaned`` leads back to the received text."""
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

    Cells are separated by bars and rows by line breaks, the delimiter row of a Markdown table is left out, so a table in
    HTML and its Markdown twin differ at most in white space and outer bars, which are removed as well.
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
        return found.text, False, found.degraded
    if is_structured(text):
        return whole, True, None
    if not may_hold_boilerplate(text):
        return whole, False, None
    return SpanText.join(text, _prose_pieces(text, asked, config)), False, None


def _prose_pieces(text: str, asked: frozenset[str], config: CleanConfig) -> Iterator[tuple[str, Span]]:
    """Spans of prose without boilerplate and without runs of white space, each with the joiner before it."""
    owed = ""
    owed_span: Span | None = None
    was_kept, has_kept = True, False
    for segment, gap, is_sentence in _segments(text):
        piece = text[segment.start : segment.end]
        if piece:
            is_kept = not config.boilerplate or not _is_furniture(piece, is_sentence, asked)
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


def _segments(text: str) -> Iterator[tuple[Span, Span, bool]]:
    """``(segment, white space after it, whether it is one sentence among others)``, tiling the text."""
    start, is_sentence = 0, False
    for match in _GAP.finditer(text):
        ends_sentence = match.lastgroup == "sentence"
        yield Span(start, match.start()), Span(*match.span()), is_sentence or ends_sentence
        start, is_sentence = match.end(), ends_sentence
    yield Span(start, len(text)), Span(len(text), len(text)), is_sentence


def _is_furniture(piece: str, is_sentence: bool, asked: frozenset[str]) -> bool:
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
        distinct = {item.kept.text: set(lines.values()) for item, lines in zip(current, edges, strict=True)}
        counts = Counter(key for keys in distinct.values() for key in keys)
        repeated = {key for key, count in counts.items() if count >= min_repeats and asked.isdisjoint(words(key))}
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


def _preference(candidate: Candidate) -> tuple[float, int, str]:
    passage = candidate.passage
    return (-(passage.score if passage.score is not None else 0.0), -len(passage.text), passage.id)


def _with_text(candidate: Candidate, kept: SpanText, counter: TokenCounter) -> Candidate:
    passage = candidate.passage
    if kept.text == passage.text:
        return candidate
    num_tokens = counter.count_text(kept.text)
    if num_tokens >= candidate.num_tokens:
        return candidate  # nothing gained, so the received text stays
    return replace(candidate, passage=replace(passage, text=kept.text), num_tokens=num_tokens, cleaned=kept)
