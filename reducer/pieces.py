"""What a summary may keep of a turn beside its facts: sentences, clauses, phrases, words; and what each is worth.

A piece is worth the terms that nothing has said yet, and the pairs of neighbouring terms ("stained glass", "city of
birth"): a pair is what a bare list of words would lose. A cut never runs through a fact.
"""

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from reducer.chat_words import CHAT_WORDS
from reducer.fact_patterns import NEGATION
from reducer.ledger import SECONDARY_KINDS, Fact, fact_key
from reducer.lexical import STOP_WORDS
from reducer.sentences import split_units
from reducer.stage import Span

MIN_PIECE_WORDS = 3
MAX_PIECE_WORDS = 16
MAX_PHRASE_WORDS = 4
MAX_SENTENCE_WORDS = 40
MAX_JOINT = 4
"""Small words that may stand between two terms of a pair ("painting of a castle")."""
PHRASE_WEIGHT = 0.8
"""Value of a run of words taken out of its clause: short, but harder to read."""
WORD_WEIGHT = 0.5
"""Value of a single word out of a run."""
CHAT_WEIGHT = 0.1
"""Weight of a word of talk beside 1 for a topic's word."""
DENSE_WEIGHT = 0.4
"""Weight of a pair of characters of a script without spaces."""
REPLY_WEIGHT = 1.8
"""Value of the beginning of an answer to a question; the question tells what will be asked again."""
REPLY_UNITS = 3
"""Sentences at the beginning of an answer that count as the answer."""
OTHER_WEIGHT = 0.6
"""Value of a sentence in the second person only: praise, wishes, encouragement."""
QUESTION_WEIGHT = 0.5
"""Value of a sentence that asks instead of telling."""
ASIDE_WEIGHT = 0.7
"""Weight of a term in square brackets: stage directions, captions of attachments."""

_IS_DENSE = re.compile(
    "[\u0e00-\u0e7f\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_PLAIN = re.compile(
    r"[\u0e00-\u0e7f\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
    r"|[^\W_]+(?:['’_-][^\W_]+)*"
)
_ASIDE = re.compile(r"\[[^\[\]\n]{1,400}\]")
_CLAUSE_END = re.compile(r"[,;:.!?)\]\"”…–—，；：。！？、）]$|^[-–—]$")
_JOIN_WORDS = """
and but because so which who that while when where if although though after before since unless instead with about
und aber weil dass wenn oder y pero porque que cuando и но что если когда потому который
"""
_JOINS = frozenset(_JOIN_WORDS.split())

_QUESTION_END = re.compile(r"[?？]\W*(?:\[[^\]]*\])?\s*$")
_FIRST_PERSON = re.compile(
    r"\b(?:i|i['’](?:m|ve|d|ll)|my|me|mine|we|we['’](?:re|ve|d|ll)|our|ours|us|ich|mein\w*|mir|mich|wir|unser\w*|uns|yo|mi|mis"
    r"|nosotros|nuestr[oa]s?|я|мне|меня|мой|моя|мы|нам|нас|наш\w*)\b|我|私|僕|俺|저는|제가|나는|내가|우리",
    re.IGNORECASE,
)
_SECOND_PERSON = re.compile(
    r"\b(?:you|you['’](?:re|ve|d|ll)|your|yours|du|dein\w*|dir|dich|tú|tu|tus|usted|ты|тебе|тебя|твой|твоя|вы|вам|вас|ваш\w*)\b"
    r"|你|您|あなた|당신",
    re.IGNORECASE,
)


class Pin(NamedTuple):
    """A fact and the words ``[first, last)`` of its turn that state it."""

    fact: Fact
    first: int
    last: int


class Piece(NamedTuple):
    """Words ``[first, last)`` of a turn, and how much what is new in them counts."""

    first: int
    last: int
    value: float
    terms: tuple[int, ...]
    """Those of its words that say something."""
    pins: tuple[int, ...]
    """Numbers of the turn's pins that lie inside."""
    firm: tuple[int, ...]
    """First and last of its words that no shortening cuts off: all where something is negated, else characters of a
    script without spaces."""


class Term(NamedTuple):
    """What a word is about; empty for words that say nothing. ``weight`` is its worth while nothing has said it."""

    key: str
    weight: float


def read_terms(text: str, words: Sequence[Span]) -> list[Term]:
    """The term of each word."""
    asides = [match.span() for match in _ASIDE.finditer(text)]
    terms: list[Term] = []
    previous = ""
    for start, end in words:
        raw = text[start:end]
        is_dense = end - start == 1 and bool(_IS_DENSE.match(raw))
        term = _dense_term(raw, previous) if is_dense else _term(raw)
        previous = raw if is_dense else ""
        if asides and any(low <= start < high for low, high in asides):
            term = Term(term.key, term.weight * ASIDE_WEIGHT)
        terms.append(term)
    return terms


def read_pairs(terms: Sequence[Term]) -> list[int]:
    """For each word that ends a pair of topic terms the word that begins it, else -1."""
    pairs = [-1] * len(terms)
    last = -1
    for word, term in enumerate(terms):
        if term.weight <= DENSE_WEIGHT:
            continue
        if last >= 0 and word - last <= MAX_JOINT + 1:
            pairs[word] = last
        last = word
    return pairs


def asks(text: str) -> bool:
    """Whether a message ends with a question."""
    return bool(_QUESTION_END.search(text[-160:]))


