"""Extracts: words chosen from turns, most that is new per token first, and the lines they make.

Of a piece only what reaches from its first new word to its last one is taken: so most of a record's tokens say
something, and what is freed goes to longer runs.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reducer.blocks import GAP, line_mark, protect
from reducer.ledger import NESTING_KINDS, SECONDARY_KINDS, Fact, nested_keys, statement_key
from reducer.pieces import CHAT_WEIGHT, Piece
from reducer.turns import Turn

TRAILING = frozenset({",", ";", ":", ".", "，", "；", "：", "。", "、", "-", "–", "—"})
"""Marks that are left out where a line or a gap follows them."""
LEADING = TRAILING | {"*", "•", "·", ">"}
"""Marks that are left out at the beginning of a run."""
_DETERMINERS = """
a an the my our your his her its their this that these those ein eine einen einem einer eines der die das den dem mein
meine meinen meinem unser unsere un una unos unas el la los las mi mis su sus une le les des mon ma mes notre nos
"""
DETERMINERS = frozenset(_DETERMINERS.split())
"""Articles and their like: they stay with the words behind them."""
GAP_TOKENS = 1
LABEL_TOKENS = 2
PIN_CONTEXT = 0.6
"""What it is worth to join words that stand alone to what is said of them, in new words."""
PAIR_GAIN = 0.37
"""What a new pair of neighbouring terms is worth, in new words."""
FACT_GAIN = 0.2
"""What a fact that need not be pinned is worth, in new words."""
COST_EXPONENT = 0.7
"""Below 1 a longer piece is preferred to shorter ones of the same rate: fewer cuts, whole thoughts."""


class _Offer(NamedTuple):
    """Words ``[first, last)`` that a piece would add, and what is new in them per token."""

    rate: float
    first: int
    last: int


@dataclass(slots=True)
class TurnExtract:
    """Words chosen from turns, and what they say; the running state of one greedy selection."""

    turns: Sequence[Turn]
    said: set[str]
    """Keys of facts and terms that were said before or are said by the chosen words."""
    chosen: list[set[int]] = field(default_factory=list)
    num_tokens: int = 0
    new: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not self.chosen:
            self.chosen = [set() for _ in self.turns]

    def cost(self, number: int, first: int, last: int) -> int:
        """Tokens that words ``[first, last)`` of a turn would add, with gaps and the speaker's label."""
        turn, chosen = self.turns[number], self.chosen[number]
        if not chosen:
            return turn.num_tokens_before[last] - turn.num_tokens_before[first] + LABEL_TOKENS
        if chosen.isdisjoint(range(first, last)):
            tokens = turn.num_tokens_before[last] - turn.num_tokens_before[first]
            return tokens if first - 1 in chosen or last in chosen else tokens + GAP_TOKENS
        return sum(turn.costs[word] for word in range(first, last) if word not in chosen)

    def add(self, number: int, first: int, last: int) -> None:
        """Choose words, and what is missing between them and chosen ones where that is a word no dearer than a gap."""
        turn, chosen = self.turns[number], self.chosen[number]
        if first - 2 in chosen and turn.costs[first - 1] <= GAP_TOKENS:
            first -= 1
        if last + 1 in chosen and turn.costs[last] <= GAP_TOKENS:
            last += 1
        self.num_tokens += self.cost(number, first, last)
        self.chosen[number].update(range(first, last))
        for word in range(first, last):
            if key := turn.terms[word].key:
                self._say(key)
                if turn.pairs[word] >= first:
                    self._say(_pair_key(turn, word))

    def say_fact(self, fact: Fact) -> None:
        """Note that a fact stands in the text, and with it those inside it."""
        self._say("\x00" + statement_key(fact))
        for key in nested_keys(fact):
            self._say("\x01" + key)

    def is_said(self, fact: Fact) -> bool:
        """Whether the fact stands in the text so far, on its own or inside another one."""
        return "\x00" + statement_key(fact) in self.said or (
            fact.kind in NESTING_KINDS and "\x01" + fact.key in self.said
        )

    def pin_facts(self, *, primary_only: bool = False) -> None:
        """Choose every fact that has not been said, in order."""
        for number, turn in enumerate(self.turns):
            for pin in turn.pins:
                if primary_only and is_secondary(turn, pin.fact):
                    continue
                if not self.is_said(pin.fact):
                    self.add(number, pin.first, pin.last)
                    self.say_fact(pin.fact)

    def fill(self, max_tokens: float = math.inf, min_rate: float = 0.0) -> None:
        """Choose pieces, most that is new per token first, down to ``min_rate`` and within ``max_tokens`` in all."""
        heap: list[tuple[float, int, int, Piece]] = []
        for number, turn in enumerate(self.turns):
            for order, piece in enumerate(turn.pieces):
                rate = self._shorten(number, piece).rate
                if rate > min_rate:
                    heap.append((-rate, number, order, piece))
        heapq.heapify(heap)
        while heap:
            _, number, order, piece = heapq.heappop(heap)
            rate, first, last = self._shorten(number, piece)
            if rate <= min_rate:
                continue
            if heap and -rate > heap[0][0]:
                heapq.heappush(heap, (-rate, number, order, piece))
                continue
            if self.num_tokens + self.cost(number, first, last) <= max_tokens:
                self.add(number, first, last)
                for pin in (self.turns[number].pins[pin] for pin in piece.pins):
                    if first <= pin.first and pin.last <= last:
                        self.say_fact(pin.fact)

    def _shorten(self, number: int, piece: Piece) -> _Offer:
        """A piece without what says nothing new at its edges, and what is new in it per token that it would add."""
        turn, chosen, said = self.turns[number], self.chosen[number], self.said
        gain, seen = 0.0, set()
        first, last = (piece.firm[0], piece.firm[-1] + 1) if piece.firm else (piece.last, piece.first)
        for word in piece.terms:
            key, weight = turn.terms[word]
            if word not in chosen and key not in said and key not in seen:
                seen.add(key)
                gain += weight
                if weight > CHAT_WEIGHT:
                    first, last = min(first, word), max(last, word + 1)
            begin = turn.pairs[word]
            if begin >= piece.first and _pair_key(turn, word) not in said:
                gain += PAIR_GAIN
                first, last = min(first, begin), max(last, word + 1)
        for pin in (turn.pins[pin] for pin in piece.pins):
            if not self.is_said(pin.fact):
                gain += FACT_GAIN
                first, last = min(first, pin.first), max(last, pin.last)
        if gain <= 0:
            return _Offer(0.0, piece.first, piece.last)
        first, last = _edges(turn, piece, first, last) if first < last else (piece.first, piece.last)
        if chosen and not chosen.isdisjoint(range(first, last)):
            gain += PIN_CONTEXT
        return _Offer(gain * piece.value / max(self.cost(number, first, last), 1) ** COST_EXPONENT, first, last)

    def _say(self, key: str) -> None:
        if key not in self.said:
            self.said.add(key)
            self.new.add(key)

    def turn_tokens(self) -> tuple[tuple[int, int], ...]:
        """Message index and tokens of its chosen words, for every message with any."""
        tokens: dict[int, int] = {}
        for turn, chosen in zip(self.turns, self.chosen, strict=True):
            if chosen:
                tokens[turn.index] = tokens.get(turn.index, 0) + sum(turn.costs[word] for word in chosen)
        return tuple(tokens.items())

    def render(self, user_mark: str = "") -> str:
        """The chosen words as lines, one for each run of one speaker; a line of the user's begins with ``user_mark``.

        A break inside a run begins a new line with its own mark, so that no text passes for another speaker's.
        """
        lines: list[str] = []
        speaker = ""
        for turn, chosen in zip(self.turns, self.chosen, strict=True):
            for first, last in word_runs(chosen, turn):
                is_quote = turn.is_quoted(first) and turn.speaker != "tool" and not turn.speaker.endswith(" quotes")
                label = f"{turn.speaker} quotes" if is_quote else turn.speaker
                mark = line_mark(label, user_mark)
                while last - first > 1 and turn.word(last - 1) in TRAILING:
                    last -= 1
                while last - first > 1 and turn.word(first) in LEADING:
                    first += 1
                text = turn.text[turn.words[first].start : turn.words[last - 1].end]
                for number, line in enumerate(text.splitlines()):
                    if not line.strip():
                        continue
                    if label == speaker and number == 0:
                        lines[-1] += GAP + protect(line.strip())
                    else:
                        lines.append(mark + protect(line.strip()))
                    speaker = label
        return "".join(line + "\n" for line in lines)


