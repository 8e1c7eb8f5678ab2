"""What each way to shorten a conversation sends of it, and which probes that still answers."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.chat_template import ChatTokenizer
from eval.baselines import Embed, bm25, by_score, fuse
from eval.prompts import case_messages
from eval.samples import Case, Probe
from eval.scoring import SearchText, scored_probes
from reducer.result import ReductionResult
from reducer.template import message_text
from reducer.turn_extracts import TurnExtract
from reducer.turns import Turn, read_turn

BLOCK_TOKENS = 25
"""What ``one selection`` leaves for the block around its text."""
RECENT_TURNS = 2
Messages = Sequence[Mapping[str, Any]]


class Conversation:
    """A case with what all arms need of it."""

    def __init__(self, case: Case, counter: ChatTokenizer) -> None:
        self.case = case
        self.messages = case_messages(case)
        self.history = self.messages[1:-1]
        self.probes = scored_probes(case)
        self.fixed = counter.count_prompt([self.messages[0], self.messages[-1]])
        self.full = counter.count_prompt(self.messages) - self.fixed
        texts = [message_text(message) for message in self.history]
        share = -(-max(self.full - sum(map(counter.count_text, texts)), 0) // len(texts))
        self.costs = [counter.count_text(text) + share for text in texts]
        self.searched = [SearchText(text) for text in texts]
        self.texts = texts

    def turns(self, counter: ChatTokenizer) -> list[Turn]:
        """The history as the reducer reads it."""
        return [
            read_turn(index, self.messages[index], counter, self.messages[index - 1])
            for index in range(1, len(self.messages) - 1)
        ]


def answers(probe: Probe, text: SearchText) -> bool:
    """Whether a text states an accepted answer."""
    return any(text.states(answer) for answer in probe.answers)


def share_answered(probes: Sequence[Probe], text: str) -> float:
    """Share of the probes that a text answers."""
    searched = SearchText(text)
    return sum(answers(probe, searched) for probe in probes) / len(probes)


def sent_text(result: ReductionResult, question: str) -> str:
    """What is sent without the system message and the question."""
    *messages, last = [message_text(message) for message in result.messages]
    return "\n".join([*messages[1:], last.removesuffix(question)])


def whole_turns(conversation: Conversation, order: Sequence[int], room: int) -> tuple[str, int]:
    """Turns taken whole in the given order, each one that still fits, and their tokens."""
    kept: list[int] = []
    left = room
    for place in order:
        if conversation.costs[place] <= left:
            kept.append(place)
            left -= conversation.costs[place]
    return "\n".join(conversation.texts[place] for place in sorted(kept)), room - left


def last_turns(conversation: Conversation, room: int) -> tuple[str, int]:
    """The tail of the conversation that fits."""
    costs = list(itertools.accumulate(reversed(conversation.costs)))
    num_kept = sum(cost <= room for cost in costs)
    places = range(len(conversation.texts) - num_kept, len(conversation.texts))
    return "\n".join(conversation.texts[place] for place in places), costs[num_kept - 1] if num_kept else 0


def bm25_turns(conversation: Conversation, question: str, room: int) -> tuple[str, int]:
    """Whole turns by BM25."""
    return whole_turns(conversation, by_score(bm25(question, conversation.texts)), room)


def asked_turns(conversation: Conversation, question: str, room: int, embed: Embed) -> dict[str, str]:
    """Whole turns by what the question says: BM25, embeddings, both by reciprocal rank fusion."""
    lexical = by_score(bm25(question, conversation.texts))
    similarity = np.asarray(embed(conversation.texts) @ embed([question])[0], dtype=np.float64)
    semantic = by_score(similarity)
    orders = {"bm25 turns": lexical, "minilm turns": semantic, "bm25 + minilm turns": fuse(lexical, semantic)}
    return {arm: whole_turns(conversation, order, room)[0] for arm, order in orders.items()}


def oracle_turns(conversation: Conversation, room: int) -> tuple[str, int]:
    """Whole turns by someone who knows the answers: most further probes per token first."""
    states = [
        {number for number, probe in enumerate(conversation.probes) if answers(probe, text)}
        for text in conversation.searched
    ]
    order: list[int] = []
    found: set[int] = set()
    while True:
        best = max(range(len(states)), key=lambda place: len(states[place] - found) / conversation.costs[place])
        if not states[best] - found:
            return whole_turns(conversation, order, room)
        order.append(best)
        found |= states[best]


def one_selection(conversation: Conversation, counter: ChatTokenizer, room: int) -> tuple[str, int]:
    """Our extracts chosen once among all turns: what the append-only record is measured against."""
    turns = conversation.turns(counter)
    older, recent = turns[:-RECENT_TURNS], conversation.texts[-RECENT_TURNS:]
    left = room - BLOCK_TOKENS - sum(conversation.costs[-RECENT_TURNS:])
    goal, best = left, ""
    for _ in range(4):
        extract = TurnExtract(older, set())
        extract.pin_facts(primary_only=True)
        extract.fill(goal)
        text = extract.render()
        slack = left - counter.count_text(text)
        best = text if slack >= 0 else best
        goal += slack - 2
    return "\n".join([best, *recent]), room - left + counter.count_text(best)
