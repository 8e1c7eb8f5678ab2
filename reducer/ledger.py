"""The fact ledger: what earlier turns stated that no summary may lose or reword.

Numbers with their unit, dates, times, prices, identifiers, addresses, names, quoted names, negations, decisions,
corrections, and what the user forbade or asked for once and for all. A fact is a span of the text as received, so it
is pinned word for word, both halves of a two-part instruction included:

    "Book 2 rooms for March 6th at Abercorn House. Do not push and do not open a PR."
          2 rooms    March 6th    Abercorn House    Do not push and do not open a PR.

Facts are found by form, not by meaning: months, weekdays, negations and such in English, German, Spanish, French,
Russian, Chinese, Japanese; figures and identifiers in any language. A value said again is one fact; a value that
differs is another one, so a correction stands behind what it corrects and nothing is superseded silently.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reducer.chat_words import CHAT_WORDS
from reducer.fact_patterns import (
    CLAUSE_END,
    DECIDES,
    DENSE,
    FORBIDS,
    GERMAN,
    IDENTIFIER_CASED,
    KATAKANA,
    LATIN_IN_DENSE,
    NAME,
    NEGATION,
    NOT_NAMES,
    QUOTED_NAME,
    RULES,
    SENTENCE_EDGE,
    SMALL_TALK,
    WORD,
    WORD_STARTS,
    FactKind,
)
from reducer.sentences import split_units
from reducer.stage import Span

KIND_RANK: dict[FactKind, int] = {
    "prohibition": 0, "decision": 1, "identifier": 2, "address": 2, "price": 2, "date": 2, "time": 2, "number": 2,
    "name": 3, "quote": 3, "negation": 4,
}  # fmt: skip
"""What goes last when even the bare facts are too many: the lower, the longer it stays."""

SECONDARY_KINDS: frozenset[FactKind] = frozenset({"number", "negation", "decision"})
"""Kinds that, said by the assistant, give way where room is short: counts of search results, what was not found."""
NESTING_KINDS: frozenset[FactKind] = frozenset({"name", "quote", "address", "identifier", "price", "date", "time"})
"""Kinds of which one may stand inside another and is stated with it: a city in an address, a price in a rate."""
MAX_NESTING_WORDS = 8
MAX_PINNED_WORDS = 40
"""A longer sentence is pinned from its instruction on, up to the end of the sentence."""


class Fact(NamedTuple):
    """One fact of a text: characters ``[start, end)`` of it, word for word."""

    kind: FactKind
    start: int
    end: int
    key: str
    """Equal for the same fact said again: case, white space and full-width forms do not count."""


def fact_key(text: str) -> str:
    """The form in which two statements of one fact are equal."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return " ".join(plain.casefold().replace("’", "'").split()).strip('.,;:!?"“”`')


_DAY_OF_MONTH = re.compile(
    r"(?:the )?(?P<day>\d{1,2})(?:st|nd|rd|th|\.)?(?: of| de)? (?P<month>[^\W\d_]{3,})"
    r"|(?P<month_>[^\W\d_]{3,})\.? (?:the )?(?P<day_>\d{1,2})(?:st|nd|rd|th)?"
)
_CLOCK = re.compile(r"(?P<hour>\d{1,2})(?:[:.](?P<minute>\d\d))?\s?(?P<half>[ap])\.?m\.?")


def statement_key(fact: Fact) -> str:
    """What a fact states: equal for two ways to write one date or time of day, else its key.

    >>> [statement_key(Fact("date", 0, 0, key)) for key in ("march 9th", "the 9th of march", "march 9, 2024")]
    ['9 mar', '9 mar', 'march 9, 2024']
    """
    if fact.kind == "date" and (match := _DAY_OF_MONTH.fullmatch(fact.key)):
        day, month = match["day"] or match["day_"], match["month"] or match["month_"]
        return f"{int(day)} {month[:3]}"
    if fact.kind == "time" and (match := _CLOCK.fullmatch(fact.key)):
        return f"{int(match['hour'])}:{match['minute'] or '00'} {match['half']}m"
    return fact.key


def nested_keys(fact: Fact) -> list[str]:
    """Keys that a fact states along with its own: runs of the words of a name, an address and the like."""
    if fact.kind not in NESTING_KINDS:
        return []
    words = fact.key.split()
    if not 1 < len(words) <= MAX_NESTING_WORDS:
        return []
    return [
        fact_key(" ".join(words[first:last]))
        for first in range(len(words))
        for last in range(first + 1, len(words) + 1)
        if last - first < len(words)
    ]


