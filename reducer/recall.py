"""Recall: what of the older turns is back in the prompt beside the question.

The record is made without the question, so it leaves some room to what the question needs (``recall_room``): the most
relevant sentences of the most relevant turns, a turn whole where all of it comes back. Where the question finds
nothing, and in what is left, further clauses follow that say most that is new.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from reducer.blocks import (
    GAP,
    RECALL_CLOSING,
    RECALL_OPENING,
    line_mark,
    protect,
    read_line,
    starts_with_block,
)
from reducer.prompt import WireMessage
from reducer.record import Plan
from reducer.relevance import Relevance
from reducer.sentences import split_units
from reducer.tokens import TokenCounter
from reducer.turn_extracts import LABEL_TOKENS, TurnExtract
from reducer.turns import Turn, call_text, turn_text

MAX_FACTS_SHARE = 0.5
"""Share of the room that facts take from which on the record needs all of it."""
READ_SHARE = 4
"""Relevant turns are read for sentences until they take this many times the room."""
USEFUL_SLACK_TOKENS = 10
"""Unused room worth another round of clauses."""
MAX_ROUNDS = 5
MIN_CLAUSE_WORDS = 2
"""A single word beside the question tells nobody what it was about; a fact may be one word."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Relevant turns, whole or in sentences, and clauses of others."""

    units: frozenset[int] = frozenset()
    """Units that are back whole because the question needs them."""
    parts: frozenset[int] = frozenset()
    """Units of which it needs some sentences."""
    block: str = ""
    num_tokens: int = 0
    tokens: Mapping[int, int] = field(default_factory=dict)
    """Tokens in the block by message index."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Something relevant: words ``[first, last)`` of a turn, or a unit that stays whole."""

    score: float
    unit: int
    turn: int
    """Number of the turn, or -1 for the whole unit."""
    first: int = 0
    last: int = 0


def recall_room(turns: Sequence[Turn], allowance: int, share: float) -> int:
    """Tokens that the record leaves to recall: ``share`` of the allowance, less the more of it facts take.

    The record says every fact word for word, so a conversation of facts is answered by its record; of talk it keeps
    little. As facts never become fewer, the record's room only grows with a conversation.
    """
    ledger = TurnExtract(turns, set())
    ledger.pin_facts(primary_only=True)
    return int(share * max(allowance - ledger.num_tokens / MAX_FACTS_SHARE, 0.0))


def recall_turns(
    messages: Sequence[WireMessage],
    units: Sequence[tuple[int, ...]],
    turns: Sequence[Turn],
    plan: Plan,
    relevance: Relevance,
    room: int,
    min_score: float,
    counter: TokenCounter,
    *,
    fill: bool,
) -> Recall:
    """Bring back what the question needs within ``room`` tokens, then, with ``fill``, what else is new.

    ``units`` are the compacted ones, ``relevance`` is theirs, ``turns`` what they say.
    """
    room -= counter.count_text(RECALL_OPENING) + counter.count_text(RECALL_CLOSING)
    found: list[_Found] = []
    if room > LABEL_TOKENS and relevance.is_found:
        found = _choose(messages, units, turns, relevance, room, min_score, counter)
    turns = [_without_single_words(turn) for turn in turns]
    block = _Block(messages, units, turns, plan, found, counter)
    while found and block.count() > room:
        found = found[:-1]
        block = _Block(messages, units, turns, plan, found, counter)
    if fill and room > 2 * LABEL_TOKENS:
        block.fill(room)
    text = block.text()
    if not text:
        return Recall()
    text = RECALL_OPENING + text + RECALL_CLOSING
    relevant = frozenset(item.unit for item in found)
    whole = frozenset(unit for unit in relevant if block.is_whole(units[unit]))
    return Recall(whole, relevant - whole, text, counter.count_text(text), block.turn_tokens())


def whole_turn(message: WireMessage) -> str:
    """A message as lines of the recall block, verbatim; nothing for a message without text."""
    role = message.get("role")
    text = turn_text(message)
    call = call_text(message).strip()
    lines = f"{role}: {protect(text)}\n" if text.strip() else ""
    return lines + (f"{role} calls: {protect(call)}\n" if call else "")


