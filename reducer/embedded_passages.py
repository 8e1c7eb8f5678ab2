"""Passages inside plain messages: found where there is no doubt, reduced, and put back where they stood.

An application that writes its passages into the prompt itself gains as well, without a change. Recognised are

    <document index="1"> ... </document>      also doc, passage, chunk, snippet, source, context, search_result
    [1] text of the first                     numbers ascending at line starts
    Document [1](Title: Tea) text             the same with a title
    text --- text --- text                    between two of the configured separators

What is kept stands in place, byte for byte, with the application's own tag or number; a cut inside shows as `` … ``;
nothing around the passages changes. Each decision says where in the message its passage was, so that every one can be
undone. In doubt the message stays as it is: fewer than ``min_passages``, short ones (they may be choices to answer
with), tags that do not pair, numbers that do not ascend. Fenced code is never looked into, nor is a block of documents
that the reducer itself has written.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import msgspec

from reducer.config import RecogniseConfig
from reducer.errors import BudgetExceededError
from reducer.history import PROTECTED_ROLES, read_conversation
from reducer.prompt import Budget, Passage, PromptParts, WireMessage
from reducer.result import PassageDecision, PassageOrigin, ReductionResult
from reducer.template import CLOSING, GAP, OPENING
from reducer.tokens import TokenCounter

MAX_ROUNDS = 4
MAX_LABEL_CHARS = 80

_FENCE = re.compile(r"(?m)^[^\S\n]{0,3}(?P<fence>`{3,}|~{3,})[^`\n]*$")
TAGS = ("document", "doc", "passage", "chunk", "snippet", "search_result", "context", "source")
_TAGS = {name: re.compile(rf"<(?P<close>/)?{name}(?P<rest>(?:\s[^<>\n]{{0,400}})?)>", re.IGNORECASE) for name in TAGS}
_OWN_BLOCK = re.compile(rf"(?m)^{OPENING}\[\d+\] ")
_CONTENT = re.compile(
    r"<(?P<name>document_content|content|text)>\n?(?P<body>.*?)\n?</(?P=name)>", re.DOTALL | re.IGNORECASE
)
_ATTRIBUTE_TITLE = re.compile(r"""\btitle\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE)
_NUMBERED = re.compile(r"(?m)^[^\S\n]{0,3}(?P<label>\[(?P<number>\d{1,4})\]:?)[^\S\n]+(?=\S)")
_TITLED = re.compile(
    r"(?m)^[^\S\n]{0,3}(?P<label>Document\s*\[(?P<number>\d{1,4})\](?:\(Title:\s*(?P<title>[^\n]*?)\))?:?)"
    r"[^\S\n]*\n?(?=\S)"
)
_ENDS = re.compile(
    r"\n[^\S\n]*\n|\n(?=[^\S\n]*(?:\#{1,6}\s*)?(?:question|query|q|user|task|instructions?|answer|frage|aufgabe|pregunta|"
    r"问题|提问|質問|問題|질문|вопрос)\s*[:：])",
    re.IGNORECASE,
)


class Slot(NamedTuple):
    """Where one passage stands in a text: its wrapper, and inside it what is the passage."""

    start: int
    """Of the wrapper."""
    text_start: int
    text_end: int
    end: int
    """Of the wrapper and the white space up to the next one."""
    title: str | None = None


class Place(NamedTuple):
    """A text of the request: a message, or a text part of one."""

    message: int
    part: int | None


@dataclass(frozen=True, slots=True)
class Recognised:
    """A request with its passages taken out of the messages, and how they go back."""

    parts: PromptParts
    """Messages without the passages, and the passages."""
    texts: Mapping[Place, str]
    """The texts as received."""
    slots: Mapping[Place, tuple[Slot, ...]]
    origins: Mapping[str, tuple[Place, Slot]]
    """By id of the passage."""

    def rest_of(self, place: Place) -> str:
        """A text without its passages."""
        return rewrite(self.texts[place], [(slot, "") for slot in self.slots[place]])


def recognise_passages(parts: PromptParts, config: RecogniseConfig) -> Recognised | None:
    """Finds the passages in the question, and in system messages where the policy says so; ``None`` in doubt."""
    if not config.enabled or parts.passages:
        return None
    conversation = read_conversation(parts.messages)
    places: dict[Place, str] = {}
    for index in conversation.protected:
        is_system = parts.messages[index].get("role") in PROTECTED_ROLES
        if index == conversation.question or (is_system and config.system):
            places.update(_texts_of(index, parts.messages[index]))
    slots = {place: found for place, text in places.items() if (found := find_slots(text, config))}
    if not slots:
        return None
    passages: list[Passage] = []
    origins: dict[str, tuple[Place, Slot]] = {}
    for place, found in slots.items():
        text = places[place]
        for slot in found:
            passage = Passage(
                id=f"message-{place.message}-passage-{len(passages) + 1}",
                text=text[slot.text_start : slot.text_end],
                title=slot.title,
            )
            passages.append(passage)
            origins[passage.id] = (place, slot)
    recognised = Recognised(parts, places, slots, origins)
    rests = {place: recognised.rest_of(place) for place in slots}
    messages = tuple(_with_texts(index, message, rests) for index, message in enumerate(parts.messages))
    return replace(recognised, parts=replace(parts, messages=messages, passages=tuple(passages)))


