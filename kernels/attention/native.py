"""Attention by the C++ kernels: FlashAttention over the paged cache, prefill and decode, nothing gathered.

Keys and values are read from the cache alone, in every layer once; a decode reads them where they lie.
"""

import torch

from kernels.attention.base import AttentionMetadata
from kernels.native.library import AttentionArgs, NativeKernels, dtype_code


class NativeAttention:
    """The fastest backend on a CPU."""

    def __init__(self, kernels: NativeKernels) -> None:
        self.kernels = kernels
        self.name = f"native ({kernels.isa})"

    def prepare(self, metadata: AttentionMetadata, *, dtype: torch.dtype) -> AttentionMetadata:
        """Nothing to share between layers but the metadata itself."""
        return metadata

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
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = kv_cache.shape[3]
        assert q.stride(2) == 1, f"the last dimension of q must be contiguous, its stride is {q.stride(2)}"
        assert kv_cache.is_contiguous(), "the KV cache must be contiguous"
        assert q.dtype == kv_cache.dtype, f"q is {q.dtype}, the cache is {kv_cache.dtype}"
        assert num_heads % num_kv_heads == 0, f"{num_heads} query heads for {num_kv_heads} KV heads"
        assert metadata.num_tokens == num_tokens, f"metadata of {metadata.num_tokens} tokens, q has {num_tokens}"
        assert scale > 0, f"scale must be positive, got {scale}"
        assert window is None or window > 0, f"window must be positive, got {window}"
        assert softcap is None or softcap > 0, f"softcap must be positive, got {softcap}"
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype)
        keys, values = kv_cache[0], kv_cache[1]
        arguments = AttentionArgs(
            q=q.data_ptr(),
            k_cache=keys.data_ptr(),
            v_cache=values.data_ptr(),
            out=out.data_ptr(),
            block_tables=metadata.block_tables.data_ptr(),
            cu_seqlens_q=metadata.cu_seqlens_q.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            q_token_stride=q.stride(0),
            q_head_stride=q.stride(1),
            table_stride=metadata.block_tables.stride(0),
            num_seqs=metadata.num_seqs,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=metadata.block_size,
            dtype=dtype_code(q.dtype),
            window=window or 0,
            num_threads=torch.get_num_threads(),
            scale=scale,
            soft_cap=softcap or 0.0,
        )
        self.kernels.call("attention", arguments)
        return out
