"""The fact guard: what a text states, so that two texts are one only if nothing they state differs.

A text becomes its statement: the sequence of its words, numbers, identifiers and signs, without what carries no fact
(case, white space, punctuation, articles). A passage may be merged into another one only where its whole statement
stands in the other's, word for word and without a break. So one other number, date, unit, currency, name or ``not``
keeps both, in any language, and nothing needs to be recognised to be safe:

    "The plan costs $1,240."      plan costs $ 1240
    "the  plan costs $1240"       plan costs $ 1240             same statement, merged
    "The plan costs €1,240."      plan costs € 1240             another currency, both stay
    "The plan does not cost …"    plan does not cost …          another polarity, both stay

Where the longer text goes on inside the sentence in which the shorter one stops ("free" / "free only in 2025"), words
that turn a statement around keep both as well.
"""

import html
import re
import unicodedata
from dataclasses import dataclass

from reducer.number_words import CJK_NUMERALS, digits_for_words, parse_cjk_number
from reducer.sentences import is_code

SEPARATOR = "\x1f"

_ARTICLES = frozenset({"a", "an", "the", "的", "了"})
_SYNONYMS = {
    "that": "which", "additionally": "also", "however": "but", "till": "until", "numerous": "many", "around": "about",
    "approximately": "about", "started": "began", "utilised": "used", "utilized": "used", "whereas": "while",
    "since": "because", "cannot": "can't",
}  # fmt: skip
"""Words an editor swaps without changing what is said."""

_TURNING = """
no not never none neither nor without cannot can't won't don't doesn't didn't isn't aren't wasn't weren't shouldn't
only except unless until before after if but however instead rather hardly barely formerly former no longer false untrue
denied deny allegedly supposedly
nicht kein keine keinen keinem keiner keines nie niemals ohne nur außer falls bevor bis sofern jedoch aber
no nunca jamás sin ningún ninguna ninguno tampoco solo sólo solamente salvo excepto si pero hasta antes
ne pas jamais sans aucun aucune seulement sauf si mais avant jusqu
не нет ни без никогда только кроме если но однако до
ない ず ぬ 不 没 沒 無 无 非 未 否 莫 勿 别 別 禁 仅 僅 只 除 若 但 안 못 없 아니 않 말
"""
_TURNING_WORDS = frozenset(_TURNING.split())
"""Negations, limits and conditions: they turn the statement they join around."""

_DASHES = dict.fromkeys([*range(0x2010, 0x2016), 0x2212, 0xFE58, 0xFE63, 0xFF0D], "-")
_QUOTES = dict.fromkeys([0x2018, 0x2019, 0x02BC, 0xFF07], "'")
_POWERS = {code: f" ^{unicodedata.digit(chr(code))}" for code in (0xB9, 0xB2, 0xB3, 0x2070, *range(0x2074, 0x207A))}
_FRACTIONS = {
    code: f" {unicodedata.normalize('NFKC', chr(code))} " for code in (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F))
}
_SAME_SIGN = {**_DASHES, **_QUOTES, **_POWERS, **_FRACTIONS}

_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9]*(?:\s[^<>]{0,500})?/?>|<!--[^<>]{0,500}-->")
_BLOCK_TAG = re.compile(r"</?(?:p|div|br|li|ul|ol|tr|table|h\d|section|article)\b", re.IGNORECASE)
_COUNTED = "年月日号號時时点點分秒元円人名个個件岁歳次回位倍度層层届章条條"
"""What is counted: before one of these a single numeral is a number, as in 五月."""
_DENSE = "\u0e00-\u0e7f\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_TOKEN = re.compile(
    rf"(?P<numeral>[{CJK_NUMERALS}]{{2,}}|(?<=第)[{CJK_NUMERALS}]|[{CJK_NUMERALS}](?=[{_COUNTED}]))"
    rf"|(?P<dense>[{_DENSE}])"
    rf"|(?P<joined>(?:(?![{_DENSE}])[^\W_])+(?:(?:[-_./:@#,'&+*^]|::|->)(?:(?![{_DENSE}])[^\W_])+)+)"
    rf"|(?P<word>(?:(?![{_DENSE}])[^\W_])+(?:\+\+|#)?)"
    r"|(?P<sign>[%‰°+=<>±×÷≤≥≠≈~^⁄→←]|!(?=\w)|(?<=\w)[*/](?=\w))"
    r"|(?P<other>[^\w\s])"
)
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_PART = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_CASED_UNITS = frozenset({"mw", "mv", "mhz", "mb", "kb", "gb", "tb", "mbps", "gbps", "pf", "mg", "ma", "mj", "mpa"})
"""Units whose case is a factor of a million, or of bits and bytes."""
_CODE_TOKEN = re.compile(r"\w+|[^\w\s]")
_BOUNDARY = re.compile(r"[.!?…:;。！？；：|\n]")
_UNFINISHED = re.compile(r"(?:\.\.\.?|…)\W*$")


@dataclass(frozen=True, slots=True)
class Statement:
    """What a text states, in order."""

    text: str
    """The normalised text that ``offsets`` point into."""
    tokens: tuple[str, ...]
    offsets: tuple[int, ...]
    """Where each token starts."""
    joined: str
    """The tokens, each with ``SEPARATOR`` before and after it."""


def plain_text(text: str) -> str:
    """Text without HTML tags and entities, its signs in one form; block tags become line breaks."""
    if "&" in text:
        text = html.unescape(text)
    if "<" in text and not is_code(text):
        text = _TAG.sub(lambda match: "\n" if _BLOCK_TAG.match(match.group()) else " ", text)
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", text.translate(_SAME_SIGN)).translate(_DASHES)


