"""Recall: older turns that are back in the prompt beside the question, whole or in clauses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reducer.blocks import GAP, RECALL_CLOSING, RECALL_OPENING, line_mark, protect, read_line
from reducer.encoder import FloatArray
from reducer.prompt import WireMessage
from reducer.record import Plan
from reducer.tokens import TokenCounter
from reducer.turn_extracts import LABEL_TOKENS, TurnExtract
from reducer.turns import Turn, call_text, turn_text

USEFUL_SLACK_TOKENS = 10
"""Unused room worth another round of clauses."""
MAX_ROUNDS = 5
KEPT_FOR_CLAUSES = 0.5
"""Share of the room that whole turns leave to clauses, where both may come back."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Whole units, and clauses of others."""

    units: frozenset[int] = frozenset()
    block: str = ""
    num_tokens: int = 0
    tokens: Mapping[int, int] = field(default_factory=dict)
    """Tokens in the block by message index."""


def recall_turns(
    messages: Sequence[WireMessage],
    units: Sequence[tuple[int, ...]],
    turns: Sequence[Turn],
    plan: Plan,
    scores: FloatArray,
    room: int,
    min_score: float,
    counter: TokenCounter,
    *,
    fill: bool,
) -> Recall:
    """Bring back what the question needs within ``room`` tokens, then, with ``fill``, what else is new.

    ``units`` are the compacted ones, ``scores`` their relevance, ``turns`` what they say.
    """
    room -= counter.count_text(RECALL_OPENING) + counter.count_text(RECALL_CLOSING)
    lines: dict[int, str] = {}
    recalled: list[int] = []
    left = room
    for number in sorted(range(len(units)), key=lambda number: (-float(scores[number]), -number)):
        if scores[number] < min_score:
            break
        texts = {index: whole_turn(messages[index]) for index in units[number]}
        cost = sum(counter.count_text(text) for text in texts.values())
        if 0 < cost <= left - (int(room * KEPT_FOR_CLAUSES) if fill else 0):
            recalled.append(number)
            lines.update(texts)
            left -= cost
    clauses: dict[int, str] = {}
    if fill and left > 2 * LABEL_TOKENS:
        indices = {index for number in recalled for index in units[number]}
        clauses = _more(plan, [turn for turn in turns if turn.index not in indices], lines, room, counter)
    text = _join(lines, clauses)
    if not text:
        return Recall()
    block = RECALL_OPENING + text + RECALL_CLOSING
    tokens = {index: counter.count_text(line) for index, line in (clauses | lines).items() if line}
    return Recall(frozenset(recalled), block, counter.count_text(block), tokens)


def whole_turn(message: WireMessage) -> str:
    """A message as lines of the recall block, verbatim; nothing for a message without text."""
    role = message.get("role")
    text = turn_text(message)
    call = call_text(message).strip()
    lines = f"{role}: {protect(text)}\n" if text.strip() else ""
    return lines + (f"{role} calls: {protect(call)}\n" if call else "")


def _more(
    plan: Plan, turns: Sequence[Turn], whole: Mapping[int, str], room: int, counter: TokenCounter
) -> dict[int, str]:
    """Further clauses of ``turns``, by message index, that have room beside the ``whole`` ones."""
    wanted = room - counter.count_text(_join(whole, {}))
    best: dict[int, str] = {}
    for _ in range(MAX_ROUNDS):
        extract = TurnExtract(turns, set(plan.said), [set(plan.chosen.get(turn.key, ())) for turn in turns])
        extract.fill(wanted)
        lines: dict[int, str] = {}
        for turn, chosen in zip(turns, extract.chosen, strict=True):
            new = chosen - plan.chosen.get(turn.key, frozenset())
            if new:
                lines[turn.index] = lines.get(turn.index, "") + TurnExtract([turn], set(), [new]).render()
        slack = room - counter.count_text(_join(whole, lines))
        if slack >= 0:
            best = lines
            if slack < USEFUL_SLACK_TOKENS:
                break
        elif best:
            break
        wanted += slack - 2
    return best


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
