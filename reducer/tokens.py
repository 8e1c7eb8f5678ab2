"""Counting tokens: the reducer asks the served model's tokenizer through this protocol."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TokenCounter(Protocol):
    """Counts with the served model's tokenizer. Must be safe to call from several threads."""

    def count_text(self, text: str) -> int:
        """Tokens of a text on its own, without special tokens."""
        ...

    def count_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Exact tokens of the rendered prompt: chat template, tools, special tokens and generation prompt included."""
        ...


class CachedCounter:
    """A ``TokenCounter`` that counts each text once; made for one request, so nothing of a prompt outlives it."""

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._counts: dict[str, int] = {}

    def count_text(self, text: str) -> int:
        """Tokens of a text on its own, without special tokens."""
        num_tokens = self._counts.get(text)
        if num_tokens is None:
            num_tokens = self._counts[text] = self._counter.count_text(text) if text else 0
        return num_tokens

    def count_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Exact tokens of the rendered prompt."""
        return self._counter.count_prompt(messages, tools)