def reduce_in_place(
    received: PromptParts,
    recognised: Recognised,
    budget: Budget,
    reduce: Callable[[PromptParts, Budget], ReductionResult],
    counter: TokenCounter,
) -> ReductionResult:
    """Reduces the passages and puts what is kept back to where it stood, within the budget.

    ``reduce`` is the reduction of separate documents. It writes labels of its own, so the prompt in place may be longer
    than its; then less is asked for. Raises BudgetExceededError where even no passage leaves it within the budget.
    """
    wanted = budget.max_input_tokens
    num_tokens = wanted + 1
    for _ in range(MAX_ROUNDS):
        result = reduce(recognised.parts, replace(budget, max_input_tokens=max(wanted, 1)))
        messages = put_back(recognised, result)
        num_tokens = counter.count_prompt(messages, result.tools)
        if num_tokens <= budget.max_input_tokens:
            return msgspec.structs.replace(
                result,
                messages=messages,
                prompt_tokens=num_tokens,
                original_prompt_tokens=max(counter.count_prompt(received.messages, result.tools), num_tokens),
                budget=msgspec.structs.replace(result.budget, max_input_tokens=budget.max_input_tokens),
                documents=[_with_origin(recognised, decision) for decision in result.documents],
            )
        wanted -= num_tokens - budget.max_input_tokens
    raise BudgetExceededError(num_tokens, budget.max_input_tokens, budget.source)


def put_back(recognised: Recognised, result: ReductionResult) -> list[dict[str, Any]]:
    """The messages of a result with the kept text in place instead of in a block of documents."""
    kept = {decision.id: decision for decision in result.documents}
    texts: dict[Place, str] = {}
    for place, slots in recognised.slots.items():
        text = recognised.texts[place]
        ids = {slot: name for name, (own, slot) in recognised.origins.items() if own == place}
        texts[place] = rewrite(text, [(slot, _kept_text(text, slot, kept.get(ids[slot]))) for slot in slots])
    question = read_conversation(recognised.parts.messages).question
    wanted = {place.message for place in texts}
    messages: list[dict[str, Any]] = []
    num_after = len(recognised.parts.messages) - question
    for position, message in enumerate(result.messages):
        if position == len(result.messages) - num_after:
            messages.append(_question_in_place(question, message, recognised.parts.messages[question], texts))
            continue
        same = next(
            (index for index in sorted(wanted) if index < question and recognised.parts.messages[index] == message),
            None,
        )
        messages.append(dict(message) if same is None else _with_texts(same, message, texts))
        wanted.discard(-1 if same is None else same)
    return messages


def find_slots(text: str, config: RecogniseConfig) -> tuple[Slot, ...]:
    """Where passages stand in a text; none in doubt."""
    if _OWN_BLOCK.search(text) is not None:
        return ()
    fences = _fences(text)
    for found in (
        *(_tagged(text, fences, pattern) for pattern in _TAGS.values()),
        _labelled(text, fences, _TITLED),
        _labelled(text, fences, _NUMBERED),
        _separated(text, fences, config.separators),
    ):
        if len(found) < config.min_passages:
            continue
        if any(slot.start < high and low < slot.end < high for slot in found for low, high in fences):
            continue
        if median(slot.text_end - slot.text_start for slot in found) >= config.min_chars:
            return tuple(_with_gaps(text, found))
    return ()


def rewrite(text: str, pieces: Sequence[tuple[Slot, str | None]]) -> str:
    """``text`` with each slot replaced; ``None`` leaves it as it is."""
    written: list[str] = []
    position = 0
    for slot, piece in pieces:
        written += (text[position : slot.start], text[slot.start : slot.end] if piece is None else piece)
        position = slot.end
    return "".join([*written, text[position:]])


def _kept_text(text: str, slot: Slot, decision: PassageDecision | None) -> str | None:
    if decision is None or not decision.spans or decision.action in ("dropped", "merged"):
        return ""
    if decision.spans == [(0, slot.text_end - slot.text_start)]:
        return None
    parts = [text[slot.text_start + start : slot.text_start + end].strip() for start, end in decision.spans]
    return text[slot.start : slot.text_start] + GAP.join(parts) + text[slot.text_end : slot.end]


def _with_origin(recognised: Recognised, decision: PassageDecision) -> PassageDecision:
    place, slot = recognised.origins[decision.id]
    text = recognised.texts[place]
    origin = PassageOrigin(message=place.message, part=place.part, start=slot.text_start, end=slot.text_end)
    label = text[slot.start : slot.text_start].strip()[:MAX_LABEL_CHARS] or None
    return msgspec.structs.replace(decision, origin=origin, label=None if decision.label is None else label)


def _fences(text: str) -> list[tuple[int, int]]:
    """Fenced code; a fence that is not closed goes to the end."""
    found: list[tuple[int, int]] = []
    opened: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        if opened is None:
            opened = match
        elif match["fence"].startswith(opened["fence"]):
            found.append((opened.start(), match.end()))
            opened = None
    if opened is not None:
        found.append((opened.start(), len(text)))
    return found


