"""HTML to text by choosing spans: what remains of a page is text that stands in it, character for character.

The page is scanned once into blocks of text between tags. Which blocks are content is decided by two witnesses:
trafilatura's extraction of the main content, and where the block stands (navigation, footer, menu, mostly links). A
block goes only if neither speaks for it, because a lost sentence costs more than a kept menu.

Entities stay as they are written (``&amp;`` remains ``&amp;``): decoding them would make text that was not received.
Only ``&nbsp;`` and its kin count as white space.
"""

import html
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from reducer.boilerplate import is_boilerplate
from reducer.sentences import is_code
from reducer.stage import Span, SpanText

CELL_JOINER = " | "
MIN_CONTENT_SHARE = 0.5
"""Where less of the extracted main content is found among the blocks, the mapping has failed."""

MAX_PAGE_CHARS = 500_000
MAX_PAGE_ELEMENTS = 10_000
"""A larger page is not given to trafilatura, whose time grows faster than the page."""

_BLOCKS = """
    address article aside blockquote body br caption center dd details dialog div dl dt fieldset figcaption figure
    footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main nav noscript ol option p pre section summary table
    tbody td tfoot th thead title tr ul
"""
_INLINES = """
    a abbr acronym b bdi bdo big button cite code data del dfn em font i img input ins kbd label link map mark meta
    meter output picture progress q rp rt ruby s samp small source span strike strong sub sup time tt u var video wbr
"""
_BLOCK_TAGS, _INLINE_TAGS = frozenset(_BLOCKS.split()), frozenset(_INLINES.split())
_DROPPED = frozenset(("script", "style", "svg", "template", "iframe", "object", "select", "textarea"))
"""Elements whose text no reader sees."""
_FURNITURE_TAGS = frozenset(("nav", "footer", "aside", "menu"))
_VERBATIM = frozenset(("pre", "code"))
_VOID = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr")
)
_FURNITURE_NAME = re.compile(
    r"(?:^|[\s_-])(?:nav|navbar|navigation|menu|breadcrumbs?|footer|sidebar|cookies?|consent|banner|share|sharing|social"
    r"|related|advert|ads|promo|newsletter|subscribe|skip|toolbar|pagination)(?:[\s_-]|$)",
    re.IGNORECASE,
)
_ATTRIBUTE = re.compile(
    r"(?:class|id|role)\s*=\s*(?:\"([^\"]{0,200})|'([^']{0,200})|([^\s\"'>]{1,200}))", re.IGNORECASE
)
_TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9:-]*+)((?:[^<>\"']++|\"[^\"]{0,4000}+\"|'[^']{0,4000}+'|[\"'])*+)>")
_PAGE = re.compile(
    r"<(?:nav|footer|aside|header|form|script|body|html|!doctype)\b|<[a-z]+\s[^<>]*(?:class|role|id)=", re.I
)
_ENTITY = r"&(?:nbsp|#160|#xa0|ensp|emsp|thinsp|#8203|zwnj|shy);"
_SPACE = re.compile(rf"(?:\s|{_ENTITY})+", re.IGNORECASE)
_ODD_SPACE = re.compile(rf"(?: ?(?:[^\S ]|{_ENTITY})|  )(?:\s|{_ENTITY})*+", re.IGNORECASE)
"""White space that is more than one plain space."""
_CLOSING = re.compile(
    r"</(?:p|div|li|ul|ol|table|tr|td|h[1-6]|section|article|body|html|nav|footer|main|header)\s*>", re.I
)
_OPENING = re.compile(r"\s*(?:<!--|<!doctype html|<(?:html|body|head|p|div|table|ul|ol|h[1-6]|article|section|main|nav"
                      r"|header|footer|span|blockquote|pre)\b[^<>]*>)", re.I)  # fmt: skip


@dataclass(slots=True)
class Block:
    """A run of text between two block tags."""

    is_cell: bool
    """A table cell that follows another one of its row."""
    in_furniture: bool
    """Inside navigation, footer, form or an element named like one."""
    is_verbatim: bool
    pieces: list[tuple[str, Span]] = field(default_factory=list)
    """``(joiner, span)`` as in ``SpanText.join``."""
    num_chars: int = 0
    num_link_chars: int = 0


class HtmlText(NamedTuple):
    """The text of a page, and why not more was done if so."""

    text: SpanText | None
    degraded: str | None = None


class _Element(NamedTuple):
    name: str
    is_furniture: bool


def is_html(text: str) -> bool:
    """Whether a passage is HTML and not prose or code about it: it opens with a tag, or closes several blocks."""
    if "<" not in text or ">" not in text or "```" in text:
        return False
    opens = bool(_OPENING.match(text))
    if not opens and (text.lstrip()[:1] in ("{", "[") or is_code(text)):
        return False
    closings = 0
    for _ in _CLOSING.finditer(text):
        closings += 1
        if closings == 2:
            return text.count("`") < 2
    return opens and (closings > 0 or "<br" in text or "<li" in text)


def extract_html(text: str) -> HtmlText:
    """What a reader sees of the page's content, as spans of ``text``.

    ``HtmlText(None, why)`` where nothing readable remains or the main content cannot be found again in the source.
    """
    main = _main_content(text) if _PAGE.search(text) else ""
    blocks = list(scan_blocks(text, trust_names=bool(main)))
    texts = ["".join(joiner + text[span.start : span.end] for joiner, span in block.pieces) for block in blocks]
    if not any(map(str.strip, texts)):
        return HtmlText(None)
    degraded: str | None = None
    is_main: list[bool] | None = None
    if main is None:
        degraded = "main content not found: only markup and known boilerplate removed"
    elif main:
        is_main = _find_blocks(texts, main)
        if is_main is None:
            return HtmlText(None, "main content does not map to the source: HTML kept as received")
    kept: list[Block] = []
    for number, (block, block_text) in enumerate(zip(blocks, texts, strict=True)):
        if block.is_verbatim or _is_content(block, block_text, is_main is not None and is_main[number]):
            kept.append(block)
    if not kept:
        return HtmlText(None, "nothing but page furniture found: HTML kept as received")
    pieces: list[tuple[str, Span]] = []
    for block in kept:
        begin = len(pieces)
        pieces.extend(block.pieces)
        pieces[begin] = (CELL_JOINER if block.is_cell else "\n", pieces[begin][1])
        joiner, last = pieces[-1]
        if not block.is_verbatim and text[last.end - 1] == " ":
            pieces[-1] = (joiner, Span(last.start, last.end - 1))
    return HtmlText(SpanText.join(text, pieces), degraded)


def scan_blocks(text: str, *, trust_names: bool) -> Iterator[Block]:
    """Blocks of visible text in order, in one pass that is linear in the length of the text.

    ``trust_names`` takes an element named like a menu for one; a page's outer element may be named so too, so this
    needs the other witness.
    """
    stack: list[_Element] = []
    counts: dict[str, int] = {}
    num_furniture = num_links = num_verbatim = num_cells = 0
    follows_cell = False
    block = Block(False, False, False)
    unclosed: set[str] = set()
    needs_space = False
    position = 0
    while position < len(text):
        opening = text.find("<", position)
        end = len(text) if opening < 0 else opening
        if end > position:
            needs_space = _add_text(block, text, Span(position, end), needs_space, num_links > 0, num_verbatim > 0)
        if opening < 0:
            break
        position = opening
        if text.startswith("<!", opening) or text.startswith("<?", opening):
            closing = "-->" if text.startswith("<!--", opening) else ">"
            found = -1 if closing in unclosed else text.find(closing, opening + 2)
            if found >= 0:
                position = found + len(closing)
                continue
            unclosed.add(closing)
        match = _TAG.match(text, opening)
        name = match.group(2).lower() if match else ""
        if match is None or not _is_known(name):
            # A lone bracket, or an element of no HTML: it may be what the text is about.
            end = match.end() if match else opening + 1
            needs_space = _add_text(block, text, Span(opening, end), needs_space, num_links > 0, num_verbatim > 0)
            position = end
            continue
        is_closing, position = bool(match.group(1)), match.end()
        if name in _DROPPED and not is_closing and name not in unclosed:
            after = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(text, position)
            if after is not None:
                position = after.end()
                needs_space = True
                continue
            unclosed.add(name)
        changes = name in _BLOCK_TAGS
        if changes and block.pieces:
            yield block
            follows_cell = False
        if is_closing and counts.get(name):
            while stack:
                gone = stack.pop()
                counts[gone.name] -= 1
                num_furniture -= gone.is_furniture
                num_links -= gone.name == "a"
                num_verbatim -= gone.name in _VERBATIM
                if gone.name == name:
                    break
        elif not is_closing and name not in _VOID and not match.group(3).endswith("/"):
            is_furniture = name in _FURNITURE_TAGS or (trust_names and _is_named_furniture(name, match.group(3)))
            stack.append(_Element(name, is_furniture))
            counts[name] = counts.get(name, 0) + 1
            num_furniture += is_furniture
            num_links += name == "a"
            num_verbatim += name in _VERBATIM
        if changes:
            needs_space = False
            if name == "tr":
                num_cells, follows_cell = 0, False
            elif name in ("td", "th"):
                num_cells += not is_closing
                follows_cell = num_cells > 1 and not is_closing
            block = Block(follows_cell, num_furniture > 0, num_verbatim > 0)
    if block.pieces:
        yield block


def _is_known(name: str) -> bool:
    """Whether an element is HTML's own or a custom one (``x-card``, ``o:p``)."""
    return name in _BLOCK_TAGS or name in _INLINE_TAGS or name in _DROPPED or "-" in name or ":" in name


def _add_text(block: Block, text: str, span: Span, needs_space: bool, is_link: bool, is_verbatim: bool) -> bool:
    """Add a run of text, runs of white space as one of their own characters; whether one is owed to what follows."""
    start = span.start
    if is_verbatim:
        block.pieces.append((" " if needs_space and block.pieces else "", span))
        block.is_verbatim = True
        block.num_chars += span.end - start
        return False
    leading = _SPACE.match(text, span.start, span.end)
    if leading is not None:
        last = block.pieces[-1][1] if block.pieces else None
        if last is not None and not needs_space and not text[last.end - 1].isspace():
            if last.end == leading.start() and text[last.end] == " ":
                block.pieces[-1] = (block.pieces[-1][0], Span(last.start, last.end + 1))
            else:
                needs_space = True
        start = leading.end()
    for match in _ODD_SPACE.finditer(text, start, span.end):
        # One white space is kept from the text itself where it is a plain one.
        is_plain = text[match.start()] == " "
        _add_piece(block, Span(start, match.start() + is_plain), needs_space, is_link)
        needs_space = not is_plain
        start = match.end()
    if start < span.end:
        _add_piece(block, Span(start, span.end), needs_space, is_link)
        needs_space = False
    return needs_space


def _add_piece(block: Block, span: Span, needs_space: bool, is_link: bool) -> None:
    block.pieces.append((" " if needs_space and block.pieces else "", span))
    block.num_chars += span.end - span.start
    if is_link:
        block.num_link_chars += span.end - span.start


def _is_content(block: Block, block_text: str, is_main: bool) -> bool:
    text = block_text.strip()
    if not text:
        return False
    if is_boilerplate(text):
        return False
    if is_main:
        return True
    is_linked = 2 * block.num_link_chars > block.num_chars
    if block.in_furniture:
        # A footer's phone number or opening hours are facts; its links are not.
        return not is_linked and any(map(str.isdigit, text)) and len(text) > 12
    return True


def _is_named_furniture(name: str, attributes: str) -> bool:
    if name not in ("div", "section", "ul", "ol", "header", "span", "p", "table") or not attributes:
        return False
    return any(
        _FURNITURE_NAME.search(match.group(1) or match.group(2) or match.group(3) or "")
        for match in _ATTRIBUTE.finditer(attributes)
    )


def _main_content(text: str) -> str | None:
    """The main content by trafilatura, or ``None`` where it finds none or fails."""
    if len(text) > MAX_PAGE_CHARS or text.count("</") > MAX_PAGE_ELEMENTS:
        return None
    # The import costs a second, and requests without HTML need not pay it.
    import trafilatura

    # It logs every odd fragment as an error, and a log line must never carry a passage's text.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    try:
        found = trafilatura.extract(text, fast=True, favor_recall=True, include_comments=True, include_tables=True)
    except Exception:
        # Any failure of the parser on a strange page must cost only its opinion.
        return None
    return found if isinstance(found, str) and found.strip() else None


def _find_blocks(texts: list[str], main: str) -> list[bool] | None:
    """Which blocks stand in the main content, looked for in order; ``None`` when too little of it is found."""
    squashed = _squash(main)
    lines = {_squash(line) for line in main.splitlines()}
    found: list[bool] = []
    num_found = position = 0
    for text in texts:
        needle = _squash(text)
        if not needle:
            found.append(False)
            continue
        at = squashed.find(needle, position, position + 20_000 + len(needle))
        if at >= 0 and len(needle) > 3:
            position = at + len(needle)
        is_found = at >= 0 or needle in lines
        found.append(is_found)
        num_found += len(needle) if is_found else 0
    return found if num_found >= MIN_CONTENT_SHARE * len(squashed) else None


def _squash(text: str) -> str:
    return "".join(filter(str.isalnum, html.unescape(text).casefold()))
