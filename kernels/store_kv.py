"""Writes the keys and values of new tokens into their slots of the paged cache."""

import torch


def store_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write one layer's new keys and values in place.

    Args:
        k, v: (num_tokens, num_kv_heads, head_dim), any strides, dtype of ``kv_cache``.
        kv_cache: (2, num_blocks, block_size, num_kv_heads, head_dim), keys first, contiguous.
        slot_mapping: (num_tokens,), int64: ``block_id * block_size + offset`` of each token, all different.
    """
    assert kv_cache.is_contiguous(), "the KV cache must be contiguous"
    assert k.shape == v.shape == (slot_mapping.shape[0], *kv_cache.shape[3:]), (
        f"k {tuple(k.shape)}, v {tuple(v.shape)}, {slot_mapping.shape[0]} slots, cache {tuple(kv_cache.shape)}"
    )
    assert k.dtype == v.dtype == kv_cache.dtype, f"k is {k.dtype}, v is {v.dtype}, the cache is {kv_cache.dtype}"
    slots = kv_cache.flatten(1, 2)
    slots[0].index_copy_(0, slot_mapping, k)
    slots[1].index_copy_(0, slot_mapping, v)


def store_kv_ref(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """The same, one token at a time."""
    block_size = kv_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        kv_cache[0, slot // block_size, slot % block_size] = k[token]
        kv_cache[1, slot // block_size, slot % block_size] = v[token]
