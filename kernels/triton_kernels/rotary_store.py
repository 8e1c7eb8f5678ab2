"""Turn queries and keys and store keys and values into the paged cache, one program per token."""

import torch
import triton
import triton.language as tl

from kernels.triton_kernels.numerics import narrow
from kernels.triton_kernels.runtime import is_interpreted


@triton.jit
def turn_heads(
    x, token_stride, head_stride, token, cos, sin, num_heads, HALF: tl.constexpr, HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Turn all heads of one token in place; returns both halves as stored."""
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, HALF_PADDED)
    mask = (heads[:, None] < num_heads) & (dims[None, :] < HALF)
    first = x + token * token_stride + heads[:, None] * head_stride + dims[None, :]
    x1 = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    y1 = narrow(x1 * cos - x2 * sin, x.dtype.element_ty, EMULATE)
    y2 = narrow(x2 * cos + x1 * sin, x.dtype.element_ty, EMULATE)
    tl.store(first, y1, mask=mask)
    tl.store(first + HALF, y2, mask=mask)
    return y1, y2


@triton.jit
def rotary_store_kernel(
    q,
    k,
    v,
    half_cos,
    half_sin,
    key_cache,
    value_cache,
    slot_mapping,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_heads,
    num_kv_heads,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """All heads of one token; a negative slot stores nothing."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HALF_PADDED)
    cos = tl.load(half_cos + token * HALF + dims, mask=dims < HALF, other=0.0)[None, :]
    sin = tl.load(half_sin + token * HALF + dims, mask=dims < HALF, other=0.0)[None, :]
    turn_heads(q, q_token_stride, q_head_stride, token, cos, sin, num_heads, HALF, HEADS, HALF_PADDED, EMULATE)
    k1, k2 = turn_heads(
        k, k_token_stride, k_head_stride, token, cos, sin, num_kv_heads, HALF, KV_HEADS, HALF_PADDED, EMULATE
    )
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        heads = tl.arange(0, KV_HEADS)
        mask = (heads[:, None] < num_kv_heads) & (dims[None, :] < HALF)
        cached = slot * num_kv_heads * 2 * HALF + heads[:, None] * 2 * HALF + dims[None, :]
        values = v + token * v_token_stride + heads[:, None] * v_head_stride + dims[None, :]
        tl.store(key_cache + cached, k1, mask=mask)
        tl.store(key_cache + cached + HALF, k2, mask=mask)
        tl.store(value_cache + cached, tl.load(values, mask=mask, other=0.0), mask=mask)
        tl.store(value_cache + cached + HALF, tl.load(values + HALF, mask=mask, other=0.0), mask=mask)


def rotary_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    half_cos: torch.Tensor,
    half_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Turn ``q`` and ``k`` in place, store ``k`` and ``v``; see ``kernels.rotary_store``.

    Args:
        q, k, v: (num_tokens, heads, head_dim), last dimension contiguous, head_dim even.
        half_cos, half_sin: (num_tokens, head_dim / 2), fp32, contiguous.
        kv_cache: (2, num_blocks, block_size, num_kv_heads, head_dim), contiguous.
        slot_mapping: (num_tokens,), int64, contiguous; what has a negative slot is turned but not stored.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert head_dim % 2 == 0, f"head_dim must be even, got {head_dim}"
    assert half_cos.is_contiguous(), "the cosines must be contiguous"
    assert half_sin.is_contiguous(), "the sines must be contiguous"
    if num_tokens == 0:
        return
    half = head_dim // 2
    rotary_store_kernel[(num_tokens,)](
        q,
        k,
        v,
        half_cos,
        half_sin,
        kv_cache[0],
        kv_cache[1],
        slot_mapping,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        num_heads,
        k.shape[1],
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        HEADS=triton.next_power_of_2(num_heads),
        KV_HEADS=triton.next_power_of_2(k.shape[1]),
        EMULATE=is_interpreted(),
        num_warps=4,
    )
