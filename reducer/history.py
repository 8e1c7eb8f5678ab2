"""History: which earlier turns stay. The last ones stay verbatim, older ones by relevance for the question.

A unit is what must stay or go together: a plain message, or a tool call with all of its results. Kept units stay in
order and byte-equal.

    system  user  assistant  user  assistant(call)  tool  assistant  user <- question
            [ 1 ] [   2    ] [ 3 ] [       4            ] [   5    ]          last units first, then relevance
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reducer.config import HistoryConfig, RankConfig
from reducer.encoder import Encoder, FloatArray
from reducer.errors import InvalidPromptError
from reducer.prompt import WireMessage
from reducer.rank import Query, lexical_scores, query_vector, scale, scale_lexical, similarities
from reducer.result import TurnDecision
from reducer.template import message_text
from reducer.tokens import TokenCounter

PROTECTED_ROLES = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """Where things stand in the messages as received."""

    question: int
    """Index of the last user message."""
    protected: tuple[int, ...]
    """System messages, the question, and everything after it (a tool call in progress); in order."""
    history: tuple[int, ...]
    """All other messages, in order."""


@dataclass(frozen=True, slots=True)
class HistoryOutcome:
    """Messages that stay, by index in order, and the decision about every history message."""

    kept: tuple[int, ...]
    decisions: tuple[TurnDecision, ...]
    degraded: str | None = None


def read_conversation(messages: Sequence[WireMessage]) -> Conversation:
    """Find question, protected part and history. Raises InvalidPromptError when there is no user message."""
    if not messages:
        raise InvalidPromptError("messages must hold at least one message, got 0")
    roles = [message.get("role") for message in messages]
    for index, role in enumerate(roles):
        if not isinstance(role, str):
            raise InvalidPromptError(f"messages[{index}].role must be text, got {role!r}")
    if "user" not in roles:
        raise InvalidPromptError(f"messages must hold a message of role 'user', got roles {roles!r}")
    question = len(roles) - 1 - roles[::-1].index("user")
    protected = tuple(i for i, role in enumerate(roles) if i >= question or role in PROTECTED_ROLES)
    history = tuple(i for i in range(question) if roles[i] not in PROTECTED_ROLES)
    return Conversation(question, protected, history)


def make_query(messages: Sequence[WireMessage], conversation: Conversation) -> Query:
    """The question, with the user's turn before it as context."""
    earlier = [message_text(messages[i]) for i in conversation.history if messages[i].get("role") == "user"]
    return Query(message_text(messages[conversation.question]), earlier[-1] if earlier else "")


def group_units(messages: Sequence[WireMessage], indices: Sequence[int]) -> list[tuple[int, ...]]:
    """Indices grouped into units: a tool call and the results that follow it are one."""
    units: list[list[int]] = []
    for index in indices:
        is_result = messages[index].get("role") in ("tool", "function")
        if is_result and units and _calls_tools(messages[units[-1][0]]):
            units[-1].append(index)
        else:
            units.append([index])
    return [tuple(unit) for unit in units]


def count_turns(
    messages: Sequence[WireMessage], indices: Sequence[int], total: int, counter: TokenCounter
) -> dict[int, int]:
    """Tokens of each history message. They add up to at least ``total``: the template's share is spread evenly."""
    if not indices:
        return {}
    texts = {i: counter.count_text(message_text(messages[i]) + _call_text(messages[i])) for i in indices}
    share = -(-max(total - sum(texts.values()), 0) // len(indices))
    return {i: num_tokens + share for i, num_tokens in texts.items()}


def reduce_history(
    messages: Sequence[WireMessage],
    indices: Sequence[int],
    num_tokens: Mapping[int, int],
    allowance: int,
    query: Query,
    config: HistoryConfig,
    rank_config: RankConfig,
    encoder: Encoder | None,
) -> HistoryOutcome:
    """Keep units of the history within ``allowance`` tokens: the last ones first, then the most relevant ones."""
    if sum(num_tokens[i] for i in indices) <= allowance:
        kept = [
            TurnDecision(index=i, action="kept", reason="fits", tokens_before=num_tokens[i], tokens_after=num_tokens[i])
            for i in indices
        ]
        return HistoryOutcome(tuple(indices), tuple(kept))
    units = group_units(messages, indices)
    costs = [sum(num_tokens[i] for i in unit) for unit in units]
    reasons: dict[int, str] = {}
    left = allowance
    for number in _recent_units(units, config.num_recent_messages):
        if costs[number] > left:
            break  # a gap among the last turns would misquote the conversation
        reasons[number] = "recent turn"
        left -= costs[number]
    older = [number for number in range(len(units)) if number not in reasons]
    scores, degraded = _relevance([_unit_text(messages, units[n]) for n in older], query, rank_config, encoder)
    # Of two equally relevant turns the later one is the one in force.
    for score, number in sorted(zip(scores.tolist(), older, strict=True), reverse=True):
        if score > 0 and costs[number] <= left:
            reasons[number] = f"relevant to the question ({score:.2f})"
            left -= costs[number]
    decisions: list[TurnDecision] = []
    for number, unit in enumerate(units):
        for index in unit:
            is_kept = number in reasons
            decisions.append(
                TurnDecision(
                    index=index,
                    action="kept" if is_kept else "dropped",
                    reason=reasons.get(number, f"history is limited to {allowance} tokens"),
                    tokens_before=num_tokens[index],
                    tokens_after=num_tokens[index] if is_kept else 0,
                )
            )
    kept_indices = tuple(i for number, unit in enumerate(units) for i in unit if number in reasons)
    return HistoryOutcome(kept_indices, tuple(decisions), degraded)


def _recent_units(units: Sequence[tuple[int, ...]], num_messages: int) -> list[int]:
    """Numbers of the last units, latest first, that hold the last ``num_messages`` messages."""
    numbers: list[int] = []
    covered = 0
    for number in range(len(units) - 1, -1, -1):
        if covered >= num_messages:
            break
        numbers.append(number)
        covered += len(units[number])
    return numbers


def _relevance(
    texts: Sequence[str], query: Query, config: RankConfig, encoder: Encoder | None
) -> tuple[FloatArray, str | None]:
    """Relevance of each text, 0 to 1, and why only BM25 was used, if so."""
    if not texts:
        return np.zeros(0, dtype=np.float32), None
    lexical = scale_lexical(lexical_scores(texts, query, config.context_weight))
    if config.semantic_weight <= 0:
        return lexical, None
    if encoder is None:
        return lexical, "no encoder: turns ranked by BM25"
    try:
        semantic = scale(similarities(encoder.encode(list(texts)), query_vector(query, config.context_weight, encoder)))
    except Exception as error:
        return lexical, f"encoder failed ({type(error).__name__}): turns ranked by BM25"
    weight = np.float32(config.lexical_weight + config.semantic_weight)
    mixed: FloatArray = np.float32(config.lexical_weight) * lexical + np.float32(config.semantic_weight) * semantic
    return mixed / weight, None


def _unit_text(messages: Sequence[WireMessage], unit: Sequence[int]) -> str:
    return "\n".join(message_text(messages[i]) + _call_text(messages[i]) for i in unit)


def _call_text(message: WireMessage) -> str:
    """Names and arguments of a message's tool calls, so that a call can be found by what it asked for."""
    calls: Any = message.get("tool_calls") or ()
    return "".join(f"\n{call.get('function')}" for call in calls if isinstance(call, Mapping))


def _calls_tools(message: WireMessage) -> bool:
    return bool(message.get("tool_calls") or message.get("function_call"))
