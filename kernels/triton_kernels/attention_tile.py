"""One tile of FlashAttention over the paged cache: scores, online softmax, weighted values.

A tile is ``BLOCK_N`` consecutive keys of one sequence and one KV head. Its rows lie wherever the block table says::

    keys   key_start ......................... key_start + BLOCK_N
    blocks | table[i]     | table[i + 1] | ...            BLOCK_SIZE keys each
    slots    block * BLOCK_SIZE + offset                  what the cache is indexed by

``row_max`` and ``row_sum`` are of exponentials to the base 2: the scores come out already multiplied by log2(e).
"""

import triton
import triton.language as tl

from kernels.triton_kernels.numerics import dot, narrow, tanh

_LOG2_E = 1.4426950408889634


@triton.jit
def attend_tile(
    acc,
    row_sum,
    row_max,
    q,
    key_start,
    end,
    positions,
    keys_of_head,
    values_of_head,
    table,
    slot_stride,
    score_factor,
    cap_factor,
    window,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Take in the keys from ``key_start`` on; unless ``IS_MASKED``, every row sees all of them.

    Args:
        acc: (rows, HEAD_PADDED), fp32; row_sum, row_max: (rows,), fp32. Returned as they are afterwards.
        q: (rows, HEAD_PADDED), zero beyond HEAD_DIM.
        end: keys from here on do not exist.
        positions: (rows,): a row sees keys up to its position, ``window`` of them where HAS_WINDOW.
        keys_of_head, values_of_head: first element of the KV head in slot 0 of the cache.
        score_factor: ``scale * log2(e)``, or ``scale / softcap`` where HAS_SOFTCAP.
        cap_factor: ``softcap * log2(e)``.
    """
    keys = key_start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_PADDED)
    is_key = keys < end
    if IS_MASKED:
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0)
    else:
        blocks = tl.load(table + keys // BLOCK_SIZE)
    offsets = (blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE) * slot_stride
    k_pointers = keys_of_head + offsets[None, :] + dims[:, None]
    v_pointers = values_of_head + offsets[:, None] + dims[None, :]
    if HEAD_DIM != HEAD_PADDED:
        k = tl.load(k_pointers, mask=is_key[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
        v = tl.load(v_pointers, mask=is_key[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    elif IS_MASKED:
        k = tl.load(k_pointers, mask=is_key[None, :], other=0.0)
        v = tl.load(v_pointers, mask=is_key[:, None], other=0.0)
    else:
        k = tl.load(k_pointers)
        v = tl.load(v_pointers)
    scores = dot(q, k, EMULATE) * score_factor
    if HAS_SOFTCAP:
        scores = tanh(scores) * cap_factor
    if IS_MASKED:
        is_visible = is_key[None, :] & (keys[None, :] <= positions[:, None])
        if HAS_WINDOW:
            is_visible = is_visible & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(is_visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # a row that has seen no key yet would subtract infinity from infinity
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if IS_MASKED else new_max
    weights = tl.exp2(scores - shift[:, None])
    kept = tl.exp2(row_max - shift)
    row_sum = row_sum * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None] + dot(narrow(weights, v.dtype, EMULATE), v, EMULATE)
    return acc, row_sum, new_max


@triton.jit
def start_of_tile(key, BLOCK_N: tl.constexpr):
    """Where the tile begins that holds ``key``; of a key before the first one, the first tile."""
    return tl.maximum(key, 0) // BLOCK_N * BLOCK_N


@triton.jit
def head_pointers(block_tables, key_cache, value_cache, seq, kv_head, table_stride, HEAD_DIM: tl.constexpr):
    """The block table of a sequence, and the first element of a KV head in slot 0 of keys and values."""
    table = block_tables + seq.to(tl.int64) * table_stride
    return table, key_cache + kv_head * HEAD_DIM, value_cache + kv_head * HEAD_DIM


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """``score_factor`` and ``cap_factor`` of ``attend_tile``."""
    return (scale * _LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * _LOG2_E)
