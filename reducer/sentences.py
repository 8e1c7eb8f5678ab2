"""Splitting text of any script into the units a passage may be cut at: sentences, table rows, code lines.

The units tile the text: joined, they give it back character for character. A unit never ends inside a number, an
identifier, an abbreviation or a quotation that closes soon; where nothing says that a sentence ends, none ends.
"""

import re
from itertools import pairwise

from reducer.stage import Span

MAX_UNIT_CHARS = 1500
"""A longer unit is cut at clause marks or white space: text without sentence marks must stay cuttable."""
MAX_QUOTE_CHARS = 300
"""A quotation up to this long is not split."""

_TERMINATOR = re.compile(
    r"(?P<wide>[。！？｡︕︖]+|……|[।॥။។؟۔])[\"'”’」』）)】》]*\s*"
    r"|(?<![.!?…])(?P<mark>[.!?…]++)[\"'”’»)\]]*+(?:\[\d{1,3}\])*+(?:\s+|$)"
    r"|(?P<paragraph>\n(?:[^\S\n]*+\n)+)"
    r"|(?P<line>\n)"
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'“„«.])(?:mr|mrs|ms|dr|prof|st|sr|jr|vs|etc|e\.g|i\.e|cf|al|no|nos|vol|pp|fig|figs|eq|approx|dept|est"
    r"|inc|ltd|co|corp|gen|col|capt|lt|sgt|rev|hon|gov|sen|rep|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec"
    r"|bzw|z\.\s?b|d\.\s?h|u\.\s?a|ca|usw|nr|abs|art|bd|hrsg|sog|geb|sra|srta|ud|uds|pág|núm|av|ee|uu"
    r"|г|гг|т|т\.\s?е|т\.\s?д|т\.\s?п|др|им|ул|стр|рис|см|руб|тыс|млн|млрд|[^\W\d_])\.$",
    re.IGNORECASE,
)
_NEXT_LINE_UNIT = re.compile(r"[^\S\n]*(?:[-*+•·‣▪–—#>|]|\d{1,3}[.)、]|\(?[a-z]\)|[A-Z][\w .]{0,40}:\s|$)")
_CODE_MARK = re.compile(
    r"(?m)^\s*(?:def |class |import |from \S+ import|return\b|(?:if|for|while) .*[:{]\s*$|else\b.*[:{]"
    r"|#include|public |private |const |let |var |func |fn |\}|//|/\*|@\w+\s*$)"
    r"|[;{]\s*$|\w\(.*\)\s*[:{]?\s*$|^\s*\w+ = "
)
_LINE_STARTS = re.compile(r"\n[^\S\n]*(\S)")
_CARRIES_ON = re.compile(r"と|って|[、，,的]")
"""What follows a quoted sentence inside its own sentence."""
_OPENING_QUOTES = {"“": "”", "「": "」", "『": "』", "«": "»", "„": "“", "《": "》"}
_CLAUSE = re.compile(r"[;:,、，；：]\s*|\s+")
_DENSE = re.compile(r"[\u0e00-\u0e7f\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_ROW = re.compile(r"(?m)^[^\S\n]*+\|[^\n]*\|[^\S\n]*$")
_THAI_GAP = re.compile(r"(?<=[\u0e00-\u0e7f])[ \u200b]+(?=[\u0e00-\u0e7f\d\"“])")


def split_units(text: str) -> list[Span]:
    """Units of ``text`` in order, tiling it; an empty text has none. Linear in the length of the text."""
    if not text:
        return []
    ends = _line_ends(text) if is_line_based(text) else _sentence_ends(text)
    units: list[Span] = []
    start = 0
    for end in [*ends, len(text)]:
        if end <= start or not text[start:end].strip():
            continue  # white space belongs to the unit before or after it
        units.extend(_split_long(text, start, end))
        start = end
    if start < len(text):
        if not units:
            return [Span(0, len(text))]
        units[-1] = Span(units[-1].start, len(text))
    return units


def split_windows(text: str, max_chars: int) -> list[Span]:
    """Units joined into windows of at most ``max_chars`` Latin letters; a CJK character weighs four."""
    if text_weight(text) <= max_chars:
        return [Span(0, len(text))] if text else []
    windows: list[Span] = []
    start, weight = 0, 0
    for unit in split_units(text):
        unit_weight = text_weight(text[unit.start : unit.end])
        if weight and weight + unit_weight > max_chars:
            windows.append(Span(start, unit.start))
            start, weight = unit.start, 0
        weight += unit_weight
    windows.append(Span(start, len(text)))
    return windows


def text_weight(text: str) -> int:
    """Length of a text in Latin letters: a character of a script with more meaning per character weighs four."""
    if text.isascii():
        return len(text)
    return len(text) + 3 * len(_DENSE.findall(text))


def is_dense_script(text: str) -> bool:
    """Whether most letters belong to scripts that write no spaces, so that white space inside words is only layout."""
    if text.isascii():
        return False
    sample = text[:4000]
    return 2 * len(_UNSPACED.findall(sample)) > sum(map(str.isalpha, sample))


def is_line_based(text: str) -> bool:
    """Whether lines, not sentences, are the units: code, tables, logs, JSON."""
    if "\n" not in text:
        return False
    return is_code(text) or column_mark(text) is not None


def is_code(text: str) -> bool:
    """Whether most lines look like program text or JSON."""
    sample = text[:4000]
    lines = [line for line in sample.split("\n") if line.strip()]
    if len(lines) < 2:
        return bool(_CODE_START.match(sample))
    marked = sum(1 for line in lines if _CODE_MARK.search(line))
    return marked * 5 >= len(lines) * 2 or (bool(_CODE_START.match(sample)) and marked >= 2)


_CODE_START = re.compile(
    r"\s*(?:def |class |import |from \w+ import |#!|#include|public |package |@\w+\n|[{\[]\s*[\"{\[])"
)


def is_table(text: str) -> bool:
    """Whether most lines hold the same kind of column marks."""
    return column_mark(text) in _COLUMN_MARKS


def column_mark(text: str) -> str | None:
    """What stands between the columns of a text that is a table as a whole, or ``None``."""
    lines = [line for line in text[:4000].split("\n") if line.strip()]
    if len(lines) < 3:
        return None
    for mark in _COLUMN_MARKS:
        if sum(1 for line in lines if line.count(mark) >= 2) * 4 >= len(lines) * 3:
            return mark
    # Two columns without bars at the edges, as a table in HTML becomes.
    return _BAR if sum(1 for line in lines if line.count(_BAR) == 1) * 10 >= len(lines) * 9 else None


_COLUMN_MARKS = ("|", "\t")
_BAR = " | "


def _line_ends(text: str) -> list[int]:
    return [match.end() for match in re.finditer(r"\n", text)]


def _sentence_ends(text: str) -> list[int]:
    quotes = _uncut(text)
    wrapped = is_wrapped(text)
    next_quote = 0
    ends: list[int] = []
    last = 0
    for match in _TERMINATOR.finditer(text):
        end = match.end()
        while next_quote < len(quotes) and quotes[next_quote].end < end:
            next_quote += 1
        if match.lastgroup != "paragraph" and next_quote < len(quotes) and quotes[next_quote].start < match.start():
            continue
        if _is_boundary(text, match, last, wrapped):
            ends.append(end)
            last = end
    if _THAI_GAP.search(text):
        ends = sorted({*ends, *(match.end() for match in _THAI_GAP.finditer(text))})
    return ends


def is_wrapped(text: str) -> bool:
    """Whether line breaks are layout: often the next line goes on in small letters.

    Not so in a list of paths or names, one a line, nor in records that all begin with the same word.
    """
    sample = text[:20_000]
    starts = _LINE_STARTS.findall(sample)
    if not sum(map(str.islower, starts)) * 10 >= 3 * len(starts) > 0:
        return False
    lines = [line.split(None, 1) for line in sample.split("\n") if line.strip()]
    num_single = sum(len(line) == 1 for line in lines)
    num_alike = sum(line[0] == before[0] for before, line in pairwise(lines))
    return 2 * max(num_single, num_alike) < len(lines)


def _is_boundary(text: str, match: re.Match[str], last: int, wrapped: bool) -> bool:
    kind, end = match.lastgroup, match.end()
    if kind == "paragraph" or end >= len(text):
        return True
    if kind == "wide":
        return not _CARRIES_ON.match(text, end)
    if kind == "line":
        if not wrapped:
            return True
        # A single line break in wrapped text is only layout, unless a list item, heading or table row follows.
        before = text[max(last, match.start() - 20) : match.start()].rstrip()
        return before.endswith((":", "：", "|")) or bool(_NEXT_LINE_UNIT.match(text, end))
    following = text[end]
    if following.islower() and "\n" not in match.group():
        return False
    mark = match.group("mark")
    return mark != "." or not _ABBREVIATION.search(text[max(last, match.start() - 12) : match.start() + 1])


def _uncut(text: str) -> list[Span]:
    """Where no sentence ends, in order: short quotations, and rows of tables in running text."""
    spans = _quotations(text)
    if "|" in text:
        spans = sorted([*spans, *(Span(*match.span()) for match in _ROW.finditer(text))])
    return spans


def _quotations(text: str) -> list[Span]:
    """Quotations short enough to stay whole, in order, not nested."""
    spans: list[Span] = []
    position = 0
    for match in re.finditer("[" + "".join(_OPENING_QUOTES) + "]", text):
        if match.start() < position:
            continue
        closing = text.find(_OPENING_QUOTES[match.group()], match.end(), match.end() + MAX_QUOTE_CHARS)
        if closing >= 0:
            # The closing mark itself is outside: a sentence may end right at it.
            spans.append(Span(match.start(), closing))
            position = closing + 1
    return spans


def _split_long(text: str, start: int, end: int) -> list[Span]:
    """One unit, cut at clause marks or white space where it is longer than ``MAX_UNIT_CHARS``."""
    if end - start <= MAX_UNIT_CHARS:
        return [Span(start, end)]
    pieces: list[Span] = []
    piece_start, last_cut = start, start
    for match in _CLAUSE.finditer(text, start, end):
        cut = match.end()
        if not match.group()[-1:].isspace() and not _DENSE.match(text, cut):
            continue  # 1,240 and key:value are one token
        if cut - piece_start > MAX_UNIT_CHARS and last_cut > piece_start:
            pieces.append(Span(piece_start, last_cut))
            piece_start = last_cut
        last_cut = cut
    if last_cut > piece_start and end - piece_start > MAX_UNIT_CHARS:
        pieces.append(Span(piece_start, last_cut))
        piece_start = last_cut
    if piece_start < end:
        pieces.append(Span(piece_start, end))
    return pieces
