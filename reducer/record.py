"""The record: which turns are compacted, and in which steps.

``plan`` replays the conversation. Example with room for 512 tokens: turns 1 to 11 fit; with turn 12 the history is
over, so turns 1 to 3 become the first segment of the record and 97 % of the room is in use; with turn 13 turn 4 becomes
the second segment, appended to the first. When the last turns and the record together have no room left, the record is
written anew at the next of ``MIN_RATES``, as one segment: each leaves a record shorter by about 4 %, so a conversation
is rewritten about once while it grows by a twenty-fifth. The last rate keeps the bare facts of the ledger.

The steps are those of extracts. A model, where one is configured, rewrites the segments of the last step only, each in
at most the tokens of its extracts: so it is asked once for each segment, and no step depends on what it says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reducer.blocks import RECORD_CLOSING, RECORD_OPENING
from reducer.config import HistoryConfig
from reducer.ledger import KIND_RANK
from reducer.prompt import WireMessage
from reducer.summary import (
    MIN_MODEL_TOKENS,
    SegmentSummary,
    Summarizer,
    SummaryMemory,
    chain_key,
    render_block,
    rewrite_segment,
    said_by,
    summarise_segment,
)
from reducer.tokens import TokenCounter
from reducer.turn_extracts import TurnExtract
from reducer.turns import Turn, calls_tools, is_tool_result, read_turns

MIN_RATES = (*(0.15 * 1.06**step for step in range(48)), math.inf)
"""What a clause must say per token to stay, one after the other as the room becomes too small; at last facts alone."""
FIRST_SHARE = 0.5
"""Share of the turns' tokens that the record takes at the first rate, about."""
NEXT_SHARE = 0.93
"""The same at one rate beside that at the rate before."""
LOW_WATERMARK = 0.97
"""Share of the room in use after a compaction; what lies above is room for turns until the next one."""
MODEL_LOW_WATERMARK = 0.7
"""The same where a model summarises: it is asked rarely, and for more than a line."""
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
        if self._size(bounds, level) + tail > allowance:
            return self._bare_plan(allowance)
        summaries = self._summaries(bounds, level)
        if self._summarizer is not None:
            summaries = self._rewrite(self._summarizer, bounds, level)
        size = sum(summary.num_tokens for summary in summaries)
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
            render_block(summaries),
            (size + self._num_block_tokens if size else 0) + tail,
            dict(pair for summary in summaries for pair in summary.turn_tokens),
            chosen,
            frozenset(said_by(summaries)),
            "; ".join(dict.fromkeys(notes)) or None,
        )

    def oldest_turns(self, num_units: int) -> list[Turn]:
        """What the first units say, as the record would read them."""
        return self._segment(0, num_units)

    def _compact(self, bounds: tuple[int, ...], level: int, newest: int, room: int) -> tuple[tuple[int, ...], int]:
        """One step: the oldest units behind the record join it until ``LOW_WATERMARK`` of the room is in use."""
        start = bounds[-1] if bounds else 0
        last = self._first_recent(newest, room)
        target = int(room * (MODEL_LOW_WATERMARK if self._config.summarizer == "model" else LOW_WATERMARK))
        while True:
            # Where not even all of them joining is enough, no smaller step is looked at.
            if last > start and 2 * self._size_with(bounds, last, level, newest) <= target + room:
                bound = self._guess(bounds, level, start, last, newest, target)
                while bound < last and self._size_with(bounds, bound, level, newest) > target:
                    bound = min(last, bound + max(1, (last - bound) // 2))
                return (*bounds, bound), level
            if last <= start and self._size(bounds, level) + sum(self._costs[start : newest + 1]) <= room:
                return bounds, level
            if level == len(MIN_RATES) - 1:
                # Not even the bare facts have room beside the recent turns: these go into the record as well.
                return ((*bounds, newest + 1) if newest + 1 > start else bounds), level
            # Written anew as one segment: what is said best is then chosen among all of its turns.
            level, bounds, start = level + 1, (), 0

    def _size_with(self, bounds: tuple[int, ...], bound: int, level: int, newest: int) -> int:
        """Tokens of the record grown up to ``bound``, and of the units behind it."""
        return self._size((*bounds, bound), level) + sum(self._costs[bound : newest + 1])

    def _guess(self, bounds: tuple[int, ...], level: int, start: int, last: int, newest: int, target: int) -> int:
        """The first bound that should do, if a segment takes its usual share and nothing more."""
        size: float = self._size(bounds, level) + sum(self._costs[start : newest + 1])
        bound = start
        while bound < last and size > target:
            size -= self._costs[bound] * (1 - FIRST_SHARE * NEXT_SHARE**level)
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
        key = self._key(bounds, level, by_model=False)
        if (cached := self._remembered(key)) is not None:
            return cached
        start, end = (bounds[-2] if len(bounds) > 1 else 0), bounds[-1]
        summary = summarise_segment(self._segment(start, end), said_by(before), MIN_RATES[level], self._counter)
        self._remember(key, summary)
        return summary

    def _rewrite(self, summarizer: Summarizer, bounds: tuple[int, ...], level: int) -> tuple[SegmentSummary, ...]:
        """The chain in the model's words; where it fails, a segment keeps its extracts."""
        final: list[SegmentSummary] = []
        start, is_complete = 0, True
        for number, (extracts, end) in enumerate(zip(self._summaries(bounds, level), bounds, strict=True), 1):
            # What follows a failure is said for this request only: the next one may find the model well.
            key = self._key(bounds[:number], level, by_model=True) if is_complete else None
            summary = self._remembered(key)
            if summary is None:
                turns = self._segment(start, end)
                if extracts.num_tokens >= MIN_MODEL_TOKENS:
                    said = said_by(final)
                    summary = rewrite_segment(turns, said, extracts, MIN_RATES[level], self._counter, summarizer)
                else:
                    summary = extracts
                is_complete = is_complete and summary.degraded is None
                if is_complete:
                    self._remember(key, summary)
            final.append(summary)
            start = end
        return tuple(final)

    def _remembered(self, key: bytes | None) -> SegmentSummary | None:
        return self._memory.cache.get(key) if self._memory is not None and key is not None else None

    def _remember(self, key: bytes | None, summary: SegmentSummary) -> None:
        if self._memory is not None and key is not None:
            self._memory.cache.put(key, summary)

    def _key(self, bounds: tuple[int, ...], level: int, *, by_model: bool) -> bytes | None:
        if self._memory is None:
            return None
        key = self._memory.scope
        start = 0
        for bound in bounds:
            members = [self._messages[i] for unit in self._units[start:bound] for i in unit]
            key = chain_key(key, members, MIN_RATES[level], self._config, by_model)
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

    def _bare_plan(self, allowance: int) -> Plan:
        """A record of facts only, what matters most and came last first, when not even all facts have room."""
        turns = self._segment(0, len(self._units))
        extract = TurnExtract(turns, set())
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


def quantise(tokens: int) -> int:
    """``tokens`` rounded down to one of sixteen steps an octave, so that a slightly longer question moves no step.

    >>> [quantise(n) for n in (7, 500, 511, 512, 4000)]
    [7, 496, 496, 512, 3968]
    """
    step = 1 << max(tokens.bit_length() - 5, 0)
    return tokens // step * step if tokens > 0 else 0
