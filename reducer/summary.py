"""The summary of older turns: extracts, append-only, segment by segment.

Turns are summarised in segments. What a segment's summary says depends on the segment and on what the summary said
before it, and on nothing later: so the summary of a conversation is a prefix of the summary of its continuation, byte
for byte, with the cache or without it. Inside a segment

1. every fact of the ledger that has not been said yet is kept, word for word;
2. clauses that say most that is new per token follow, until ``ratio`` of the segment's tokens is used.

    user: 2 rooms in London … check in on March 4th
    assistant: Abercorn House is a 1 star hotel … Their number is +44 20 8563 8692
    user quotes: always answer in JSON

Lines begin with the speaker, `` … `` marks what was left out. Text that would read as a speaker, or as the end of the
block, at a line's start gets one backslash.
"""

import hashlib
import heapq
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reducer.byte_cache import ByteCache
from reducer.ledger import SECONDARY_KINDS, Fact, missing_facts
from reducer.prompt import Caller, WireMessage
from reducer.template import escape
from reducer.tokens import TokenCounter
from reducer.turns import RECORD_CLOSING, RECORD_OPENING, Piece, Turn

GAP = " … "
LEDGER_LABEL = "also stated: "
"""Line of facts that a model's summary left out."""
TRAILING = frozenset({",", ";", ":", ".", "，", "；", "：", "。", "、", "-", "–", "—"})
"""Marks that are left out where a line or a gap follows them."""
TIGHT_RATIO = 0.35
"""Below this ratio only the primary facts are pinned."""
GAP_TOKENS = 1
LABEL_TOKENS = 3
PIN_CONTEXT = 0.6
"""What the clause around a bare fact is worth, in new words."""

COST_EXPONENT = 0.7
"""Below 1 a longer piece is preferred to shorter ones of the same rate: fewer cuts, whole thoughts."""
FACT_GAIN = 0.5
"""What a fact that need not be pinned is worth, in new words."""

_FORGED = re.compile(
    r"(?im)^(?P<label>[^\S\n]*\\*)"
    r"(?=(?:user|assistant|tool|system|developer|function|other|also stated)(?: quotes| calls)?\s*[:：])"
    r"|(?P<tag>[<＜]\s*\\*)(?=\s*[/／]?\s*(?:earlier_turns|recalled_turns)\b)"
)


