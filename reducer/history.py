"""History: the last turns stay verbatim, older ones become an append-only record, relevant ones come back.

    system | record of old turns | recent turns, verbatim | recalled turns, documents, question
           '---- grows at its end only, so its KV blocks stay valid ----'

The record stands in front of the first kept turn, inside it where that is the user's and as a user message of its own
where it is not: roles go on alternating, as many chat templates demand, and nothing of an earlier conversation gains
the authority of a system message. The system message stays byte-equal. What depends on the question (recalled turns)
stands beside the question, behind everything that the next request can reuse.

When turns are compacted is replayed from the first turn on: the history grows until it is over its allowance, then the
oldest turns join the record until there is room again, in one step. So the steps depend on the conversation and the
allowance alone; between two steps nothing moves. Only where the record has no more room at all is it written anew,
shorter (``reducer.record``): each rewrite makes room for many turns, so they become rare as a conversation grows.

A unit is what must stay or go together: a plain message, or a tool call with all of its results.

    system  user  assistant  user  assistant(call)  tool  assistant  user <- question
            [ 1 ] [   2    ] [ 3 ] [       4            ] [   5    ]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reducer.config import HistoryConfig, RankConfig
from reducer.encoder import Encoder
from reducer.errors import InvalidPromptError
from reducer.prompt import WireMessage
from reducer.rank import Query
from reducer.recall import recall_room, recall_turns
from reducer.record import Plan, Record
from reducer.relevance import rate_turns
from reducer.result import TurnAction, TurnDecision
from reducer.summary import Summarizer, SummaryMemory
from reducer.template import message_text
from reducer.tokens import TokenCounter
from reducer.turns import call_text, calls_tools, is_tool_result, turn_text

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
    record: str = ""
    """The block that stands for older turns, or nothing."""
    recalled: str = ""
    """The block of older turns that the question needs, or nothing."""
    num_tokens: int = 0
    """Tokens of kept turns and both blocks."""


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
        if is_tool_result(messages[index]) and units and calls_tools(messages[units[-1][0]]):
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
    texts = {i: counter.count_text(turn_text(messages[i]) + call_text(messages[i])) for i in indices}
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
    *,
    counter: TokenCounter,
    memory: SummaryMemory | None = None,
    summarizer: Summarizer | None = None,
    fill: bool = True,
    planned_allowance: int | None = None,
) -> HistoryOutcome:
    """Bring the history down to ``allowance`` tokens: recent turns, the record of older ones, recalled ones.

    ``fill`` spends what is left on more of the older turns; without it only turns relevant for the question come back.
    ``planned_allowance`` is what the record is made for, when less than that turned out to be left for the rest.
    """
    total = sum(num_tokens[i] for i in indices)
    if total <= allowance:
        kept = [
            TurnDecision(index=i, action="kept", reason="fits", tokens_before=num_tokens[i], tokens_after=num_tokens[i])
            for i in indices
        ]
        return HistoryOutcome(tuple(indices), tuple(kept), num_tokens=total)
    units = group_units(messages, indices)
    costs = [sum(num_tokens[i] for i in unit) for unit in units]
    share = min(num_tokens[i] - counter.count_text(turn_text(messages[i]) + call_text(messages[i])) for i in indices)
    record = Record(messages, units, costs, counter, config, memory, summarizer, num_block_tokens=max(share, 0))
    plan = _plan(record, len(units), planned_allowance or allowance, config)
    if plan.num_tokens > allowance:
        plan = _plan(record, len(units), allowance, config)
    older = units[: plan.num_compacted]
    relevance = rate_turns([_unit_text(messages, unit) for unit in older], query, rank_config, encoder)
    recall = recall_turns(
        messages,
        older,
        record.oldest_turns(plan.num_compacted),
        plan,
        relevance,
        allowance - plan.num_tokens,
        config.min_recall_score,
        counter,
        fill=fill,
    )
    decisions: list[TurnDecision] = []
    for number, unit in enumerate(units):
        for index in unit:
            action: TurnAction
            if number >= plan.num_compacted:
                action, reason, after = "kept", "recent turn", num_tokens[index]
            elif number in recall.units:
                action, reason = "recalled", f"relevant to the question ({relevance.scores[number]:.2f})"
                after = recall.tokens.get(index, 0)
            elif after := plan.tokens.get(index, 0) + recall.tokens.get(index, 0):
                action, reason = "summarised", "in the record of earlier turns"
                if number in recall.parts:
                    reason += f", relevant sentences beside the question ({relevance.scores[number]:.2f})"
            else:
                action, reason = "dropped", f"history is limited to {allowance} tokens"
            decisions.append(
                TurnDecision(
                    index=index, action=action, reason=reason, tokens_before=num_tokens[index], tokens_after=after
                )
            )
    return HistoryOutcome(
        kept=tuple(i for unit in units[plan.num_compacted :] for i in unit),
        decisions=tuple(decisions),
        degraded="; ".join(dict.fromkeys(note for note in (plan.degraded, relevance.degraded) if note)) or None,
        record=plan.block,
        recalled=recall.block,
        num_tokens=plan.num_tokens + recall.num_tokens,
    )


def _plan(record: Record, num_units: int, allowance: int, config: HistoryConfig) -> Plan:
    """The record within ``allowance`` less the room for recall; within all of it where the last turns had none."""
    if (room := recall_room(record.oldest_turns(num_units), allowance, config.recall_share)) > 0:
        plan = record.plan(allowance - room)
        if plan.num_compacted < num_units:
            return plan
    return record.plan(allowance)


def _unit_text(messages: Sequence[WireMessage], unit: Sequence[int]) -> str:
    return "\n".join(turn_text(messages[i]) + call_text(messages[i]) for i in unit)