def word_runs(chosen: Collection[int], turn: Turn) -> list[tuple[int, int]]:
    """Chosen words as ranges; a range ends where quoted text begins or ends."""
    runs: list[tuple[int, int]] = []
    for word in sorted(chosen):
        if runs and runs[-1][1] == word and (not turn.quoted or turn.is_quoted(word) == turn.is_quoted(word - 1)):
            runs[-1] = (runs[-1][0], word + 1)
        else:
            runs.append((word, word + 1))
    return runs


def is_secondary(turn: Turn, fact: Fact) -> bool:
    """Whether a fact gives way where room is short: what was not found, and what the assistant counts and decides."""
    return fact.kind == "negation" or (turn.speaker != "user" and fact.kind in SECONDARY_KINDS)


def _edges(turn: Turn, piece: Piece, first: int, last: int) -> tuple[int, int]:
    """Words ``[first, last)`` with an article or a word of talk before them, no fact cut through."""
    if first > piece.first:
        is_talk = 0 < turn.terms[first - 1].weight <= CHAT_WEIGHT
        first -= is_talk or turn.word(first - 1).casefold() in DETERMINERS
    while first > piece.first and first in turn.insides:
        first -= 1
    while last < piece.last and last in turn.insides:
        last += 1
    return first, last


def _pair_key(turn: Turn, word: int) -> str:
    return f"{turn.terms[turn.pairs[word]].key}\x02{turn.terms[word].key}"
