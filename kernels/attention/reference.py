"""Attention as the formula says, in fp32, one sequence at a time. It defines correct."""

import torch

from kernels.attention.base import AttentionMetadata, gather_kv


def attention_ref(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """``softmax(cap(q k^T * scale) + mask) v`` for every sequence of the batch, keys and values from their blocks.

    Args and shapes as in ``AttentionBackend.attend``. Returns fp32.
    """
    outputs = []
    for index, query in enumerate(torch.split(q.float(), list(metadata.query_lens))):
        context_len = metadata.context_lens[index]
        seq_len = context_len + query.shape[0]
        k, v = gather_kv(kv_cache, metadata.block_tables[index], seq_len).float()
        group_size = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_positions = torch.arange(context_len, seq_len, device=q.device)[:, None]
        key_positions = torch.arange(seq_len, device=q.device)
        scores.masked_fill_(key_positions > query_positions, float("-inf"))
        if window is not None:
            scores.masked_fill_(key_positions <= query_positions - window, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v))
    return torch.cat(outputs)


class ReferenceAttention:
    """``attention_ref`` behind the interface; slow, for tests and for finding a backend's fault."""

    name = "reference"

    def prepare(self, metadata: AttentionMetadata, *, dtype: torch.dtype) -> AttentionMetadata:
        """Nothing to share between layers."""
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
        """See ``AttentionBackend.attend``; keys and values come from the cache alone."""
        return attention_ref(q, kv_cache, metadata, scale, window=window, softcap=softcap).to(q.dtype)
