"""Prefix facts: how many tokens of the prompt stay the same from request to request, and what the last block loses.

Here the parts of a request that should be the same every time are made so: tools become canonical, and volatile lines
of the system text move behind the documents where the policy allows it.

The stable part is the system text and the tools, up to the first volatile field. An engine caches whole blocks, so with
blocks of 16 a stable part of 41 tokens saves 32 and the last 9 are computed again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from reducer.canonical import canonical_tools
from reducer.config import TemplateConfig
from reducer.history import Conversation
from reducer.prompt import PromptParts
from reducer.result import PrefixReport, VolatileReport
from reducer.tokens import TokenCounter
from reducer.volatile import VolatileField, find_volatile, move_volatile


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its stable part made stable."""

    parts: PromptParts
    system: tuple[int, ...] = ()
    """Messages in front of the question that hold instructions."""
    fields: tuple[VolatileField, ...] = ()
    moved: tuple[VolatileField, ...] = ()
    moved_text: str = ""
    """The moved lines as they stand between documents and question."""

    @property
    def left(self) -> list[VolatileField]:
        """Volatile fields that are still in the system text."""
        return [field for field in self.fields if field not in self.moved]


def prepare(parts: PromptParts, conversation: Conversation, config: TemplateConfig) -> Prepared:
    """Canonical tools, volatile fields found and, by policy, moved. All else is as received."""
    tools = canonical_tools(parts.tools) if config.canonical_tools else parts.tools
    system = tuple(i for i in conversation.protected if i < conversation.question)
    fields = tuple(find_volatile(parts.messages, system))
    if config.volatile_fields == "report" or not any(found.can_move for found in fields):
        return Prepared(replace(parts, tools=tools), system, fields)
    moved = move_volatile(parts.messages, fields)
    text = "\n".join(moved.lines) + "\n\n" if moved.lines else ""
    return Prepared(replace(parts, tools=tools, messages=moved.messages), system, fields, moved.fields, text)


@runtime_checkable
class PromptTokenizer(Protocol):
    """A token counter that also tells the tokens themselves, so that shared beginnings can be counted exactly."""

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Tokens of the rendered prompt, as ``count_prompt`` counts them."""
        ...


def report_prefix(prepared: Prepared, counter: TokenCounter, block_size: int) -> PrefixReport | None:
    """Count the stable part; ``None`` where the template refuses a prompt that ends with it.

    Exact where ``counter`` is a PromptTokenizer; else the marks that the template puts around the text are left out,
    so the count is never too high.
    """
    stable = _stable_messages(prepared)
    tools = prepared.parts.tools
    is_exact = isinstance(counter, PromptTokenizer)
    try:
        if isinstance(counter, PromptTokenizer):
            num_stable = _shared_tokens(counter, stable, tools)
        elif stable or tools:
            question = {"role": "user", "content": ""}
            with_stable = counter.count_prompt([*stable, question], tools)
            num_stable = max(with_stable - counter.count_prompt([question]), 0)
        else:
            num_stable = 0
    except Exception:
        # These are facts beside the reduction: no prompt that can be sent may fail for them.
        return None
    return PrefixReport(
        stable_tokens=num_stable,
        block_size=block_size,
        lost_tokens=num_stable % block_size,
        is_exact=is_exact,
        volatile=[
            VolatileReport(
                kind=found.kind,
                message=found.message,
                start=found.start,
                end=found.end,
                is_moved=found in prepared.moved,
            )
            for found in prepared.fields
        ],
    )


def _stable_messages(prepared: Prepared) -> list[Mapping[str, Any]]:
    """The system messages up to the first volatile field that is still in them."""
    messages = prepared.parts.messages
    first = min(prepared.left, key=lambda found: (found.message, found.start), default=None)
    stable: list[Mapping[str, Any]] = []
    for index in prepared.system:
        if first is not None and index == first.message:
            content = messages[index].get("content")
            if isinstance(content, str):
                # A field that stays stands where it stood, less what moved out in front of it.
                shift = sum(f.end - f.start for f in prepared.moved if f.message == index and f.start < first.start)
                stable.append({**messages[index], "content": content[: max(first.start - shift, 0)]})
            break
        stable.append(messages[index])
    return stable


def _shared_tokens(
    tokenizer: PromptTokenizer, stable: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> int:
    """Tokens with which two prompts begin that differ in everything after the stable part."""
    first = tokenizer.encode_prompt([*stable, {"role": "user", "content": "a"}], tools)
    second = tokenizer.encode_prompt([*stable, {"role": "user", "content": "1"}], tools)
    num_shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        num_shared += 1
    return num_shared