def state(text: str, *, as_code: bool = False, ignore_spaces: bool = False) -> Statement:
    """The statement of a text.

    Of program text (``as_code``) every sign and the nesting of lines count. ``ignore_spaces`` is for scripts without
    spaces, where ``2 009年`` is ``2009年`` broken by layout.
    """
    if as_code:
        return _state_code(text)
    plain = digits_for_words(plain_text(text))
    if ignore_spaces:
        plain = "".join(plain.split())
    is_upper = plain.isupper()
    tokens: list[str] = []
    offsets: list[int] = []

    def add(token: str, offset: int) -> None:
        token = _SYNONYMS.get(token, token)
        if token not in _ARTICLES:
            tokens.append(token)
            offsets.append(offset)

    for match in _TOKEN.finditer(plain):
        kind, raw, offset = match.lastgroup, match.group(), match.start()
        if kind == "numeral":
            add(parse_cjk_number(raw), offset)
        elif kind == "joined":
            for part in _split_joined(raw):
                add(_signed(part, plain, offset), offset)
        elif kind == "word":
            word = raw.casefold()
            if word in _CASED_UNITS and tokens and tokens[-1][-1].isdigit() and not is_upper:
                word = raw
            add(_signed(word, plain, offset), offset)
        elif kind == "dense" or kind == "sign" or (raw not in "|~" and unicodedata.category(raw) in ("Sc", "So", "Sm")):
            add(raw, offset)
    return Statement(plain, tuple(tokens), tuple(offsets), SEPARATOR + "".join(t + SEPARATOR for t in tokens))


def contains(outer: Statement, inner: Statement) -> bool:
    """Whether everything ``inner`` states is stated by ``outer``, in the same words and under no other condition."""
    if not inner.tokens:
        return False
    if _UNFINISHED.search(inner.text[-20:]) and len(inner.tokens) > 1 and inner.joined not in outer.joined:
        return _contains_cut(outer, inner)
    position = outer.joined.find(inner.joined)
    while position >= 0:
        first = outer.joined.count(SEPARATOR, 0, position)
        last = first + len(inner.tokens) - 1
        if _starts_alike(outer, first, inner) and _ends_alike(outer, last, inner):
            return True
        position = outer.joined.find(inner.joined, position + 1)
    return False


def _contains_cut(outer: Statement, inner: Statement) -> bool:
    """``contains`` for a text cut inside its last word: ``C9…`` for ``C919``."""
    beginning = inner.joined[: -len(inner.tokens[-1]) - 1]
    position = outer.joined.find(beginning + inner.tokens[-1])
    return position >= 0 and _starts_alike(outer, outer.joined.count(SEPARATOR, 0, position), inner)


def _starts_alike(outer: Statement, first: int, inner: Statement) -> bool:
    """Whether nothing before the shared part, in its own sentence, turns it around."""
    if first == 0 or inner.text.lstrip().startswith(("...", "…")):
        return True
    return not _turns(outer, first - 1, -1, outer.offsets[first])


def _ends_alike(outer: Statement, last: int, inner: Statement) -> bool:
    """Whether nothing after the shared part, in its own sentence, turns it around."""
    if last == len(outer.tokens) - 1 or _UNFINISHED.search(inner.text[-20:]):
        return True
    return not _turns(outer, last + 1, 1, outer.offsets[last])


def _turns(outer: Statement, token: int, step: int, edge: int) -> bool:
    """Walk from the shared part's edge to the end of its sentence; whether a turning word is on the way."""
    while 0 <= token < len(outer.tokens):
        offset = outer.offsets[token]
        low, high = min(offset, edge), max(offset, edge)
        if _BOUNDARY.search(outer.text, low, high):
            return False
        if outer.tokens[token] in _TURNING_WORDS:
            return True
        edge = offset
        token += step
    return False


def _split_joined(raw: str) -> list[str]:
    """A joined token is one where it holds a digit or an underscore; else its words are separate."""
    token = raw.casefold()
    if "," in token:
        token = _GROUPED.sub(lambda match: match.group().replace(",", ""), token)
    if _NUMBER.fullmatch(token) or "_" in token or any(char.isdigit() for char in token):
        return [token]
    return _PART.findall(token)


def _signed(token: str, plain: str, offset: int) -> str:
    """The token with the minus that belongs to it: ``-5`` after white space, not the dash of ``1990-1995``."""
    if not token[:1].isdigit() or offset == 0 or plain[offset - 1] != "-":
        return token
    before = plain[offset - 2] if offset > 1 else " "
    return token if before.isascii() and (before.isalnum() or before in "-)%") else f"-{token}"


def _state_code(text: str) -> Statement:
    """Every word and sign of program text, and where nesting begins and ends; how wide an indent is does not count."""
    tokens: list[str] = []
    offsets: list[int] = []
    indents: list[int] = []
    start = 0
    for line in text.splitlines(keepends=True):
        body = line.lstrip(" \t")
        if body.strip():
            width = len(line[: len(line) - len(body)].expandtabs(4))
            if not indents:
                indents.append(width)
            elif width > indents[-1]:
                indents.append(width)
                tokens.append("\x0e")
                offsets.append(start)
            while len(indents) > 1 and width < indents[-1]:
                indents.pop()
                tokens.append("\x0f")
                offsets.append(start)
            for match in _CODE_TOKEN.finditer(line):
                tokens.append(match.group())
                offsets.append(start + match.start())
        start += len(line)
    return Statement(text, tuple(tokens), tuple(offsets), SEPARATOR + "".join(t + SEPARATOR for t in tokens))
