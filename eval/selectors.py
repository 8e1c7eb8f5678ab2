"""Named baselines of a recall run: which documents of a case each of them sends.

``head`` and ``tail`` take whole passages from one end of the retriever's list, ``bm25`` and ``embedding`` the best ones
by their own score; each takes every passage that still fits. ``longllmlingua`` and ``headroom`` compress the text of
all passages with their packages, where these are installed.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eval.baselines import Embed, bm25, by_score, with_title
from eval.compressor_process import CompressorProcess
from eval.prompts import case_documents
from eval.records import SkippedArm
from eval.samples import Case, Chunk

ENCODER_FOLDER = "all-minilm-l6-v2"
COMPRESSED_ID = "compressed"
"""Id of the one document that a compressor makes of all passages."""


class Selector(Protocol):
    """A baseline."""

    @property
    def name(self) -> str:
        """Name of the arm."""

    @property
    def is_verbatim(self) -> bool:
        """Whether it sends passages as they are, so that evidence can be judged by passage."""

    def choose(self, case: Case, lengths: Mapping[str, int], max_tokens: int) -> list[dict[str, Any]]:
        """The documents to send. ``lengths``: tokens of each passage. ``max_tokens``: of all that is sent."""


Order = Callable[[Case], list[int]]


@dataclass(frozen=True, slots=True)
class RankedSelector:
    """Takes whole passages in an order of its own and sends them in the retriever's."""

    name: str
    order: Order
    is_verbatim: bool = True

    def choose(self, case: Case, lengths: Mapping[str, int], max_tokens: int) -> list[dict[str, Any]]:
        """Every passage that still fits, best first."""
        left = max_tokens
        taken: set[int] = set()
        for place in self.order(case):
            cost = lengths.get(case.chunks[place].id, 0)
            if cost <= left:
                taken.add(place)
                left -= cost
        return [document for place, document in enumerate(case_documents(case)) if place in taken]


@dataclass(frozen=True, slots=True)
class CompressingSelector:
    """Sends one document: all passages as a compressor leaves them."""

    name: str
    compress: Callable[[Case, int], str]
    is_verbatim: bool = False

    def choose(self, case: Case, lengths: Mapping[str, int], max_tokens: int) -> list[dict[str, Any]]:
        """The compressed text as one document, or nothing where nothing is left."""
        text = self.compress(case, max_tokens)
        return [{"id": COMPRESSED_ID, "text": text}] if text.strip() else []


class Selectors(NamedTuple):
    """Baselines that can run here, and those that cannot."""

    ready: list[Selector]
    skipped: list[SkippedArm]


class NotHereError(Exception):
    """A baseline's package or model is missing; the text says which."""


