"""The record: which turns are compacted, in which steps, and what is recalled beside it.

``plan`` replays the conversation. Example with room for 512 tokens and four recent messages: turns 1 to 11 fit; with
turn 12 the history is over, so turns 1 to 7 become the first segment of the record and 85 % of the room is in use;
turns 13 and 14 fit; with turn 15 turns 8 to 10 become the second segment, appended to the first. When recent turns and
record together have no room left, the record is written anew at the next lower of ``RATIOS``; the last one keeps the
bare facts of the ledger.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reducer.config import HistoryConfig
from reducer.encoder import FloatArray
from reducer.ledger import KIND_RANK
from reducer.prompt import WireMessage
from reducer.summary import (
    GAP,
    LABEL_TOKENS,
    Extract,
    SegmentSummary,
    Summarizer,
    SummaryMemory,
    chain_key,
    protect,
    render_block,
    said_by,
    summarise_segment,
)
from reducer.tokens import TokenCounter
from reducer.turns import (
    RECALL_CLOSING,
    RECALL_OPENING,
    RECORD_CLOSING,
    RECORD_OPENING,
    Turn,
    call_text,
    calls_tools,
    is_tool_result,
    read_turns,
    turn_text,
)

USEFUL_SLACK_TOKENS = 10
"""Unused room worth another round of clauses."""
RATIOS = (0.4, 0.35, 0.3, 0.26, 0.22, 0.18, 0.14, 0.1, 0.05, 0.0)
"""Shares of the turns' tokens that the record may take, one after the other as the room becomes too small."""
LOW_WATERMARK = 0.85
"""Share of the room in use after a compaction; what lies above is room for turns until the next one."""
KEPT_FOR_CLAUSES = 0.5
"""Share of the room for recalled turns that whole turns leave to clauses, where both may come back."""
MAX_RECENT_SHARE = 0.5
"""Most of the room that recent turns take before they are compacted as well."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many units the record stands for, and its block."""

    num_compacted: int
    block: str
    num_tokens: int
    """Tokens of the block and of the units behind it."""
    tokens: Mapping[int, int]
    """Tokens in the record by message index."""
    chosen: Mapping[tuple[int, int], frozenset[int]]
    """Words in the record by turn."""
    said: frozenset[str]
    degraded: str | None = None


@dataclass(frozen=True, slots=True)
class Recall:
    """Older turns that are back in the prompt: whole units, and clauses of others."""

    units: frozenset[int] = frozenset()
    block: str = ""
    num_tokens: int = 0
    tokens: Mapping[int, int] = field(default_factory=dict)