def fact_insides(pins: Iterable[Pin]) -> frozenset[int]:
    """Words before which no cut may be: it would run through a fact."""
    return frozenset(word for pin in pins for word in range(pin.first + 1, pin.last))


def cut_pieces(
    text: str, words: Sequence[Span], terms: Sequence[Term], pins: Sequence[Pin], *, is_reply: bool
) -> tuple[Piece, ...]:
    """Sentences, clauses, phrases and words; none ends inside a fact. ``is_reply``: the message answers a question."""
    starts = [word.start for word in words]
    inside = fact_insides(pins)
    named = {word for pin in pins for word in range(pin.first, pin.last)}
    content = [word for word, term in enumerate(terms) if term.key]
    negated, dense = _firm_words(text, words)
    values: dict[tuple[int, int], float] = {}

    def add(first: int, last: int, value: float) -> None:
        values[first, last] = max(value, values.get((first, last), 0.0))

    for number, unit in enumerate(split_units(text)):
        first, last = bisect_left(starts, unit.start), bisect_left(starts, unit.end)
        if first in inside or last in inside or first == last:
            first = next((word for word in range(first, last) if word not in inside), last)
        if first >= last:
            continue
        value = _value(text[unit.start : unit.end]) * (REPLY_WEIGHT if is_reply and number < REPLY_UNITS else 1.0)
        clauses = list(_clauses(text, words, first, last, inside))
        for low, high in clauses:
            add(low, high, value)
        if len(clauses) > 1 and last - first <= MAX_SENTENCE_WORDS:
            add(first, last, value)
        for low, high in _phrases(first, last, terms, named):
            add(low, high, value * PHRASE_WEIGHT)
            if high - low > 1:
                for word in range(low, high):
                    add(word, word + 1, value * WORD_WEIGHT)
    for pin in pins:
        if pin.fact.kind in SECONDARY_KINDS:
            add(pin.first, pin.last, 1.0)
    return tuple(
        Piece(
            first,
            last,
            value,
            tuple(content[bisect_left(content, first) : bisect_left(content, last)]),
            tuple(number for number, pin in enumerate(pins) if first <= pin.first and pin.last <= last),
            _firm_ends(first, last, negated, dense),
        )
        for (first, last), value in values.items()
    )


def _firm_words(text: str, words: Sequence[Span]) -> tuple[list[int], list[int]]:
    """Words that negate, and words of a script without spaces."""
    places = [match.start() for match in NEGATION.finditer(text)]
    negated = [n for n, (start, end) in enumerate(words) if bisect_left(places, start) < bisect_left(places, end)]
    return negated, [number for number, (start, _) in enumerate(words) if _IS_DENSE.match(text, start)]


def _firm_ends(first: int, last: int, negated: Sequence[int], dense: Sequence[int]) -> tuple[int, ...]:
    """All of a piece that negates something: what it bears on may stand anywhere in it. Else its dense words."""
    if bisect_left(negated, first) < bisect_left(negated, last):
        return (first, last - 1)
    low, high = bisect_left(dense, first), bisect_left(dense, last)
    return (dense[low], dense[high - 1]) if low < high else ()


def _term(raw: str) -> Term:
    match = _PLAIN.search(raw)
    if match is None:
        return Term("", 0.0)
    word = fact_key(match.group())
    word = word.removesuffix("'s")
    if word in STOP_WORDS or "'" in word or len(word) < 3:
        return Term("", 0.0)
    if word in CHAT_WORDS:
        return Term(word, CHAT_WEIGHT)
    stem = word[:-1] if len(word) > 4 and word.endswith("s") and not word.endswith("ss") else word
    return Term(stem, 1.0)


def _dense_term(raw: str, before: str) -> Term:
    if not before:
        return Term("", 0.0)
    return Term(unicodedata.normalize("NFKC", before + raw), DENSE_WEIGHT)


def _value(sentence: str) -> float:
    """What a sentence is worth to whoever asks later: its speaker's own affairs more than praise of the other's."""
    value = 1.0
    if sentence.rstrip().endswith(("?", "？")):
        value *= QUESTION_WEIGHT
    if _SECOND_PERSON.search(sentence) and not _FIRST_PERSON.search(sentence):
        value *= OTHER_WEIGHT
    return value


def _clauses(
    text: str, words: Sequence[Span], first: int, last: int, inside: Collection[int]
) -> Iterable[tuple[int, int]]:
    begin = first
    for word in range(first + 1, last):
        if word in inside:
            continue
        length = word - begin
        start, end = words[word]
        previous = words[word - 1]
        if length >= MAX_PIECE_WORDS or (
            length >= MIN_PIECE_WORDS
            and last - word >= MIN_PIECE_WORDS
            and (_CLAUSE_END.search(text[previous.start : previous.end]) or text[start:end].casefold() in _JOINS)
        ):
            yield begin, word
            begin = word
    if begin < last:
        yield begin, last


def _phrases(first: int, last: int, terms: Sequence[Term], named: Collection[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring topic terms, facts left out."""
    phrases: list[tuple[int, int]] = []
    for word in range(first, last):
        if terms[word].weight <= DENSE_WEIGHT or word in named:
            continue
        if phrases and phrases[-1][1] == word and word - phrases[-1][0] < MAX_PHRASE_WORDS:
            phrases[-1] = (phrases[-1][0], word + 1)
        else:
            phrases.append((word, word + 1))
    return phrases
