"""Keys and values in 8 bits: rows of the paged cache that carry their own scale.

One row is one head of one token. It ends with the bytes of its scale, so that blocks can be copied, swapped and shared
as ever::

    head_dim = 64          64 numbers of 8 bits | 4 bytes: scale, fp32          68 bytes instead of 128 in bf16

A scale per token, not per block: a block fills up over several steps, and a scale of the whole block would have to be
raised, and what is stored already rounded again, whenever a larger key comes. So a token's row depends on the token
alone, and chunks, batches and prefix hits leave it as it is.

``int8`` spaces its numbers evenly: one large element, as in the keys of some models, leaves few steps for the others.
``fp8`` (e4m3) keeps 4 significant bits of each. Which is harmless is a question to the model.
"""

from typing import Literal

import torch

from kernels.fp8_linear import FP8_MAX, fp8_dtype

KVFormat = Literal["int8", "fp8"]

SCALE_BYTES = 4
_STORAGE = {"int8": torch.int8, "fp8": torch.uint8}
_INT8_MAX = 127.0


def kv_storage_dtype(kv_format: KVFormat) -> torch.dtype:
    """The dtype of a cache's rows, which tells the format. Raises ValueError where torch cannot round to it."""
    if kv_format == "fp8":
        fp8_dtype()
    return _STORAGE[kv_format]


def kv_row_size(head_dim: int) -> int:
    """Bytes of one row. Raises ValueError for heads whose scale would not be aligned."""
    if head_dim % SCALE_BYTES:
        raise ValueError(f"a quantized KV cache needs a head size that is a multiple of {SCALE_BYTES}, got {head_dim}")
    return head_dim + SCALE_BYTES


def is_quantized_kv(kv_cache: torch.Tensor) -> bool:
    """Whether the rows of a cache are of 8 bits with a scale."""
    return kv_cache.dtype in (torch.int8, torch.uint8)


def quantize_kv(x: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    """Round rows.

    Args:
        x: (..., head_dim), any floating dtype.
        storage: int8, or uint8 for fp8.

    Returns:
        (..., head_dim + 4), ``storage``. A row with a value that is not finite has a scale that is not finite.
    """
    values = x.float()
    largest = values.abs().amax(dim=-1, keepdim=True)
    scales = largest / (_INT8_MAX if storage == torch.int8 else FP8_MAX)
    scaled = torch.where(scales > 0, values / scales, 0.0)
    if storage == torch.int8:
        data = scaled.round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    else:
        data = scaled.nan_to_num_(0.0, 0.0, 0.0).clamp_(-FP8_MAX, FP8_MAX).to(fp8_dtype()).view(torch.uint8)
    return torch.cat((data, scales.view(storage)), dim=-1)


def dequantize_kv(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """rows: (..., head_dim + 4), contiguous, from ``quantize_kv``. Returns (..., head_dim)."""
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    data = rows[..., :-SCALE_BYTES]
    if rows.dtype == torch.uint8:
        data = data.contiguous().view(fp8_dtype())
    return data.to(torch.float32).mul_(scales).to(dtype)


def store_quantized_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write one layer's new keys and values in place, as ``store_kv`` does.

    Args:
        k, v: (num_tokens, num_kv_heads, head_dim), any strides and floating dtype.
        kv_cache: (2, num_blocks, block_size, num_kv_heads, head_dim + 4), keys first, contiguous.
        slot_mapping: (num_tokens,), int64.
    """
    assert kv_cache.is_contiguous(), "the KV cache must be contiguous"
    num_kv_heads, row_size = kv_cache.shape[3:]
    assert k.shape == v.shape == (slot_mapping.shape[0], num_kv_heads, row_size - SCALE_BYTES), (
        f"k {tuple(k.shape)}, v {tuple(v.shape)}, {slot_mapping.shape[0]} slots, cache {tuple(kv_cache.shape)}"
    )
    slots = kv_cache.flatten(1, 2)
    slots[0].index_copy_(0, slot_mapping, quantize_kv(k, kv_cache.dtype))
    slots[1].index_copy_(0, slot_mapping, quantize_kv(v, kv_cache.dtype))
