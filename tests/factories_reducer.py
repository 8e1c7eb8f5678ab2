"""Factories of the reducer's tests: passages, prompts, and small real fakes of tokenizer and encoder."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reducer.config import ReducerConfig
from reducer.encoder import Encoder
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller, Passage, PromptParts
from reducer.result import ReductionResult
from reducer.template import message_text


class WordCounter:
    """Counts words, CJK characters and marks; four tokens of template a message, three for the generation prompt.

    Like a byte-pair tokenizer it counts a joined text differently from its parts where words meet.
    """

    _TOKEN = re.compile(r"[\u2e80-\u9fff]|\w+|[^\w\s]|\n")

    def __init__(self) -> None:
        self.num_prompt_counts = 0

    def count_text(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._TOKEN.findall(text))

    def count_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Tokens of the rendered prompt."""
        self.num_prompt_counts += 1
        total = 3 + sum(self.count_text(json.dumps(tool)) for tool in tools)
        for message in messages:
            total += 4 + self.count_text(message_text(message))
            if message.get("tool_calls"):
                total += self.count_text(json.dumps(message["tool_calls"]))
        return total


class HashEncoder:
    """Bag of hashed words as vectors: texts that share words are similar."""

    def __init__(self, dim: int = 256) -> None:
        self._dim = dim
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed texts, shape (n, dim), rows of length 1."""
        self.texts.extend(texts)
        vectors = np.full((len(texts), self._dim), 1e-3, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"[\u2e80-\u9fff]|\w+", text.casefold()):
                vectors[row, int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest()) % self._dim] += 1
        rows: npt.NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return rows


class BrokenEncoder:
    """An encoder whose model fails."""

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Fail."""
        raise RuntimeError("no model")


def make_passages(*texts: str, **fields: Any) -> tuple[Passage, ...]:
    """Passages ``d1``, ``d2``, … with these texts and the same further fields."""
    return tuple(Passage(id=f"d{number}", text=text, **fields) for number, text in enumerate(texts, 1))


def make_parts(
    question: str = "Which part failed?",
    *,
    passages: Sequence[Passage] = (),
    system: str | None = None,
    history: Sequence[Mapping[str, Any]] = (),
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptParts:
    """A request: system text, history, question, passages."""
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages += [*history, {"role": "user", "content": question}]
    return PromptParts(messages=tuple(messages), tools=tuple(tools), passages=tuple(passages))


def make_reducer(config: ReducerConfig | None = None, *, encoder: Encoder | None = None) -> Reducer:
    """A reducer that reduces however short the prompt is, with a word counter."""
    return Reducer(config or ReducerConfig(min_prompt_tokens=0), WordCounter(), encoder or HashEncoder())


def reduce_parts(
    parts: PromptParts,
    max_input_tokens: int = 100_000,
    *,
    config: ReducerConfig | None = None,
    encoder: Encoder | None = None,
    caller: Caller | None = None,
    bypass: bool = False,
) -> ReductionResult:
    """Reduce with a fresh reducer."""
    return make_reducer(config, encoder=encoder).reduce(
        parts, budget=Budget(max_input_tokens, "request"), caller=caller or Caller(), bypass=bypass
    )
