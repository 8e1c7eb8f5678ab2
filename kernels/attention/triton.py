"""Attention by the Triton kernels: prefill and decode over the paged cache, nothing gathered.

The module ``triton`` itself is imported by ``kernels.triton_kernels``; this one only shares its name.
"""

from dataclasses import dataclass, field, replace

import torch

from kernels.attention.base import AttentionMetadata
from kernels.triton_kernels.attention_decode import choose_num_splits, paged_decode
from kernels.triton_kernels.attention_prefill import list_tiles, paged_prefill, query_block
from kernels.triton_kernels.tuning import attention_class, find_config

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """What all layers of a step share."""

    max_decode_keys: int
    """Most keys that a decode of the step sees."""
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)
    """By tokens of a tile, listed when the first layer asks; see ``list_tiles``."""


class TritonAttention:
    """The backend for GPUs that needs no package but torch's own Triton."""

    name = "triton"
    is_replayable = True
    """A decode reads its lengths on the device and skips empty rows: its launches can be recorded and replayed."""

    def prepare(self, metadata: AttentionMetadata, *, dtype: torch.dtype) -> AttentionMetadata:
        """Note what the launches depend on."""
        longest = max(metadata.context_lens[: metadata.num_decodes], default=0) + 1
        return replace(metadata, plan=TritonPlan(longest))

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
        """See ``AttentionBackend.attend``; keys and values come from the cache alone."""
        plan = metadata.plan
        assert isinstance(plan, TritonPlan), "metadata must come from prepare() of this backend"
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = kv_cache.shape[3]
        assert q.dtype == kv_cache.dtype, f"q is {q.dtype}, the cache is {kv_cache.dtype}"
        assert metadata.num_tokens == num_tokens, f"metadata of {metadata.num_tokens} tokens, q has {num_tokens}"
        assert head_dim <= MAX_HEAD_DIM, f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}"
        assert window is None or window > 0, f"window must be positive, got {window}"
        assert softcap is None or softcap > 0, f"softcap must be positive, got {softcap}"
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
        shape_class = attention_class(head_dim, q.dtype)
        if metadata.num_decodes:
            config = find_config("decode", shape_class, q.device)
            max_keys = plan.max_decode_keys if window is None else min(plan.max_decode_keys, window)
            num_splits = choose_num_splits(metadata.num_decodes, num_kv_heads, max_keys, config.block_n, q.device)
            paged_decode(
                q, kv_cache, metadata, scale, out, config, num_splits=num_splits, window=window, softcap=softcap
            )
        if metadata.num_decodes < metadata.num_seqs:
            config = find_config("prefill", shape_class, q.device)
            tokens_per_tile = query_block(config, num_heads // num_kv_heads)
            if tokens_per_tile not in plan.tiles:
                plan.tiles[tokens_per_tile] = list_tiles(metadata, tokens_per_tile)
            tiles = plan.tiles[tokens_per_tile]
            paged_prefill(q, kv_cache, metadata, tiles, scale, out, config, window=window, softcap=softcap)
        return out
