"""Attention by the flash-attn package, whichever of its versions 2, 3 or 4 is there.

All of them have ``flash_attn_varlen_func`` over keys that lie side by side, so a prompt without context goes in as it
is, and the blocks of a context are gathered first: a copy, small beside the attention of a chunk. A decode would double
its traffic that way; it reads the blocks where they lie, by the package where that takes any block size (version 3),
else by the paged backend that this one is given, which also takes heads that are too wide.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.attention.base import AttentionBackend, AttentionMetadata

FLASH_DTYPES = frozenset({torch.bfloat16, torch.float16})
_MAX_HEAD_DIM = {2: 256, 3: 256, 4: 128}


@dataclass(frozen=True, slots=True)
class FlashPackage:
    """The functions of one version."""

    version: int
    varlen: Callable[..., Any]
    """``flash_attn_varlen_func``."""
    with_kvcache: Callable[..., Any] | None
    """``flash_attn_with_kvcache`` of version 3, which reads blocks of any size in place."""


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """What all layers of a step share."""

    paged: AttentionMetadata
    """As the paged backend prepared it, decodes alone; the whole step for heads that are too wide."""
    whole: AttentionMetadata
    slots: torch.Tensor | None
    """(num_keys,), int64: slots of all keys of the chunks, one after the other; ``None`` if no chunk has a context."""
    cu_seqlens_q: torch.Tensor
    """(num_chunks + 1,), int32, from the first chunk on."""
    cu_seqlens_k: torch.Tensor
    max_query_len: int
    max_seq_len: int


class FlashAttention:
    """The fastest backend on GPUs that the package supports."""

    def __init__(self, package: FlashPackage, paged: AttentionBackend) -> None:
        """``paged`` does what the package cannot."""
        self._package = package
        self._paged = paged
        self.name = f"flash {package.version}"

    @property
    def is_replayable(self) -> bool:
        """As the paged backend says, if it computes the decodes."""
        return self._package.with_kvcache is None and bool(getattr(self._paged, "is_replayable", False))

    def prepare(self, metadata: AttentionMetadata, *, dtype: torch.dtype) -> AttentionMetadata:
        """Lay out the keys of the chunks."""
        first, device = metadata.num_decodes, metadata.seq_lens.device
        queries = metadata.query_lens[first:]
        contexts = metadata.context_lens[first:]
        keys = [query + context for query, context in zip(queries, contexts, strict=True)]
        slots = None
        if any(contexts):
            offsets = torch.arange(metadata.block_size, device=device)
            rows = (metadata.block_tables[first:].long()[:, :, None] * metadata.block_size + offsets).flatten(1)
            slots = torch.cat([row[:num_keys] for row, num_keys in zip(rows, keys, strict=True)])
        plan = FlashPlan(
            paged=self._paged.prepare(_decodes_of(metadata), dtype=dtype) if first else metadata,
            whole=metadata,
            slots=slots,
            cu_seqlens_q=_cumulated(queries, device),
            cu_seqlens_k=_cumulated(keys, device),
            max_query_len=max(queries, default=0),
            max_seq_len=max(keys, default=0),
        )
        return replace(metadata, plan=plan)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        plan = metadata.plan
        assert isinstance(plan, FlashPlan), "metadata must come from prepare() of this backend"
        head_dim = q.shape[2]
        options = {"window": window, "softcap": softcap}
        if head_dim > _MAX_HEAD_DIM[self._package.version] or head_dim % 8:
            whole = self._paged.prepare(plan.whole, dtype=q.dtype)
            return self._paged.attend(q, k, v, kv_cache, whole, scale, **options)  # type: ignore[arg-type]
        num_decodes = metadata.num_decodes
        if num_decodes == metadata.num_seqs:
            return self._decode(q, k, v, kv_cache, plan.paged, scale, window, softcap)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if num_decodes:
            rows = slice(0, num_decodes)
            out[rows] = self._decode(q[rows], k[rows], v[rows], kv_cache, plan.paged, scale, window, softcap)
        keys, values = k[num_decodes:], v[num_decodes:]
        if plan.slots is not None:
            keys, values = kv_cache.flatten(1, 2).index_select(1, plan.slots)
        attended = self._package.varlen(
            q[num_decodes:],
            keys,
            values,
            cu_seqlens_q=plan.cu_seqlens_q,
            cu_seqlens_k=plan.cu_seqlens_k,
            max_seqlen_q=plan.max_query_len,
            max_seqlen_k=plan.max_seq_len,
            **self._options(scale, window, softcap),
        )
        out[num_decodes:] = _first(attended)
        return out

    def _decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """q: (num_decodes, num_heads, head_dim). Returns the same shape."""
        with_kvcache = self._package.with_kvcache
        if with_kvcache is None:
            return self._paged.attend(q, k, v, kv_cache, metadata, scale, window=window, softcap=softcap)
        attended = with_kvcache(
            q[:, None],
            kv_cache[0],
            kv_cache[1],
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_tables,
            **self._options(scale, window, softcap),
        )
        return _first(attended)[:, 0].contiguous()

    def _options(self, scale: float, window: int | None, softcap: float | None) -> dict[str, Any]:
        """Arguments that the functions share; ``window`` of the package does not count the query itself."""
        none = None if self._package.version == 4 else -1
        return {
            "softmax_scale": scale,
            "causal": True,
            # version 4 takes causal as the right side of a window
            "window_size": (none, none) if window is None else (window - 1, 0),
            "softcap": softcap or 0.0,
        }


def load_flash_package(version: int) -> FlashPackage:
    """Import the functions of ``version``.

    Raises:
        ImportError: the package is broken, for instance built for another torch.
    """
    import importlib

    if version == 4:
        module = importlib.import_module("flash_attn.cute")
        return FlashPackage(4, module.flash_attn_varlen_func, None)
    if version == 3:
        module = importlib.import_module("flash_attn_interface")
        return FlashPackage(3, module.flash_attn_varlen_func, module.flash_attn_with_kvcache)
    return FlashPackage(2, importlib.import_module("flash_attn").flash_attn_varlen_func, None)


def _decodes_of(metadata: AttentionMetadata) -> AttentionMetadata:
    """The leading decodes of a step as a step of their own."""
    count = metadata.num_decodes
    return replace(
        metadata,
        query_lens=metadata.query_lens[:count],
        context_lens=metadata.context_lens[:count],
        cu_seqlens_q=metadata.cu_seqlens_q[: count + 1],
        seq_lens=metadata.seq_lens[:count],
        block_tables=metadata.block_tables[:count],
        slot_mapping=metadata.slot_mapping[:count],
    )


def _cumulated(lens: tuple[int, ...] | list[int], device: torch.device) -> torch.Tensor:
    total = torch.zeros(len(lens) + 1, dtype=torch.int32)
    total[1:] = torch.tensor(lens, dtype=torch.int32).cumsum(0)
    return total.to(device)


def _first(result: Any) -> torch.Tensor:
    """Some versions return the log-sum-exp as well."""
    attended: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return attended
