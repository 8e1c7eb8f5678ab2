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