@dataclass(slots=True)
class SelectorFactory:
    """Makes baselines by name."""

    encoder: str | None = None
    """A sentence-transformers folder or id for ``embedding``; ``None`` takes the one the gateway uses by default."""
    compressor_model: str | None = None
    """The language model of LongLLMLingua: a local folder or an id."""
    embed: Embed | None = None
    """Replaces the encoder."""
    pythons: Mapping[str, Path] = field(default_factory=dict)
    """Python of the environment that holds a compressor's package, by baseline; without one, this environment's."""
    _vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    _processes: list[CompressorProcess] = field(default_factory=list)

    def make(self, names: Sequence[str]) -> Selectors:
        """The named baselines, each once. Raises ``ValueError`` for a name that is none."""
        found = Selectors([], [])
        for name in dict.fromkeys(names):
            if name not in NAMES:
                raise ValueError(f"no baseline is called {name!r}; known: {', '.join(NAMES)}")
            try:
                found.ready.append(getattr(self, f"_{name}")())
            except NotHereError as reason:
                found.skipped.append(SkippedArm(name=name, reason=str(reason)))
        return found

    def close(self) -> None:
        """Ends the compressors' processes."""
        while self._processes:
            self._processes.pop().close()

    def _head(self) -> Selector:
        return RankedSelector("head", lambda case: list(range(len(case.chunks))))

    def _tail(self) -> Selector:
        return RankedSelector("tail", lambda case: list(range(len(case.chunks) - 1, -1, -1)))

    def _bm25(self) -> Selector:
        return RankedSelector("bm25", lambda case: by_score(bm25(case.question, _texts(case.chunks))))

    def _embedding(self) -> Selector:
        embed = self.embed or self._load_encoder()

        def order(case: Case) -> list[int]:
            vectors = self._embedded([case.question, *_texts(case.chunks)], embed)
            return by_score(np.asarray(vectors[1:] @ vectors[0], dtype=np.float64))

        return RankedSelector("embedding", order)

    def _longllmlingua(self) -> Selector:
        is_apart = "longllmlingua" in self.pythons
        if not is_apart:
            _require("llmlingua", "llmlingua")
        if self.compressor_model is None:
            raise NotHereError("needs a language model: --compressor-model FOLDER_OR_ID")
        if is_apart:
            return self._apart("longllmlingua", "longllmlingua.py", [self.compressor_model])
        import llmlingua

        compressor = llmlingua.PromptCompressor(self.compressor_model, device_map="cpu")

        def compress(case: Case, max_tokens: int) -> str:
            found = compressor.compress_prompt(
                _texts(case.chunks),
                instruction="",
                question=case.question,
                target_token=max_tokens,
                condition_compare=True,
                condition_in_question="after",
                rank_method="longllmlingua",
                use_sentence_level_filter=False,
                context_budget="+100",
                dynamic_context_compression_ratio=0.4,
                reorder_context="sort",
            )
            return str(found["compressed_prompt"])

        return CompressingSelector("longllmlingua", compress)

    def _headroom(self) -> Selector:
        if "headroom" in self.pythons:
            return self._apart("headroom", "headroom_compress.py", [])
        _require("headroom", "headroom-ai")
        os.environ.setdefault("HEADROOM_OFFLINE", "1")
        module = importlib.import_module("headroom")

        def compress(case: Case, max_tokens: int) -> str:
            # What a retrieval tool returned is what the package compresses by default.
            texts = "\n\n".join(_texts(case.chunks))
            call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
            messages = [
                {"role": "user", "content": case.question},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": texts},
            ]
            share = max_tokens / max(1, len(texts) // 4)
            result = module.compress(messages, model="gpt-4o", protect_recent=0, target_ratio=min(1.0, share))
            return str(result.messages[-1]["content"])

        return CompressingSelector("headroom", compress)

    def _apart(self, name: str, script: str, arguments: Sequence[str]) -> Selector:
        """A compressor in an environment of its own."""
        try:
            process = CompressorProcess(self.pythons[name], script, arguments)
        except (OSError, RuntimeError) as error:
            raise NotHereError(f"its environment does not start: {error}") from None
        self._processes.append(process)

        def compress(case: Case, max_tokens: int) -> str:
            found = process.compress(case.question, _texts(case.chunks), max_tokens)
            if found.get("error"):
                raise RuntimeError(found["error"])
            return str(found["text"])

        return CompressingSelector(name, compress)

    def _load_encoder(self) -> Embed:
        name = self.encoder or str(_cache_folder() / "models" / ENCODER_FOLDER)
        if self.encoder is None and not Path(name).is_dir():
            raise NotHereError("its encoder is not on this machine: firsttoken models pull, or --encoder")
        _require("sentence_transformers", "sentence-transformers")
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(name, device="cpu")

        def embed(texts: Sequence[str]) -> NDArray[np.float32]:
            rows = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
            return np.asarray(rows, dtype=np.float32)

        return embed

    def _embedded(self, texts: Sequence[str], embed: Embed) -> NDArray[np.float32]:
        missing = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if missing:
            self._vectors.update(zip(missing, embed(missing), strict=True))
        return np.stack([self._vectors[text] for text in texts])


COMPRESSORS = ("longllmlingua", "headroom")
NAMES = ("head", "tail", "bm25", "embedding", *COMPRESSORS)


def _require(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise NotHereError(f"the package {package} is not installed")


def _cache_folder() -> Path:
    if own := os.environ.get("FIRSTTOKEN_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "firsttoken"


def _texts(chunks: Sequence[Chunk]) -> list[str]:
    return [with_title(chunk) for chunk in chunks]