def _tagged(text: str, fences: Sequence[tuple[int, int]], pattern: re.Pattern[str]) -> list[Slot]:
    """Pairs of one tag; none where they do not pair or one stands inside another."""
    found: list[Slot] = []
    opened: re.Match[str] | None = None
    for match in pattern.finditer(text):
        if _is_inside(match.start(), fences) or match["rest"].endswith("/"):
            continue
        if (opened is None) == bool(match["close"]):
            return []
        if opened is None:
            opened = match
            continue
        start, end = opened.end(), match.start()
        title = _ATTRIBUTE_TITLE.search(opened["rest"])
        inner = _CONTENT.search(text, start, end)
        start, end = _stripped(text, *(inner.span("body") if inner is not None else (start, end)))
        name = None if title is None else title[1] if title[1] is not None else title[2]
        if start < end:
            found.append(Slot(opened.start(), start, end, match.end(), name))
        opened = None
    return found if opened is None else []


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    """The span without white space at its edges."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _labelled(text: str, fences: Sequence[tuple[int, int]], pattern: re.Pattern[str]) -> list[Slot]:
    """Texts behind ascending numbers at line starts; the last one ends at an empty line or where a question begins."""
    labels = [match for match in pattern.finditer(text) if not _is_inside(match.start(), fences)]
    numbers = [int(match["number"]) for match in labels]
    if not labels or any(after <= before for before, after in pairwise(numbers)):
        return []
    found: list[Slot] = []
    for match, following in zip(labels, [*labels[1:], None], strict=True):
        if following is None:
            stop = _ENDS.search(text, match.end())
            end = len(text) if stop is None else stop.start()
        else:
            end = following.start()
        start, end = _stripped(text, match.end(), end)
        if start < end:
            title = match["title"] if "title" in pattern.groupindex else None
            found.append(Slot(match.start(), start, end, end, title))
    return found


def _separated(text: str, fences: Sequence[tuple[int, int]], separators: Sequence[str]) -> list[Slot]:
    """Texts between two separators; what stands before the first and after the last one may be anything."""
    for separator in separators:
        ends: list[tuple[int, int]] = []
        position = text.find(separator)
        while position >= 0:
            if not _is_inside(position, fences):
                ends.append((position, position + len(separator)))
            position = text.find(separator, position + len(separator))
        found: list[Slot] = []
        for (_, before), (after, _) in pairwise(ends):
            start, end = _stripped(text, before, after)
            if start < end:
                found.append(Slot(before, start, end, after))
        if found:
            return found
    return []


def _with_gaps(text: str, found: Sequence[Slot]) -> list[Slot]:
    """The white space between two neighbours goes with the first one, so that nothing is left of both."""
    slots = list(found)
    for place, following in enumerate(slots[1:]):
        if not text[slots[place].end : following.start].strip():
            slots[place] = slots[place]._replace(end=following.start)
    return slots


def _is_inside(position: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(low <= position < high for low, high in spans)


def _texts_of(index: int, message: WireMessage) -> dict[Place, str]:
    content = message.get("content")
    if isinstance(content, str):
        return {Place(index, None): content}
    if not isinstance(content, list):
        return {}
    return {
        Place(index, number): part["text"]
        for number, part in enumerate(content)
        if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
    }


def _question_in_place(
    index: int, message: WireMessage, bare: WireMessage, texts: Mapping[Place, str]
) -> dict[str, Any]:
    """The question with its own texts; of what the reducer put in front, all but the block of documents stays.

    ``bare`` is the question without its passages, with which ``message`` ends.
    """
    content, below = message.get("content"), bare.get("content")
    if isinstance(content, str) and isinstance(below, str):
        front = _without_block(content[: len(content) - len(below)])
        return {**message, "content": front + texts.get(Place(index, None), below)}
    assert isinstance(content, list), "a question with recognised passages has text or parts"
    assert isinstance(below, list), "parts stay parts"
    added = content[: len(content) - len(below)]
    fronts = [{**part, "text": text} for part in added if (text := _without_block(part["text"]))]
    own = _with_texts(index, {**message, "content": content[len(added) :]}, texts)
    return {**own, "content": [*fronts, *own["content"]]}


def _without_block(front: str) -> str:
    """Text that the reducer wrote, without its block of documents. Inside passages the block's tags are escaped."""
    start = front.rfind(OPENING)
    end = front.find(CLOSING, start)
    return front if start < 0 or end < 0 else front[:start] + front[end + len(CLOSING) :]


def _with_texts(index: int, message: WireMessage, texts: Mapping[Place, str]) -> dict[str, Any]:
    """The message with the texts of its places."""
    content = message.get("content")
    if isinstance(content, str):
        text = texts.get(Place(index, None))
        return dict(message) if text is None else {**message, "content": text}
    if isinstance(content, list):
        changed = [
            {**part, "text": texts[Place(index, number)]} if Place(index, number) in texts else part
            for number, part in enumerate(content)
        ]
        return {**message, "content": changed}
    return dict(message)
