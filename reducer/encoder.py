"""Embeddings: the protocol the reducer sees, and sentence-transformers behind it with a cache by content.

torch and sentence-transformers are imported when the first encoder is built, never with this module.
"""

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from reducer.byte_cache import ByteCache
from reducer.config import EncoderConfig
from reducer.sentences import split_windows

FloatArray = npt.NDArray[np.float32]

_CACHE_ENTRY_OVERHEAD = 200  # bytes of key, array header and dictionary slot beside the vector itself


class Encoder(Protocol):
    """Turns texts into vectors whose dot product is their similarity. Must be safe to call from several threads."""

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Embed texts: float32 of shape ``(len(texts), dim)``, each row of length 1."""
        ...


@runtime_checkable
class ScopedEncoder(Protocol):
    """An encoder whose cache can be kept apart: who shares no scope cannot tell by the time what another one sent."""

    def for_scope(self, scope: str) -> Encoder:
        """The same model with cached vectors of this scope only."""
        ...


class VectorCache(ByteCache[FloatArray]):
    """Vectors by content hash."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, lambda vector: vector.nbytes + _CACHE_ENTRY_OVERHEAD)


class SentenceTransformerEncoder:
    """A sentence-transformers folder as ``Encoder``.

    Texts go through the model sorted by length in batches of limited size, in bfloat16 where the processor computes it
    natively: a BERT with mean pooling by ``reducer.bert``, any other model by sentence-transformers. A text longer than
    the model's window is the mean of its windows. One forward pass runs at a time: a second one would only take cores
    from the first.
    """

    def __init__(self, path: Path | str, config: EncoderConfig | None = None) -> None:
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils.logging import disable_progress_bar

        from reducer.bert import read_bert

        config = config or EncoderConfig()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._config = config
        disable_progress_bar()
        model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": _native_dtype()}[config.dtype]
        self._max_tokens = int(model.max_seq_length or 256)
        self._cache = VectorCache(config.max_cache_bytes)
        self._forward_lock = threading.Lock()
        self._text_model: _TextModel = read_bert(model, dtype) or _PaddedModel(model.to(dtype).eval(), self._max_tokens)
        self._dim = int(self._forward([""]).shape[1])

    @property
    def dim(self) -> int:
        """Length of one vector."""
        return self._dim

    @property
    def cache(self) -> VectorCache:
        """The vectors kept so far."""
        return self._cache

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Embed texts: float32 of shape ``(len(texts), dim)``, each row of length 1."""
        return self.encode_in(texts, "")

    def for_scope(self, scope: str) -> Encoder:
        """The same model with cached vectors of this scope only."""
        return _Scoped(self, scope)

    def encode_in(self, texts: Sequence[str], scope: str) -> FloatArray:
        """``encode`` with cached vectors of one scope."""
        salt = hashlib.blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        keys = [_content_key(text, salt) for text in texts]
        vectors: dict[bytes, FloatArray] = {}
        missing: dict[bytes, str] = {}
        for key, text in zip(keys, texts, strict=True):
            if key in vectors or key in missing:
                continue
            cached = self._cache.get(key)
            if cached is None:
                missing[key] = text
            else:
                vectors[key] = cached
        if missing:
            for key, vector in zip(missing, self._encode_uncached(list(missing.values())), strict=True):
                vectors[key] = vector
                self._cache.put(key, vector)
        if not keys:
            return np.zeros((0, self.dim), dtype=np.float32)
        return np.stack([vectors[key] for key in keys])

    def _encode_uncached(self, texts: list[str]) -> FloatArray:
        """Vectors of texts of any length, shape ``(len(texts), dim)``."""
        pieces: list[str] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            # Four letters a token and room for the special tokens: a window of usual text fits the model whole.
            windows = split_windows(text, 4 * (self._max_tokens - 2))
            pieces.extend(text[window.start : window.end] for window in windows)
            owners.extend([owner] * len(windows))
            if not windows:
                pieces.append("")
                owners.append(owner)
        vectors = self._forward(pieces)
        sums = np.zeros((len(texts), vectors.shape[1]), dtype=np.float32)
        np.add.at(sums, owners, vectors)
        norms: FloatArray = np.linalg.norm(sums, axis=1, keepdims=True).astype(np.float32)
        sums /= np.maximum(norms, np.float32(1e-9))
        return sums

    def _forward(self, pieces: list[str]) -> FloatArray:
        """Vectors of texts that fit the model's window, batched by length."""
        import torch

        with self._forward_lock, torch.inference_mode():
            inputs, lengths = self._text_model.read(pieces)
            # Sorted by text as well: a batch rounds its rows together, so its make-up must not follow the request's
            # order.
            order = sorted(range(len(pieces)), key=lambda index: (lengths[index], pieces[index]))
            rows: list[FloatArray | None] = [None] * len(pieces)
            for batch in self._batches(lengths, order):
                embedding = self._text_model.embed([inputs[index] for index in batch])
                for index, row in zip(batch, torch.nn.functional.normalize(embedding, dim=1).numpy(), strict=True):
                    rows[index] = row
        return np.stack([row for row in rows if row is not None])

    def _batches(self, lengths: Sequence[int], order: Sequence[int]) -> list[list[int]]:
        """Indices in batches of at most ``max_batch_tokens`` tokens, padded to the longest; ``order`` is by length."""
        batches: list[list[int]] = [[]]
        for index in order:
            if batches[-1] and lengths[index] * (len(batches[-1]) + 1) > self._config.max_batch_tokens:
                batches.append([])
            batches[-1].append(index)
        return batches


class _TextModel(Protocol):
    """One way to run the model; texts fit its window."""

    def read(self, texts: Sequence[str]) -> tuple[Sequence[Any], Sequence[int]]:
        """What ``embed`` takes for each text, and its tokens, about."""
        ...

    def embed(self, inputs: Sequence[Any]) -> Any:
        """One vector a text: a float32 tensor of shape ``(len(inputs), dim)``."""
        ...


class _PaddedModel:
    """Any sentence-transformers model, by its own code."""

    def __init__(self, model: Any, max_tokens: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        # sentence-transformers 5.0 calls it tokenize, later releases preprocess and warn about the old name.
        self._preprocess = getattr(model, "preprocess", None) or model.tokenize

    def read(self, texts: Sequence[str]) -> tuple[Sequence[str], Sequence[int]]:
        # A token is never shorter than a byte; a quarter of the UTF-8 length is the usual case for Latin text.
        return texts, [min(len(text.encode("utf-8", "replace")) // 3 + 2, self._max_tokens) for text in texts]

    def embed(self, inputs: Sequence[str]) -> Any:
        return self._model(self._preprocess(list(inputs)))["sentence_embedding"].float()


class _Scoped:
    """An encoder as one scope sees it."""

    def __init__(self, encoder: SentenceTransformerEncoder, scope: str) -> None:
        self._encoder = encoder
        self._scope = scope

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Embed texts: float32 of shape ``(len(texts), dim)``, each row of length 1."""
        return self._encoder.encode_in(texts, self._scope)


def _content_key(text: str, salt: bytes) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=salt).digest()


def _native_dtype() -> Any:
    """bfloat16 where the processor multiplies it natively, else float32."""
    import torch

    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes):
        return torch.bfloat16
    return torch.float32
