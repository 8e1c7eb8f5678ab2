"""Re-ranking: a cross-encoder reads question and passage together, for the passages that the cheaper signals put first.

Optional: it costs a forward pass of both texts for every passage and nothing of it can be computed before the question
is known. torch and sentence-transformers are imported when the first one is built, never with this module.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from reducer.byte_cache import ByteCache
from reducer.encoder import FloatArray
from reducer.ordering import prefix_key

_CACHE_BYTES = 4 * 1024 * 1024
_ENTRY_BYTES = 120  # key, number and dictionary slot
_BATCH_SIZE = 16


class Reranker(Protocol):
    """Judges passages for a question. Must be safe to call from several threads."""

    def score(self, question: str, texts: Sequence[str]) -> FloatArray:
        """Relevance of each text, float32 of shape ``(len(texts),)`` on [0, 1], higher is better."""
        ...


@runtime_checkable
class ScopedReranker(Protocol):
    """A reranker whose cache can be kept apart: who shares no scope cannot tell by the time what another one sent."""

    def for_scope(self, scope: str) -> Reranker:
        """The same model with cached scores of this scope only."""
        ...


class CrossEncoderReranker:
    """A sentence-transformers cross-encoder with one output as ``Reranker``; scores are cached by content.

    Raises ValueError for a model with several outputs: what its classes mean is not known here.
    """

    def __init__(self, path: Path | str) -> None:
        import torch
        from sentence_transformers import CrossEncoder

        self._model = CrossEncoder(str(path), device="cpu", local_files_only=True, activation_fn=torch.nn.Sigmoid())
        num_labels = int(self._model.config.num_labels)
        if num_labels != 1:
            raise ValueError(f"a cross-encoder must have 1 output, {path} has {num_labels}")
        self._cache: ByteCache[float] = ByteCache(_CACHE_BYTES, lambda _: _ENTRY_BYTES)
        self._forward_lock = threading.Lock()

    def score(self, question: str, texts: Sequence[str]) -> FloatArray:
        """Relevance of each text, float32 of shape ``(len(texts),)`` on [0, 1], higher is better."""
        return self.score_in(question, texts, "")

    def for_scope(self, scope: str) -> Reranker:
        """The same model with cached scores of this scope only."""
        return _Scoped(self, scope)

    def score_in(self, question: str, texts: Sequence[str], scope: str) -> FloatArray:
        """``score`` with cached scores of one scope."""
        keys = [prefix_key(scope, question, text) for text in texts]
        known = {key: cached for key in keys if (cached := self._cache.get(key)) is not None}
        # Sorted, so that neither padding nor rounding follows the order of the request.
        missing = sorted({key: text for key, text in zip(keys, texts, strict=True) if key not in known}.items())
        missing.sort(key=lambda item: (len(item[1]), item[1]))
        if missing:
            with self._forward_lock:
                found = self._model.predict(
                    [(question, text) for _, text in missing], batch_size=_BATCH_SIZE, show_progress_bar=False
                )
            for (key, _), value in zip(missing, np.asarray(found, dtype=np.float32).tolist(), strict=True):
                known[key] = value
                self._cache.put(key, value)
        return np.asarray([known[key] for key in keys], dtype=np.float32)


class _Scoped:
    """A reranker as one scope sees it."""

    def __init__(self, reranker: CrossEncoderReranker, scope: str) -> None:
        self._reranker = reranker
        self._scope = scope

    def score(self, question: str, texts: Sequence[str]) -> FloatArray:
        """Relevance of each text, float32 of shape ``(len(texts),)`` on [0, 1], higher is better."""
        return self._reranker.score_in(question, texts, self._scope)