class Record:
    """The record of one conversation, for one request."""

    def __init__(
        self,
        messages: Sequence[WireMessage],
        units: Sequence[tuple[int, ...]],
        costs: Sequence[int],
        counter: TokenCounter,
        config: HistoryConfig,
        memory: SummaryMemory | None,
        summarizer: Summarizer | None,
        *,
        num_block_tokens: int,
    ) -> None:
        self._messages = messages
        self._units = units
        self._costs = costs
        self._counter = counter
        self._config = config
        self._memory = memory
        self._summarizer = summarizer if config.summarizer == "model" else None
        self._missing_model = config.summarizer == "model" and summarizer is None
        self._num_block_tokens = (
            num_block_tokens + counter.count_text(RECORD_OPENING) + counter.count_text(RECORD_CLOSING)
        )
        self._turns: dict[int, tuple[Turn, ...]] = {}
        self._chains: dict[tuple[int, tuple[int, ...]], tuple[SegmentSummary, ...]] = {}

    def plan(self, allowance: int) -> Plan:
        """Replay the conversation within ``allowance`` tokens."""
        room = quantise(allowance)
        bounds: tuple[int, ...] = ()
        level, first, tail = 0, 0, 0
        for newest in range(len(self._units)):
            tail += self._costs[newest]
            if self._size(bounds, level) + tail <= room:
                continue
            bounds, level = self._compact(bounds, level, newest, room)
            first = bounds[-1] if bounds else 0
            tail = sum(self._costs[first : newest + 1])
        summaries = self._summaries(bounds, level)
        block = render_block(summaries)
        if self._size(bounds, level) + tail > allowance:
            return self._bare_plan(allowance)
        chosen = {
            key: frozenset(word for first, last in runs for word in range(first, last))
            for summary in summaries
            for key, runs in summary.spans
        }
        notes = [summary.degraded for summary in summaries if summary.degraded]
        if self._missing_model:
            notes.append("no summarizer: extracts instead")
        return Plan(
            first,
            block,
            self._size(bounds, level) + tail,
            dict(pair for summary in summaries for pair in summary.turn_tokens),
            chosen,
            frozenset(said_by(summaries)),
            notes[0] if notes else None,
        )

    def recall(self, plan: Plan, scores: FloatArray, room: int, min_score: float, *, fill: bool) -> Recall:
        """Bring back what the question needs within ``room`` tokens, then, with ``fill``, what else is new."""
        room -= self._counter.count_text(RECALL_OPENING) + self._counter.count_text(RECALL_CLOSING)
        lines: dict[int, str] = {}
        units: list[int] = []
        left = room
        order = sorted(range(plan.num_compacted), key=lambda number: (-float(scores[number]), -number))
        for number in order:
            if scores[number] < min_score:
                break
            texts = {index: self._whole(index) for index in self._units[number]}
            cost = sum(self._counter.count_text(text) for text in texts.values())
            if 0 < cost <= left - (int(room * KEPT_FOR_CLAUSES) if fill else 0):
                units.append(number)
                lines.update(texts)
                left -= cost
        if fill and left > 2 * LABEL_TOKENS:
            clauses = self._more(plan, {index for n in units for index in self._units[n]}, lines, room)
        else:
            clauses = {}
        text = _join(lines, clauses)
        if not text:
            return Recall()
        block = RECALL_OPENING + text + RECALL_CLOSING
        return Recall(
            frozenset(units),
            block,
            self._counter.count_text(block),
            {index: self._counter.count_text(line) for index, line in (clauses | lines).items() if line},
        )

    def _more(self, plan: Plan, recalled: set[int], whole: Mapping[int, str], room: int) -> dict[int, str]:
        """Further clauses of compacted turns, by message index, that have room beside the ``whole`` turns."""
        turns = [turn for turn in self._segment(0, plan.num_compacted) if turn.index not in recalled]
        wanted = room - self._counter.count_text(_join(whole, {}))
        best: dict[int, str] = {}
        for _ in range(4):
            extract = Extract(turns, set(plan.said), [set(plan.chosen.get(turn.key, ())) for turn in turns])
            extract.fill(wanted)
            lines: dict[int, str] = {}
            for turn, chosen in zip(turns, extract.chosen, strict=True):
                new = chosen - plan.chosen.get(turn.key, frozenset())
                if new:
                    lines[turn.index] = lines.get(turn.index, "") + Extract([turn], set(), [new]).render()
            slack = room - self._counter.count_text(_join(whole, lines))
            if slack >= 0:
                best = lines
                if slack < USEFUL_SLACK_TOKENS:
                    break
            elif best:
                break
            wanted += slack - 2
        return best

    def _compact(self, bounds: tuple[int, ...], level: int, newest: int, room: int) -> tuple[tuple[int, ...], int]:
        """One step: the oldest units behind the record join it until ``LOW_WATERMARK`` of the room is in use."""
        start = bounds[-1] if bounds else 0
        last = self._first_recent(newest, room)
        target = int(room * LOW_WATERMARK)
        while True:
            if last > start:
                bound = self._guess(bounds, level, start, last, newest, target)
                while True:
                    grown = (*bounds, bound)
                    size = self._size(grown, level) + sum(self._costs[bound : newest + 1])
                    if size <= target or (bound == last and 2 * size <= target + room):
                        return grown, level
                    if bound == last:
                        break
                    bound = min(last, bound + max(1, (last - bound) // 2))
            elif self._size(bounds, level) + sum(self._costs[start : newest + 1]) <= room:
                return bounds, level
            if level == len(RATIOS) - 1:
                # Not even the bare facts have room beside the recent turns: these go into the record as well.
                return ((*bounds, newest + 1) if newest + 1 > start else bounds), level
            # Written anew as one segment: what is said best is then chosen among all of its turns.
            level, bounds, start = level + 1, (), 0

    def _guess(self, bounds: tuple[int, ...], level: int, start: int, last: int, newest: int, target: int) -> int:
        """The first bound that should do, if a segment takes its ratio and nothing more."""
        size: float = self._size(bounds, level) + sum(self._costs[start : newest + 1])
        bound = start
        while bound < last and size > target:
            size -= self._costs[bound] * (1 - RATIOS[level])
            bound += 1
        return max(bound, start + 1)

    def _first_recent(self, newest: int, room: int) -> int:
        """Number of the first unit that stays verbatim: the last messages, as far as they take half of the room."""
        first, covered, tokens = newest + 1, 0, 0
        while first > 0 and covered < self._config.num_recent_messages:
            tokens += self._costs[first - 1]
            if tokens > room * MAX_RECENT_SHARE:
                break
            first -= 1
            covered += len(self._units[first])
        return first

    def _size(self, bounds: tuple[int, ...], level: int) -> int:
        size = sum(summary.num_tokens for summary in self._summaries(bounds, level))
        return size + self._num_block_tokens if size else 0

    def _summaries(self, bounds: tuple[int, ...], level: int) -> tuple[SegmentSummary, ...]:
        """Summaries of the segments that end at ``bounds``; each follows from those before it."""
        if not bounds:
            return ()
        found = self._chains.get((level, bounds))
        if found is None:
            before = self._summaries(bounds[:-1], level)
            found = (*before, self._summarise(before, bounds, level))
            self._chains[level, bounds] = found
        return found

    def _summarise(self, before: tuple[SegmentSummary, ...], bounds: tuple[int, ...], level: int) -> SegmentSummary:
        start, end = (bounds[-2] if len(bounds) > 1 else 0), bounds[-1]
        key = self._key(bounds, level)
        cacheable = key is not None and not any(summary.degraded for summary in before)
        if self._memory is not None and key is not None and cacheable:
            cached = self._memory.cache.get(key)
            if cached is not None:
                return cached
        summary = summarise_segment(
            self._segment(start, end), said_by(before), RATIOS[level], self._counter, self._summarizer
        )
        if self._memory is not None and key is not None and cacheable and summary.degraded is None:
            self._memory.cache.put(key, summary)
        return summary

    def _key(self, bounds: tuple[int, ...], level: int) -> bytes | None:
        if self._memory is None:
            return None
        key = self._memory.scope
        start = 0
        for bound in bounds:
            members = [self._messages[i] for unit in self._units[start:bound] for i in unit]
            key = chain_key(key, members, RATIOS[level], self._config, self._summarizer is not None)
            start = bound
        return key

    def _segment(self, start: int, end: int) -> list[Turn]:
        """Turns with text of their own. A tool call and its results are verbatim or absent, unless configured."""
        turns: list[Turn] = []
        for unit in self._units[start:end]:
            if self._config.tool_results == "extract" or not any(
                calls_tools(self._messages[i]) or is_tool_result(self._messages[i]) for i in unit
            ):
                turns.extend(turn for index in unit for turn in self._read(index))
        return turns

    def _read(self, index: int) -> tuple[Turn, ...]:
        turns = self._turns.get(index)
        if turns is None:
            before = self._messages[index - 1] if index else None
            turns = self._turns[index] = read_turns(index, self._messages[index], self._counter, before)
        return turns

    def _whole(self, index: int) -> str:
        """A message as one line of the recall block, verbatim; nothing for a message without text."""
        message = self._messages[index]
        role = message.get("role")
        text = turn_text(message)
        call = call_text(message).strip()
        lines = f"{role}: {protect(text)}\n" if text.strip() else ""
        return lines + (f"{role} calls: {protect(call)}\n" if call else "")

    def _bare_plan(self, allowance: int) -> Plan:
        """A record of facts only, what matters most and came last first, when not even all facts have room."""
        turns = self._segment(0, len(self._units))
        extract = Extract(turns, set())
        room = allowance - self._num_block_tokens
        pins = [(KIND_RANK[pin.fact.kind], -number, pin) for number, turn in enumerate(turns) for pin in turn.pins]
        num_lost = 0
        for _, negated, pin in sorted(pins, key=lambda item: (item[0], item[1], item[2].first)):
            if extract.is_said(pin.fact):
                continue
            if extract.num_tokens + extract.cost(-negated, pin.first, pin.last) + 2 <= room:
                extract.add(-negated, pin.first, pin.last)
                extract.say_fact(pin.fact)
            else:
                num_lost += 1
        text = extract.render() if room > 0 else ""
        size = self._counter.count_text(text)
        if size > room or not text:
            note = f"{len(pins)} facts of earlier turns have no room in {allowance} tokens" if pins else None
            return Plan(len(self._units), "", 0, {}, {}, frozenset(), note)
        return Plan(
            len(self._units),
            RECORD_OPENING + text + RECORD_CLOSING,
            size + self._num_block_tokens,
            dict(extract.turn_tokens()),
            {turn.key: frozenset(words) for turn, words in zip(turns, extract.chosen, strict=True) if words},
            frozenset(extract.said),
            f"{num_lost} facts of earlier turns have no room in {allowance} tokens" if num_lost else None,
        )


def _join(whole: Mapping[int, str], clauses: Mapping[int, str]) -> str:
    """Whole turns and clauses of others in order; clauses of one speaker that follow each other share a line."""
    text = ""
    label = ""
    for index in sorted({*whole, *clauses}):
        if index in whole:
            text, label = text + whole[index], ""
            continue
        for line in clauses[index].splitlines():
            start = next((mark for mark in ("- ", "user: ") if line.startswith(mark)), "")
            if start and start == label:
                text = text.removesuffix("\n") + GAP + line.removeprefix(start) + "\n"
            else:
                text += line + "\n"
            label = start
    return text


def quantise(tokens: int) -> int:
    """``tokens`` rounded down to one of eight steps an octave, so that a slightly longer question moves no step.

    >>> [quantise(n) for n in (7, 500, 511, 512, 4000)]
    [7, 480, 480, 512, 3840]
    """
    step = 1 << max(tokens.bit_length() - 4, 0)
    return tokens // step * step if tokens > 0 else 0