def find_facts(text: str, role: str, quoted: Sequence[Span] = (), *, is_extract: bool = False) -> list[Fact]:
    """Facts of one message, by where they start; a fact inside another one is left out.

    A line of an earlier record (``is_extract``) begins and goes on anywhere in a sentence: its capitals are names.

    Only the user's own words forbid or instruct: inside ``quoted`` spans, and in other roles, such sentences are text
    like any other.
    """
    facts: list[Fact] = []
    reach = [0] * len(text)  # the furthest end of a fact that covers this character

    def add(kind: FactKind, start: int, end: int) -> None:
        while start < end and (text[start].isspace() or text[start] in ",;"):
            start += 1
        while end > start and (text[end - 1].isspace() or text[end - 1] in ",;:"):
            end -= 1
        if kind in ("time", "date") and text[start:end].endswith(".") and text.count(".", start, end) == 1:
            end -= 1
        if start < end and reach[start] < end:
            facts.append(Fact(kind, start, end, fact_key(text[start:end])))
            for place in range(start, end):
                reach[place] = max(reach[place], end)

    for start, end in _pinned_sentences(text, role, quoted):
        add("prohibition", start, end)
    for start, end in _matching_sentences(text, DECIDES):
        add("decision", start, end)
    present = _present(text)
    names = list(_names(text, is_extract=is_extract))
    for start, end in names:
        if any(char.isdigit() for char in text[start:end]):
            add("address", start, end)  # 28-30 Bute Gardens
    for rule in RULES:
        if not rule.needs or rule.needs & present:
            for match in rule.pattern.finditer(text):
                add(rule.kind, *match.span())
    for match in IDENTIFIER_CASED.finditer(text):
        if match.group().casefold() not in NOT_NAMES:
            add("identifier", *match.span())
    for start, end in names:
        add("name", start, end)
    for pattern, kind in _OTHER_NAMES:
        for match in pattern.finditer(text):
            add(kind, *match.span())
    return _outermost(_negated(text, _outermost(facts)))


def _outermost(facts: Iterable[Fact]) -> list[Fact]:
    outermost: list[Fact] = []
    for fact in sorted(facts, key=lambda fact: (fact.start, -fact.end)):
        if not outermost or fact.end > outermost[-1].end:
            outermost.append(fact)
    return outermost


def _negated(text: str, facts: Sequence[Fact]) -> list[Fact]:
    """Facts and negations; a fact that is negated is one with its negation: "not on 14 March", never the bare date."""
    found = list(facts)
    for start, negation, end in _negations(text):
        bound = [fact for fact in found if fact.start < end and fact.end > negation]
        if any(fact.start <= start and end <= fact.end for fact in bound):
            continue  # said by a longer fact, such as a whole sentence
        found = [fact for fact in found if fact not in bound]
        low = min([start, *(fact.start for fact in bound)])
        high = max([end, *(fact.end for fact in bound)])
        kind: FactKind = min((fact.kind for fact in bound), key=KIND_RANK.__getitem__, default="negation")
        found.append(Fact(kind, low, high, fact_key(text[low:high])))
    return found


def missing_facts(facts: Iterable[Fact], text: str) -> list[Fact]:
    """The facts that do not stand in ``text`` word for word, each once, in order: the diff after summarising."""
    searched = f" {_spaced(text)} "
    found: dict[str, Fact] = {}
    for fact in facts:
        if fact.key not in found and f" {_spaced(fact.key)} " not in searched:
            found[fact.key] = fact
    return list(found.values())


_OTHER_NAMES: tuple[tuple[re.Pattern[str], FactKind], ...] = (
    (QUOTED_NAME, "quote"),
    (KATAKANA, "name"),
    (LATIN_IN_DENSE, "name"),
)


def _present(text: str) -> set[str]:
    """Beginnings of the text's words, three letters each, and whether there are digits and dense scripts."""
    present = {word[:3] for word in WORD_STARTS.findall(text.casefold())}
    if any(char.isdigit() for char in text):
        present.add("0")
    if not text.isascii():
        present.add("漢")
    return present


