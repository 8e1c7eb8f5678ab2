"""Turns as the summary sees them: words with their cost, clauses, facts, and which text is only quoted.

A turn's text is cut into words (one character of a script without spaces) and these into pieces (``reducer.pieces``).
"""

import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reducer.blocks import split_blocks, starts_with_block
from reducer.ledger import find_facts
from reducer.pieces import Piece, Pin, Term, asks, cut_pieces, fact_insides, read_pairs, read_terms
from reducer.prompt import WireMessage
from reducer.stage import Span
from reducer.template import message_text
from reducer.tokens import TokenCounter

MAX_READ_CHARS = 20_000
"""Of a longer turn only both ends are read for the record of earlier turns: a pasted book must not cost minutes."""
SHORT_WORD = 4
"""Plain words up to this long count as one token without asking; what is sent is counted exactly anyway."""

_DENSE = "\u0e00-\u0e7f\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(
    rf"[{_DENSE}]|(?:(?![{_DENSE}])\w)+(?:['’.,:/@&+_-]+(?:(?![{_DENSE}])\w)+)*|(?:(?![{_DENSE}])[^\w\s])+"
)

_FENCE = re.compile(r"(?P<fence>```|\"\"\"|~~~|''')[^\n]*\n?.*?(?:(?P=fence)|\Z)", re.DOTALL)
_QUOTE_LINES = re.compile(r"(?m)(?:^[^\S\n]*>[^\n]*(?:\n|\Z))+")
_TAGGED = re.compile(r"<(?P<tag>[A-Za-z][\w-]*)[^<>]{0,200}>.{0,2000}?</(?P=tag)\s*>", re.DOTALL)
_MARKED = re.compile(r"“[^”]{20,}”|\"[^\"\n]{20,}\"|«[^»]{20,}»|„[^“]{20,}“|「[^」]{10,}」|『[^』]{10,}』")
_INTRODUCED = re.compile(
    r"\b(?:says|said|reads|wrote|writes|states|pasted|copied|page|web ?site|article|e-?mail|document|log|output"
    r"|transcript|snippet|error|message|text|seite|schreibt|steht|artikel|página|dice|artículo|correo|страниц\w*|письмо"
    r"|пишет|стать[яеи])\b[^\n:]{0,60}:\s*"
    r"|(?:网页|页面|網頁|邮件|文章|写道|写着|内容如下|如下|ページ|メール|記事|本文)[^\n：:]{0,20}[:：]\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message, ready to be summarised. ``words``, ``costs``, ``terms`` and ``pairs`` run in parallel."""

    index: int
    speaker: str
    text: str
    quoted: tuple[Span, ...]
    words: tuple[Span, ...]
    costs: tuple[int, ...]
    """Tokens of each word, the space before it included."""
    num_tokens_before: tuple[int, ...]
    """Tokens of all words before each word, and at the end of all words."""
    terms: tuple[Term, ...]
    """What each word is about."""
    pairs: tuple[int, ...]
    """For each word the one with which it is a pair of terms, before it, or -1."""
    pieces: tuple[Piece, ...]
    """What a summary may keep beside the facts."""
    pins: tuple[Pin, ...]
    insides: frozenset[int]
    """Words before which no cut may be, since a fact goes on there."""
    part: int = 0
    """Which part of the message it is, where a message holds an earlier record: each line of that is a turn."""

    @property
    def key(self) -> tuple[int, int]:
        """Message index and part."""
        return self.index, self.part

    def word(self, number: int) -> str:
        """A word as it stands in the text."""
        return self.text[self.words[number].start : self.words[number].end]

    def is_quoted(self, word: int) -> bool:
        """Whether a word belongs to text that the speaker only quotes."""
        start = self.words[word].start
        return any(low <= start < high for low, high in self.quoted)


def call_text(message: WireMessage) -> str:
    """Names and arguments of a message's tool calls, so that a call can be found by what it asked for."""
    calls: Any = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        calls = ()
    legacy: Any = message.get("function_call")
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    if legacy:
        functions.append(legacy)
    return "".join(
        f"\n{function.get('name')}({function.get('arguments', '')})"
        if isinstance(function, Mapping)
        else f"\n{function}"
        for function in functions
    )


def calls_tools(message: WireMessage) -> bool:
    """Whether an assistant message calls a tool."""
    return bool(message.get("tool_calls") or message.get("function_call"))


def is_tool_result(message: WireMessage) -> bool:
    """Whether a message is the result of a tool call."""
    return message.get("role") in ("tool", "function")


def turn_text(message: WireMessage) -> str:
    """All that a message says: its content, else its refusal; content may be null."""
    text = message_text(message)
    refusal = message.get("refusal")
    if isinstance(refusal, str) and refusal:
        return f"{text}\n{refusal}" if text else refusal
    return text


def both_ends(text: str, max_chars: int) -> str:
    """A text that is too long to be read whole, as its first and its last ``max_chars / 2`` characters."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} … {text[-half:]}"


def speaker_of(message: WireMessage) -> str:
    """How a message's speaker is written: its role."""
    role = message.get("role")
    return role if isinstance(role, str) and re.fullmatch(r"[\w-]{1,20}", role) else "other"


def quoted_spans(text: str, role: str) -> tuple[Span, ...]:
    """Parts of a text that its speaker only quotes: fences, quote lines, tagged blocks, long quotations, pasted text.

    Pasted text is what follows ``the page says:`` and the like, up to the end of the line, or of the message where the
    line goes on with a break.
    """
    if role in ("tool", "function"):
        return (Span(0, len(text)),) if text else ()
    found = [
        Span(*match.span()) for pattern in (_FENCE, _QUOTE_LINES, _TAGGED, _MARKED) for match in pattern.finditer(text)
    ]
    for match in _INTRODUCED.finditer(text):
        is_block = "\n" in match.group()
        line_end = text.find("\n", match.end())
        end = len(text) if is_block or line_end < 0 else line_end
        if end > match.end():
            found.append(Span(match.end(), end))
    found.sort()
    merged: list[Span] = []
    for span in found:
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return tuple(merged)


def read_turns(
    index: int, message: WireMessage, counter: TokenCounter, before: WireMessage | None = None
) -> tuple[Turn, ...]:
    """The turns of one message: one, or those of the blocks it begins with and one for the rest.

    A client may go on with messages that were compacted before. Their record is read line by line, with the speaker
    that each line has, so that what it pins stays pinned.
    """
    text = turn_text(message)
    if message.get("role") != "user" or not starts_with_block(text):
        return (read_turn(index, message, counter, before),)
    lines, text = split_blocks(text)
    turns: list[Turn] = []
    for line in lines:
        content = {"role": "tool" if line.is_quote else line.speaker, "content": line.text}
        turns.append(replace(read_turn(index, content, counter, is_extract=True), speaker=line.label, part=len(turns)))
    if text.strip():
        turns.append(replace(read_turn(index, {**message, "content": text}, counter, before), part=len(turns)))
    return tuple(turns)


def read_turn(
    index: int,
    message: WireMessage,
    counter: TokenCounter,
    before: WireMessage | None = None,
    *,
    is_extract: bool = False,
) -> Turn:
    """Cut one message, or a line of an earlier record, into words, pieces and facts.

    ``before`` is the message that it may answer.
    """
    text, speaker = both_ends(turn_text(message), MAX_READ_CHARS), speaker_of(message)
    quoted = quoted_spans(text, speaker)
    words = tuple(Span(*match.span()) for match in _WORD.finditer(text))
    starts = [word.start for word in words]
    ends = [word.end for word in words]
    pins = []
    for fact in find_facts(text, speaker, quoted, is_extract=is_extract):
        first, last = bisect_right(ends, fact.start), bisect_left(starts, fact.end)
        if first < last:
            pins.append(Pin(fact, first, last))
    terms = read_terms(text, words)
    costs = tuple(_word_cost(text, word, counter) for word in words)
    is_reply = before is not None and asks(turn_text(before))
    return Turn(
        index=index,
        speaker=speaker,
        text=text,
        quoted=quoted,
        words=words,
        costs=costs,
        num_tokens_before=(0, *itertools.accumulate(costs)),
        terms=tuple(terms),
        pairs=tuple(read_pairs(terms)),
        pieces=cut_pieces(text, words, terms, pins, is_reply=is_reply),
        pins=tuple(pins),
        insides=fact_insides(pins),
    )


def _word_cost(text: str, word: Span, counter: TokenCounter) -> int:
    raw = text[word.start : word.end]
    if word.end - word.start <= SHORT_WORD and raw.isascii() and raw.isalpha():
        return 1
    is_joined = word.start == 0 or not text[word.start - 1].isspace()
    return counter.count_text(raw if is_joined else " " + raw)
