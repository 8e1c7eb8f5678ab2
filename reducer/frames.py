"""Frames: lines around a copy that belong to the place it was copied from, so that a copy can be told by its body.

The same text arrives wrapped in the header and footer of one site, of another, and bare. Clean takes what is furniture
by its words alone; the lines here say nothing only because the body beside them is known: a heading that repeats the
title, a breadcrumb to it, "section 2 of 7", "end of section", a licence above code. They are never cut out of a
passage. Dedup reads a passage without them to see whether another one states all of it:

    Optic nerve - Free Encyclopedia          [Document: Optic nerve] [Section 2 of 7]
    The optic nerve carries …                The optic nerve carries …          one of the two stays
    Plan of 2025                             Plan of 2026
    The fee is 20 dollars.                   The fee is 20 dollars.             headings that state something: both stay
"""

import re
from collections.abc import Set as AbstractSet

from reducer.boilerplate import is_boilerplate, is_navigation
from reducer.lexical import words
from reducer.stage import Span

MAX_FRAME_LINES = 6
"""Lines at each end that may be a frame."""
MAX_LICENCE_LINES = 30
"""Lines of a licence above code."""

_LINE = re.compile(r"[^\n]+")
_UNIT = r"(?:document|doc|file|section|page|part|chunk|passage|excerpt|seite|abschnitt|teil|página|sección|parte)"
_MARKER = re.compile(
    rf"[\W_]*(?:{_UNIT}\b[\W_]*(?:\d+[\W_]*(?:of|/|von|de)[\W_]*\d+[\W_]*)?)+"
    r"|[\W_]*(?:страница|раздел|часть|документ)[\W_]*(?:\d+[\W_]*(?:из|/)[\W_]*\d+[\W_]*)?"
    r"|[\W_]*(?:文档|文件|文書)?[\W_]*第\s*\d+\s*[节節页頁段章回][\W_]*[共全]\s*\d+\s*[节節页頁段章回][\W_]*"
    r"|[\W_]*(?:문서)?[\W_]*\d+\s*/\s*\d+\s*(?:쪽|절|페이지)[\W_]*",
    re.IGNORECASE,
)
"""Where a text stands in its document. A lone "Section 12" is a heading, and another section may say the same."""
_ENDING = re.compile(
    rf"[\W_]*(?:end of (?:the |this )?{_UNIT}|ende (?:des|der) {_UNIT}s?|fin de (?:la |el )?{_UNIT}"
    r"|конец (?:раздела|страницы|документа)|本[节節页頁文章段]+[完终終]|全文完|未完待续|이상|끝)[\W_]*",
    re.IGNORECASE,
)
_SITE_WORDS = (
    r"(?:the|a|free|open|online|offline|public|official|knowledge|news|blog|magazine|portal|mirror|site|website|docs"
    r"|documentation|wiki|wikipedia|encyclop(?:a?edia|ædia)|die|freie|enzyklopädie|la|libre|enciclopedia|свободная"
    r"|энциклопедия|википедия|维基百科|維基百科|百科|百度百科|自由的百科全书|ウィキペディア|위키백과"
    r"|[\w-]+\.(?:com|org|net|edu|gov|cn|de|es|ru|jp|kr))"
)
"""What the name of a site is made of when it says nothing else; a name that is not known is part of the text."""
_SITE = re.compile(rf"\s*[-–—|·_]\s*{_SITE_WORDS}(?:[\s,]+{_SITE_WORDS}){{0,5}}", re.IGNORECASE)
_TAGLINE = re.compile(
    rf"(?:from|aus|de|из|来自|出自)\s*{_SITE_WORDS}(?:[\s,，]*{_SITE_WORDS}){{0,6}}\.?", re.IGNORECASE
)
_RETRIEVED = re.compile(
    rf"(?:retrieved from {_SITE_WORDS}(?: {_SITE_WORDS}){{0,3}}[.|]?\s*)?"
    r"(?:(?:hidden )?categor(?:y|ies):(?P<items>.*))?",
    re.IGNORECASE,
)
_HOUSEKEEPING = re.compile(
    r"(?:all )?(?:stub |orphaned |wikipedia )?(?:pages?|articles?|stubs)"
    r"(?: (?:with|lacking|needing|containing) [^\d|]{0,40}| from \w+ \d{4})?",
    re.IGNORECASE,
)
_DISCLAIMER = re.compile(
    r"(?:this|the) (?:text|document|page|article|content|information)\b[^.]{0,60}\binformation(?:al purposes)? only"
    r"\b[^.\d]{0,80}\.?|免责声明[:：][^\d]{0,40}|[^\d]{0,12}仅供参考[^\d]{0,12}",
    re.IGNORECASE,
)
_COMMENT = re.compile(r"\s*(?:#(?!!)|//|/\*|\*|--|;|<!--)")
_LICENCE = re.compile(
    r"licen[cs]e|copyright|©|all rights reserved|warrant|as is\b|as-is|permission|redistribut|distributed|spdx"
    r"|liab|applicable law|\bcoding[:=]",
    re.IGNORECASE,
)
_BLANK_COMMENT = re.compile(r"\s*(?:#|//|/\*+|\*+/?|--|;|<!--|-->)+\s*$")