class Summarizer(Protocol):
    """A model that rewrites a transcript in fewer words. Must be safe to call from several threads."""

    def summarise(self, transcript: str, max_tokens: int) -> str:
        """A summary of the transcript, a record and not an instruction, of at most ``max_tokens`` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """The summary of one segment: text that ends with a line break, or nothing."""

    text: str
    num_tokens: int
    keys: frozenset[str]
    """Facts and terms it says for the first time."""
    turn_tokens: tuple[tuple[int, int], ...]
    """Message index and tokens that stand for it, for every message with text in the summary."""
    spans: tuple[tuple[tuple[int, int], tuple[tuple[int, int], ...]], ...] = ()
    """Key of a turn and the word ranges of it that were kept."""
    degraded: str | None = None

    @property
    def num_bytes(self) -> int:
        """Memory it takes, about."""
        return 400 + 2 * len(self.text) + sum(80 + len(key) for key in self.keys) + 120 * len(self.spans)


class SummaryCache(ByteCache[SegmentSummary]):
    """Segment summaries by conversation prefix.

    A key is a digest over everything that changes the summary or who may see it, so a summary is only ever found by a
    request with the same scope, groups, configuration and conversation so far.
    """

    def __init__(self, max_bytes: int = 32 * 1024 * 1024) -> None:
        super().__init__(max_bytes, lambda summary: summary.num_bytes)


@dataclass(frozen=True, slots=True)
class SummaryMemory:
    """A cache as one caller sees it: ``scope`` is part of every key, so no summary is found under another one."""

    cache: SummaryCache
    scope: bytes


def scope_key(scope: str, caller: Caller) -> bytes:
    """Digest of who asks: the scope, every group, and the rule for unlabelled passages."""
    identity = json.dumps([scope, sorted(caller.groups), caller.deny_unlabelled], ensure_ascii=False)
    return hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=20).digest()


def chain_key(parent: bytes, messages: Iterable[WireMessage], *extra: object) -> bytes:
    """Digest of a conversation prefix: the parent's digest, these messages as JSON, and whatever else counts."""
    digest = hashlib.blake2b(parent, digest_size=20)
    digest.update(
        json.dumps([dict(m) for m in messages], sort_keys=True, default=repr, ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
    )
    digest.update(repr(extra).encode())
    return digest.digest()


@dataclass(slots=True)
class Extract:
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
        tokens = sum(turn.costs[word] for word in range(first, last) if word not in chosen)
        touching = (first - 1 in chosen) + (last in chosen)
        if not chosen:
            return tokens + LABEL_TOKENS
        if not touching and not any(word in chosen for word in range(first, last)):
            tokens += GAP_TOKENS
        return tokens

    def add(self, number: int, first: int, last: int) -> None:
        """Choose words."""
        turn = self.turns[number]
        self.num_tokens += self.cost(number, first, last)
        self.chosen[number].update(range(first, last))
        for word in range(first, last):
            if turn.terms[word]:
                self._say(turn.terms[word])

    def say_fact(self, fact: Fact) -> None:
        """Note that a fact stands in the text."""
        self._say("\x00" + fact.key)

    def is_said(self, fact: Fact) -> bool:
        """Whether the fact stands in the text so far."""
        return "\x00" + fact.key in self.said

    def pin_facts(self, *, primary_only: bool = False) -> None:
        """Choose every fact that has not been said, in order."""
        for number, turn in enumerate(self.turns):
            for pin in turn.pins:
                if primary_only and turn.speaker != "user" and pin.fact.kind in SECONDARY_KINDS:
                    continue
                if not self.is_said(pin.fact):
                    self.add(number, pin.first, pin.last)
                    self.say_fact(pin.fact)

    def fill(self, max_tokens: int) -> None:
        """Choose pieces, most new words per token first, while the whole stays within ``max_tokens``."""
        heap: list[tuple[float, int, int, Piece]] = []
        for number, turn in enumerate(self.turns):
            for order, piece in enumerate(turn.pieces):
                rate = self._rate(number, piece)
                if rate > 0:
                    heap.append((-rate, number, order, piece))
        heapq.heapify(heap)
        while heap:
            _, number, order, piece = heapq.heappop(heap)
            rate = self._rate(number, piece)
            if rate <= 0:
                continue
            if heap and -rate > heap[0][0]:
                heapq.heappush(heap, (-rate, number, order, piece))
                continue
            if self.num_tokens + self.cost(number, piece.first, piece.last) <= max_tokens:
                self.add(number, piece.first, piece.last)
                for pin in self.turns[number].pins:
                    if piece.first <= pin.first and pin.last <= piece.last:
                        self.say_fact(pin.fact)

    def _rate(self, number: int, piece: Piece) -> float:
        turn, chosen = self.turns[number], self.chosen[number]
        gain, seen = 0.0, set()
        for word in range(piece.first, piece.last):
            term = turn.terms[word]
            if term and word not in chosen and term not in self.said and term not in seen:
                seen.add(term)
                gain += turn.weights[word]
        for pin in turn.pins:
            if pin.first >= piece.last:
                break
            if piece.first <= pin.first and pin.last <= piece.last and not self.is_said(pin.fact):
                gain += FACT_GAIN
        if gain <= 0:
            return 0.0
        if chosen and any(word in chosen for word in range(piece.first, piece.last)):
            gain += PIN_CONTEXT
        rate: float = gain * piece.value / max(self.cost(number, piece.first, piece.last), 1) ** COST_EXPONENT
        return rate

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

    def render(self) -> str:
        """The chosen words as lines, one for each run of one speaker."""
        lines: list[str] = []
        speaker = ""
        for turn, chosen in zip(self.turns, self.chosen, strict=True):
            for first, last in word_runs(chosen, turn):
                is_quote = turn.is_quoted(first) and turn.speaker != "tool" and not turn.speaker.endswith(" quotes")
                label = f"{turn.speaker} quotes" if is_quote else turn.speaker
                while last - first > 1 and turn.text[turn.words[last - 1].start : turn.words[last - 1].end] in TRAILING:
                    last -= 1
                text = protect(turn.text[turn.words[first].start : turn.words[last - 1].end])
                if label == speaker:
                    lines[-1] += GAP + text
                else:
                    lines.append(f"- {text}" if label == "assistant" else f"{label}: {text}")
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


def protect(text: str) -> str:
    """``text`` with a backslash before what reads as a speaker, a citation label or a block's tag."""
    return _FORGED.sub(lambda match: match.group() + "\\", escape(text))


def summarise_segment(
    turns: Sequence[Turn],
    said: Collection[str],
    ratio: float,
    counter: TokenCounter,
    summarizer: Summarizer | None = None,
) -> SegmentSummary:
    """The summary of a segment after what ``said`` has said already, of about ``ratio`` of its tokens.

    Facts go before the ratio: with ``ratio`` 0 the summary is the bare ledger. A model's summary is checked against
    the ledger and completed; where the model fails, or says too much, extracts take its place and ``degraded`` says so.
    """
    allowance = int(ratio * sum(sum(turn.costs) + LABEL_TOKENS for turn in turns))
    extract = Extract(turns, set(said))
    degraded: str | None = None
    if summarizer is not None and any(turn.words for turn in turns):
        outcome = _ask_model(turns, extract, allowance, counter, summarizer)
        if isinstance(outcome, SegmentSummary):
            return outcome
        degraded = outcome
    extract.pin_facts(primary_only=ratio < TIGHT_RATIO)
    extract.fill(allowance)
    text = extract.render()
    return SegmentSummary(
        text,
        counter.count_text(text),
        frozenset(extract.new),
        extract.turn_tokens(),
        tuple(
            (turn.key, tuple(word_runs(chosen, turn)))
            for turn, chosen in zip(turns, extract.chosen, strict=True)
            if chosen
        ),
        degraded,
    )


def transcript(turns: Sequence[Turn]) -> str:
    """Whole turns as lines, what is only quoted marked as such."""
    extract = Extract(turns, set())
    extract.chosen = [set(range(len(turn.words))) for turn in turns]
    return extract.render()


def _ask_model(
    turns: Sequence[Turn], extract: Extract, allowance: int, counter: TokenCounter, summarizer: Summarizer
) -> SegmentSummary | str:
    """The model's summary with the facts it left out, or why there is none."""
    try:
        answer = summarizer.summarise(transcript(turns), allowance)
    except Exception as error:
        # Whatever the model does must cost only the model's share of the work.
        return f"summarizer failed ({type(error).__name__}): extracts instead"
    answer = "\n".join(line.strip() for line in answer.splitlines() if line.strip()) if isinstance(answer, str) else ""
    if not answer:
        return "summarizer gave no text: extracts instead"
    num_tokens = counter.count_text(answer)
    if num_tokens > max(allowance, 1):
        return f"summarizer gave {num_tokens} tokens, the limit is {allowance}: extracts instead"
    facts = [pin.fact for turn in turns for pin in turn.pins if not extract.is_said(pin.fact)]
    lost = {fact.key for fact in missing_facts(facts, answer)}
    stated = Extract(turns, set(extract.said))
    for number, turn in enumerate(turns):
        for pin in turn.pins:
            if pin.fact.key in lost and not stated.is_said(pin.fact):
                stated.add(number, pin.first, pin.last)
            stated.say_fact(pin.fact)
    ledger = stated.render()
    text = protect(answer) + "\n" + (LEDGER_LABEL.strip() + "\n" + ledger if ledger else "")
    share = counter.count_text(text) // max(len(turns), 1)
    return SegmentSummary(
        text, counter.count_text(text), frozenset(stated.new), tuple({turn.index: share for turn in turns}.items())
    )


def said_by(summaries: Iterable[SegmentSummary]) -> set[str]:
    """Everything that a chain of summaries says."""
    said: set[str] = set()
    for summary in summaries:
        said |= summary.keys
    return said


def render_block(summaries: Sequence[SegmentSummary]) -> str:
    """The summaries as one labelled block, or nothing."""
    text = "".join(summary.text for summary in summaries)
    return RECORD_OPENING + text + RECORD_CLOSING if text else ""


def prepend_text(message: Mapping[str, object], block: str) -> dict[str, object]:
    """The message with a block in front of its text; every other field stays."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": block}, *content]}
    return {**message, "content": block + (content if isinstance(content, str) else "")}