def _spaced(text: str) -> str:
    """Words of a key with one space between them; each character of a script without spaces is a word."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return " ".join(WORD.findall(plain.casefold().replace("’", "'")))


def _pinned_sentences(text: str, role: str, quoted: Sequence[Span]) -> list[tuple[int, int]]:
    if role != "user":
        return []
    return [
        (start, end)
        for start, end in _matching_sentences(text, FORBIDS)
        if not any(start < high and low < end for low, high in quoted)
    ]


def _matching_sentences(text: str, pattern: re.Pattern[str]) -> list[tuple[int, int]]:
    """Sentences in which ``pattern`` occurs; a long one from the clause of its first match on."""
    if not pattern.search(text):
        return []
    found: list[tuple[int, int]] = []
    for start, end in split_units(text):
        sentence = text[start:end]
        match = pattern.search(sentence)
        if match is None or sentence.rstrip().endswith(("?", "？")):
            continue
        words = [word.start() for word in WORD.finditer(sentence)]
        if len(words) > MAX_PINNED_WORDS:
            cuts = [cut.end() for cut in CLAUSE_END.finditer(sentence, 0, match.start() + 1)]
            first = cuts[-1] if cuts else match.start()
            behind = [place for place in words if place >= first]
            last = behind[MAX_PINNED_WORDS] if len(behind) > MAX_PINNED_WORDS else len(sentence)
            start, end = start + first, start + last
        found.append((start, end))
    return found


def _names(text: str, *, is_extract: bool) -> Iterable[tuple[int, int]]:
    """Capitalised words in the middle of a sentence, and runs of them anywhere."""
    is_german = len(GERMAN.findall(text)) >= 2
    for match in NAME.finditer(text):
        start, end = match.span()
        parts = [(part.start() + start, part.end() + start) for part in re.finditer(r"\S+", match.group())]
        is_first = not is_extract and bool(SENTENCE_EDGE.search(text[max(0, start - 8) : start]))
        is_lone = len(parts) == 1
        while parts and (is_first or is_lone) and _is_common(text[parts[0][0] : parts[0][1]]):
            parts.pop(0)
        while parts and (
            text[parts[0][0]].islower()
            or (text[parts[0][1] - 1] == "," and _is_common(text[parts[0][0] : parts[0][1] - 1]))
        ):
            parts.pop(0)
        num_capitals = sum(text[low].isupper() and text[low:high] != "The" for low, high in parts)
        if not parts or (num_capitals < 2 and (is_first or is_german) and not text[parts[0][0]].isdigit()):
            continue
        if num_capitals and not (len(parts) == 1 and parts[0][1] - parts[0][0] < 2):
            yield parts[0][0], end


def _is_common(word: str) -> bool:
    """Whether a capitalised word at the beginning of a sentence is no name."""
    plain = word.casefold().replace("’", "'").strip(".")
    if plain == "the":
        return False
    stem = plain.removesuffix("'s")
    return stem in NOT_NAMES or stem in CHAT_WORDS or "'" in stem


def _negations(text: str) -> Iterable[tuple[int, int, int]]:
    """Each negation with the words it bears on: two before it, up to five behind it, inside its clause.

    Yields the beginning of all, of the negation itself, and the end.
    """
    edge = 0
    for match in NEGATION.finditer(text):
        clause_end = CLAUSE_END.search(text, match.end(), match.end() + 14)
        talk_end = clause_end.end() if clause_end else match.end() + 14
        if match.start() < edge or SMALL_TALK.search(text, max(0, match.start() - 6), talk_end):
            continue
        before = [cut.end() for cut in CLAUSE_END.finditer(text, max(0, match.start() - 80), match.start())]
        low = max(before[-1] if before else max(0, match.start() - 80), edge)
        limit = min(len(text), match.end() + 80)
        cut = CLAUSE_END.search(text, match.end(), limit)
        high = cut.start() if cut else limit
        dense = bool(re.match(rf"[{DENSE}]", match.group()))
        ahead = [word.start() for word in WORD.finditer(text, low, match.start())][-(6 if dense else 2) :]
        behind = [word.end() for word in WORD.finditer(text, match.end(), high)][: 8 if dense else 4]
        if not behind and not ahead:
            continue
        edge = behind[-1] if behind else match.end()
        yield (ahead[0] if ahead else match.start()), match.start(), edge