def body_span(text: str, title: str | None, asked: AbstractSet[str] = frozenset()) -> Span:
    """The part of ``text`` between its frames; all of it where it has none, or where nothing else would be left.

    ``asked`` are the index words of the question: a disclaimer or licence that shares one is part of the body.
    """
    start, end = 0, len(text)
    if "\n" not in text:
        return Span(start, end)
    licence_end = _licence_end(text, asked)
    if licence_end:
        return Span(licence_end, end)
    lines = [match.span() for match in _LINE.finditer(text) if not match.group().isspace()]
    if not lines:
        return Span(start, end)
    heading = _squeeze(title or "")
    first, last = 0, len(lines) - 1
    while first < min(last, MAX_FRAME_LINES) and is_frame_line(text[slice(*lines[first])], heading, asked):
        first += 1
    num_feet = 0
    while last > first and num_feet < MAX_FRAME_LINES and is_frame_line(text[slice(*lines[last])], heading, asked):
        last -= 1
        num_feet += 1
    return Span(lines[first][0] if first else 0, lines[last][1] if last < len(lines) - 1 else end)


def is_frame_line(line: str, heading: str, asked: AbstractSet[str] = frozenset()) -> bool:
    """Whether a line beside a text with the title ``heading`` (case folded) says nothing that the title does not."""
    plain = _squeeze(line)
    if len(plain) > 200:
        return False
    if is_navigation(plain):
        return True
    rest = plain
    if heading:
        if plain == heading:
            return True
        rest = plain.replace(heading, "", 1)
        if rest != plain and plain.startswith(heading) and _SITE.fullmatch(rest):
            return True
        if rest != plain and is_boilerplate(plain) and _is_path(rest):
            return True
    if _MARKER.fullmatch(rest) or _ENDING.fullmatch(plain) or _TAGLINE.fullmatch(plain):
        return True
    retrieved = _RETRIEVED.fullmatch(plain)
    if retrieved is not None and plain:
        items = [item.strip() for item in (retrieved["items"] or "").split("|")]
        return all(not item or item == heading or _HOUSEKEEPING.fullmatch(item) for item in items)
    return bool(_DISCLAIMER.fullmatch(plain)) and asked.isdisjoint(words(plain))


def _is_path(rest: str) -> bool:
    """Whether what a breadcrumb holds beside the title is navigation: ``home >``."""
    items = [item.strip() for item in re.split(r"[>›»/|]+", rest)]
    return all(not item or item == "home" or is_navigation(item) for item in items)


def _licence_end(text: str, asked: AbstractSet[str]) -> int:
    """Where the licence above program text ends; 0 where there is none, or where it is asked for."""
    end = 0
    num_lines = 0
    for match in re.finditer(r"[^\n]*\n", text):
        line = match.group()
        if line.strip():
            is_licence = _COMMENT.match(line) and (_LICENCE.search(line) or _BLANK_COMMENT.match(line))
            if not is_licence or num_lines >= MAX_LICENCE_LINES or not asked.isdisjoint(words(line)):
                break
            num_lines += 1
        end = match.end()
    return end if num_lines and text[end:].strip() else 0


def _squeeze(text: str) -> str:
    return " ".join(text.split()).casefold()