def _choose(
    messages: Sequence[WireMessage],
    units: Sequence[tuple[int, ...]],
    turns: Sequence[Turn],
    relevance: Relevance,
    room: int,
    min_score: float,
    counter: TokenCounter,
) -> list[_Found]:
    """What is relevant and has room, about, most relevant first."""
    scores = relevance.scores
    members: dict[int, list[int]] = {}
    for number, turn in enumerate(turns):
        members.setdefault(turn.index, []).append(number)
    found: list[_Found] = []
    costs: dict[int, int] = {}
    sentences: list[_Found] = []
    num_read = 0
    for unit in sorted(range(len(units)), key=lambda unit: (-float(scores[unit]), -unit)):
        if scores[unit] < min_score or num_read > READ_SHARE * room:
            break
        numbers = [number for index in units[unit] for number in members.get(index, ())]
        if not numbers:
            costs[unit] = sum(counter.count_text(whole_turn(messages[index])) for index in units[unit])
            num_read += costs[unit]
            found.append(_Found(float(scores[unit]), unit, -1))
        for number in numbers:
            num_read += turns[number].num_tokens_before[-1]
            sentences += [_Found(0.0, unit, number, *words) for words in _sentences(turns[number])]
    rated = relevance.of_sentences([_text(turns, item) for item in sentences], [item.unit for item in sentences])
    found += [
        _Found(round(float(score), 5), item.unit, item.turn, item.first, item.last)
        for score, item in zip(rated, sentences, strict=True)
        if score >= min_score
    ]
    found.sort(key=lambda item: (-item.score, -item.unit, item.turn, item.first))
    extract = TurnExtract(turns, set())
    chosen: list[_Found] = []
    left = room
    for item in found:
        cost = costs[item.unit] if item.turn < 0 else extract.cost(item.turn, item.first, item.last)
        if 0 < cost <= left:
            left -= cost
            chosen.append(item)
            if item.turn >= 0:
                extract.add(item.turn, item.first, item.last)
    return chosen


def _without_single_words(turn: Turn) -> Turn:
    return replace(turn, pieces=tuple(p for p in turn.pieces if p.pins or p.last - p.first >= MIN_CLAUSE_WORDS))


def _sentences(turn: Turn) -> list[tuple[int, int]]:
    """Words of each sentence of a turn."""
    starts = [word.start for word in turn.words]
    bounds = [bisect_left(starts, unit.end) for unit in split_units(turn.text)]
    return [(first, last) for first, last in zip([0, *bounds], bounds, strict=False) if first < last]


def _text(turns: Sequence[Turn], item: _Found) -> str:
    words = turns[item.turn].words
    return turns[item.turn].text[words[item.first].start : words[item.last - 1].end]


class _Block:
    """The text of the recall block: lines as in the record, then whole messages."""

    def __init__(
        self,
        messages: Sequence[WireMessage],
        units: Sequence[tuple[int, ...]],
        turns: Sequence[Turn],
        plan: Plan,
        found: Sequence[_Found],
        counter: TokenCounter,
    ) -> None:
        self._turns = turns
        self._plan = plan
        self._found = found
        self._counter = counter
        self._whole: dict[int, str] = {}
        for item in found:
            if item.turn < 0:
                self._whole.update((index, whole_turn(messages[index])) for index in units[item.unit])
        extract = self._extract()
        for turn, chosen in zip(turns, extract.chosen, strict=True):
            if chosen and len(chosen) == len(turn.words) and not starts_with_block(turn_text(messages[turn.index])):
                self._whole[turn.index] = whole_turn(messages[turn.index])
        self._lines = self._render(extract)

    def fill(self, room: int) -> None:
        """Add further clauses, most that is new first, as far as ``room`` goes."""
        slack = room - self.count()
        extract = self._extract()
        wanted = extract.num_tokens + slack
        is_filled = False
        for _ in range(MAX_ROUNDS):
            extract.fill(wanted)
            lines = self._render(extract)
            slack = room - self._counter.count_text(_join(self._whole, lines))
            if slack >= 0:
                self._lines, is_filled = lines, True
                if slack < USEFUL_SLACK_TOKENS:
                    return
            elif is_filled:
                return
            wanted += slack - 2
            extract = self._extract()

    def is_whole(self, unit: Sequence[int]) -> bool:
        """Whether all messages of a unit are there word for word."""
        return all(index in self._whole for index in unit)

    def text(self) -> str:
        """All lines."""
        return _join(self._whole, self._lines)

    def count(self) -> int:
        """Tokens of all lines."""
        return self._counter.count_text(self.text())

    def turn_tokens(self) -> dict[int, int]:
        """Tokens by message index."""
        return {index: self._counter.count_text(line) for index, line in (self._lines | self._whole).items() if line}

    def _extract(self) -> TurnExtract:
        """What the record says, and what was found relevant."""
        extract = TurnExtract(self._turns, set(self._plan.said))
        for item in self._found:
            if item.turn >= 0:
                extract.add(item.turn, item.first, item.last)
        return extract

    def _render(self, extract: TurnExtract) -> dict[int, str]:
        lines: dict[int, str] = {}
        for turn, chosen in zip(self._turns, extract.chosen, strict=True):
            if chosen and turn.index not in self._whole:
                lines[turn.index] = lines.get(turn.index, "") + TurnExtract([turn], set(), [chosen]).render()
        return lines


def _join(whole: Mapping[int, str], clauses: Mapping[int, str]) -> str:
    """Clauses as in the record, those of one speaker that follow each other on one line; then whole turns."""
    lines: list[str] = []
    label: str | None = None
    for index in sorted(clauses):
        for line in clauses[index].splitlines():
            speaker = read_line(line).label
            if lines and speaker == label:
                lines[-1] += GAP + line.removeprefix(line_mark(speaker))
            else:
                lines.append(line)
            label = speaker
    return "".join(line + "\n" for line in lines) + "".join(whole[index] for index in sorted(whole))
