"""Attention over a quantized KV cache, by any backend: what a step reads is widened first, layer by layer.

The blocks of the step's sequences are gathered into a small cache of the backend's own dtype, in which they are
numbered anew; the backend sees nothing else::

    block tables  [7, 2], [2, 9]     blocks read 2, 7, 9     tables of the small cache  [1, 0], [0, 2]

The new tokens' own keys and values are read back from the cache as well, so that a token attends to the same numbers
whether they were computed in this step or in an earlier one. It costs the memory of one layer's context, and its time.
"""

from dataclasses import dataclass, replace

import torch

from kernels.attention.base import AttentionBackend, AttentionMetadata
from kernels.kv_quantization import KVFormat, dequantize_kv


@dataclass(frozen=True, slots=True)
class QuantizedPlan:
    """What all layers of a step share."""

    block_ids: torch.Tensor
    """(num_blocks,), int64: the blocks that the step reads, in rising order."""
    metadata: AttentionMetadata
    """Of the same step over the small cache, from the backend's ``prepare``."""


class QuantizedKVAttention:
    """See above."""

    def __init__(self, backend: AttentionBackend, kv_format: KVFormat) -> None:
        self._backend = backend
        self.name = f"{backend.name}, {kv_format} KV"

    def prepare(self, metadata: AttentionMetadata, *, dtype: torch.dtype) -> AttentionMetadata:
        """Number the blocks of the step anew."""
        size = metadata.block_size
        num_blocks = (metadata.seq_lens + (size - 1)) // size
        is_read = torch.arange(metadata.block_tables.shape[1], device=num_blocks.device) < num_blocks[:, None]
        block_ids, places = torch.unique(metadata.block_tables[is_read].long(), return_inverse=True)
        tables = torch.zeros_like(metadata.block_tables)
        tables[is_read] = places.to(tables.dtype)
        slots = metadata.slot_mapping
        slots = torch.searchsorted(block_ids, slots // size) * size + slots % size
        small = replace(metadata, block_tables=tables, slot_mapping=slots, plan=None)
        return replace(metadata, plan=QuantizedPlan(block_ids, self._backend.prepare(small, dtype=dtype)))

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
        """See ``AttentionBackend.attend``; ``kv_cache`` as ``store_quantized_kv`` fills it."""
        plan = metadata.plan
        assert isinstance(plan, QuantizedPlan), "metadata must come from prepare() of this backend"
        small = dequantize_kv(kv_cache.index_select(1, plan.block_ids), q.dtype)
        keys, values = small.flatten(1, 2).index_select(1, plan.metadata.slot_mapping)
        return self._backend.attend(q, keys, values, small, plan.metadata, scale, window=window, softcap=softcap)
