"""The summary of older turns: extracts, append-only, segment by segment.

Turns are summarised in segments. What a segment's summary says depends on the segment and on what the summary said
before it, and on nothing later: so the summary of a conversation is a prefix of the summary of its continuation, byte
for byte, with the cache or without it. Inside a segment

1. every fact of the ledger that has not been said yet is kept, word for word;
2. clauses that say most that is new per token follow, down to a rate that is the same for all segments.

    2 rooms in London … check in on March 4th
    - Abercorn House is a 1 star hotel … Their number is +44 20 8563 8692
    user quotes: always answer in JSON

A line is the user's where nothing else is written before it: ``-`` for the assistant, a label for all others. `` … ``
marks what was left out. Text that would read as such a mark, or as the end of the block, gets one backslash.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from reducer.blocks import LEDGER_LABEL, RECORD_CLOSING, RECORD_OPENING, SUMMARY_MARK, USER_MARK, protect
from reducer.byte_cache import ByteCache
from reducer.ledger import missing_facts
from reducer.prompt import Caller, WireMessage
from reducer.tokens import TokenCounter
from reducer.turn_extracts import TurnExtract, is_secondary, word_runs
from reducer.turns import Turn

TIGHT_RATE = 0.3
"""Above this rate only the primary facts are pinned."""
MIN_MODEL_TOKENS = 32
"""Extracts shorter than this stay as they are: there is nothing for a model to say in fewer words."""
MIN_MODEL_SHARE = 0.25
"""Least share of an extract's tokens that a model is asked to fill, however much the bare facts take."""


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


def summarise_segment(
    turns: Sequence[Turn], said: Collection[str], min_rate: float, counter: TokenCounter
) -> SegmentSummary:
    """The extracts of a segment after what ``said`` has said already: facts, and what says ``min_rate`` per token.

    Facts go before the rate: where it is infinite, the summary is the bare ledger.
    """
    extract = TurnExtract(turns, set(said))
    extract.pin_facts(primary_only=min_rate > TIGHT_RATE)
    extract.fill(min_rate=min_rate)
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
    )


def rewrite_segment(
    turns: Sequence[Turn],
    said: Collection[str],
    extracts: SegmentSummary,
    min_rate: float,
    counter: TokenCounter,
    summarizer: Summarizer,
) -> SegmentSummary:
    """The model's words for a segment, in the place of its ``extracts`` and at most as long.

    ``said`` is what the segments before it say in their final words. Facts that the model left out follow its summary
    word for word. Where the model fails, or its summary with them is too long, the extracts stay and ``degraded`` says
    so.
    """
    ledger = TurnExtract(turns, set(said))
    ledger.pin_facts(primary_only=min_rate > TIGHT_RATE)
    max_tokens = max(extracts.num_tokens - ledger.num_tokens, int(MIN_MODEL_SHARE * extracts.num_tokens), 1)
    try:
        answer = summarizer.summarise(transcript(turns), max_tokens)
    except Exception as error:
        # Whatever the model does must cost only the model's share of the work.
        return replace(extracts, degraded=f"summarizer failed ({type(error).__name__}): extracts instead")
    answer = " ".join(answer.split()) if isinstance(answer, str) else ""
    if not answer:
        return replace(extracts, degraded="summarizer gave no text: extracts instead")
    pinned = [
        (number, pin)
        for number, turn in enumerate(turns)
        for pin in turn.pins
        if not (min_rate > TIGHT_RATE and is_secondary(turn, pin.fact))
    ]
    lost = {fact.key for fact in missing_facts((pin.fact for _, pin in pinned), answer)}
    stated = TurnExtract(turns, set(said))
    for number, pin in pinned:
        if pin.fact.key in lost and not stated.is_said(pin.fact):
            stated.add(number, pin.first, pin.last)
        stated.say_fact(pin.fact)
    facts = stated.render()
    text = f"{SUMMARY_MARK}{protect(answer)}\n" + (f"{LEDGER_LABEL}\n{facts}" if facts else "")
    num_tokens = counter.count_text(text)
    if num_tokens > extracts.num_tokens:
        note = f"summary and facts take {num_tokens} tokens, the limit is {extracts.num_tokens}: extracts instead"
        return replace(extracts, degraded=note)
    share = num_tokens // len({turn.index for turn in turns})
    return SegmentSummary(text, num_tokens, frozenset(stated.new), tuple({t.index: share for t in turns}.items()))


def transcript(turns: Sequence[Turn]) -> str:
    """Whole turns as lines with their speakers, what is only quoted marked as such."""
    extract = TurnExtract(turns, set())
    extract.chosen = [set(range(len(turn.words))) for turn in turns]
    return extract.render(USER_MARK)


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
