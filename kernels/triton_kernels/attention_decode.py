"""Decode attention over the paged cache in two passes, so that few sequences keep a whole GPU busy.

First each sequence's keys are split into ranges, one program each; then the partial results are joined::

    o = sum(2**lse_i * o_i) / sum(2**lse_i)      lse_i = log2 of the sum of exponentials of range i

How many ranges there may be is fixed before the launch, how long they are follows the length that the device reads. So
a launch can be recorded once and replayed while the sequences grow. A sequence of length 0 gets zeros.
"""

import torch
import triton
import triton.language as tl

from kernels.attention.base import AttentionMetadata
from kernels.triton_kernels.attention_tile import attend_tile, head_pointers, score_factors, start_of_tile
from kernels.triton_kernels.numerics import narrow
from kernels.triton_kernels.runtime import is_interpreted, num_multiprocessors
from kernels.triton_kernels.tuning import KernelConfig

_MAX_SPLITS = 64
# A range shorter than this many tiles does not pay for its part in the second pass.
_MIN_TILES_PER_SPLIT = 2
# Programs per multiprocessor that hide each other's waits for memory.
_PROGRAMS_PER_MULTIPROCESSOR = 2


@triton.jit
def split_keys(seq_len, window, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """How both passes cut the keys of a sequence: first key that is read, tiles in all, tiles of a range."""
    first_key = 0
    if HAS_WINDOW:
        first_key = start_of_tile(seq_len - window, BLOCK_N)
    num_tiles = (seq_len - first_key + BLOCK_N - 1) // BLOCK_N
    return first_key, num_tiles, (num_tiles + NUM_SPLITS - 1) // NUM_SPLITS


@triton.jit
def paged_decode_kernel(
    q,
    key_cache,
    value_cache,
    out,
    partial_out,
    partial_lse,
    block_tables,
    seq_lens,
    q_token_stride,
    q_head_stride,
    table_stride,
    slot_stride,
    score_factor,
    cap_factor,
    window,
    num_heads,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One range of keys of one sequence, for the query heads of one KV head."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + seq)
    first_key, _num_tiles, tiles_per_split = split_keys(seq_len, window, BLOCK_N, NUM_SPLITS, HAS_WINDOW)
    lo = first_key + split * tiles_per_split * BLOCK_N
    hi = tl.minimum(lo + tiles_per_split * BLOCK_N, seq_len)

    rows = tl.arange(0, GROUP_PADDED)
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, HEAD_PADDED)
    is_element = (rows[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    query = tl.load(
        q + seq * q_token_stride + heads[:, None] * q_head_stride + dims[None, :], mask=is_element, other=0.0
    )
    positions = seq_len - 1 + tl.zeros([GROUP_PADDED], dtype=tl.int32)
    table, keys_of_head, values_of_head = head_pointers(
        block_tables, key_cache, value_cache, seq, kv_head, table_stride, HEAD_DIM
    )
    acc = tl.zeros([GROUP_PADDED, HEAD_PADDED], dtype=tl.float32)
    row_sum = tl.zeros([GROUP_PADDED], dtype=tl.float32)
    row_max = tl.full([GROUP_PADDED], float("-inf"), dtype=tl.float32)

    full_to = lo
    if not HAS_WINDOW:
        full_to = lo + tl.maximum(hi - lo, 0) // BLOCK_N * BLOCK_N
        for key_start in range(lo, full_to, BLOCK_N):
            acc, row_sum, row_max = attend_tile(
                acc, row_sum, row_max, query, key_start, hi, positions, keys_of_head, values_of_head, table,
                slot_stride, score_factor, cap_factor, window,
                HEAD_DIM, HEAD_PADDED, BLOCK_N, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, False, EMULATE,
            )  # fmt: skip
    for key_start in range(full_to, hi, BLOCK_N):
        acc, row_sum, row_max = attend_tile(
            acc, row_sum, row_max, query, key_start, hi, positions, keys_of_head, values_of_head, table,
            slot_stride, score_factor, cap_factor, window,
            HEAD_DIM, HEAD_PADDED, BLOCK_N, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, True, EMULATE,
        )  # fmt: skip

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    attended = acc / row_sum[:, None]
    out_rows = seq * num_heads + heads
    if NUM_SPLITS == 1:
        tl.store(
            out + out_rows[:, None] * HEAD_DIM + dims[None, :],
            narrow(attended, out.dtype.element_ty, EMULATE),
            mask=is_element,
        )
    elif lo < hi:
        partial_rows = out_rows * NUM_SPLITS + split
        tl.store(partial_out + partial_rows[:, None] * HEAD_DIM + dims[None, :], attended, mask=is_element)
        tl.store(partial_lse + partial_rows, row_max + tl.log2(row_sum), mask=rows < GROUP)


@triton.jit
def join_splits_kernel(
    partial_out,
    partial_lse,
    out,
    seq_lens,
    window,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Join the ranges of one sequence and one query head; those that the first pass left empty are not read."""
    seq = tl.program_id(0).to(tl.int64)
    row = seq * num_heads + tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    _first_key, num_tiles, tiles_per_split = split_keys(seq_len, window, BLOCK_N, NUM_SPLITS, HAS_WINDOW)
    splits = tl.arange(0, NUM_SPLITS)
    is_used = splits * tiles_per_split < num_tiles
    dims = tl.arange(0, HEAD_PADDED)
    rows = row * NUM_SPLITS + splits
    lse = tl.load(partial_lse + rows, mask=is_used, other=float("-inf"))
    largest = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
    parts = tl.load(
        partial_out + rows[:, None] * HEAD_DIM + dims[None, :],
        mask=is_used[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    total = tl.sum(weights, 0)
    joined = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * HEAD_DIM + dims, narrow(joined, out.dtype.element_ty, EMULATE), mask=dims < HEAD_DIM)


def choose_num_splits(num_seqs: int, num_kv_heads: int, max_keys: int, block_n: int, device: torch.device) -> int:
    """A power of two: enough ranges for all multiprocessors, none of them too short.

    Args:
        num_seqs: decodes of the step.
        num_kv_heads: of the model.
        max_keys: most keys that one of them sees.
        block_n: keys of a tile.
        device: that computes.
    """
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // max(1, num_seqs * num_kv_heads)
    useful = -(-max_keys // block_n) // _MIN_TILES_PER_SPLIT
    num_splits = max(1, min(wanted, useful, _MAX_SPLITS))
    return 1 << (num_splits.bit_length() - 1)


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    config: KernelConfig,
    *,
    num_splits: int,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Attention of the leading ``metadata.num_decodes`` rows, written into ``out``; see ``AttentionBackend.attend``.

    Args:
        q: (num_tokens, num_heads, head_dim), last dimension contiguous.
        kv_cache: (2, num_blocks, block_size, num_kv_heads, head_dim), contiguous, dtype of ``q``.
        metadata: of the step, on the device of ``q``; lengths and block tables are read there.
        out: (num_tokens, num_heads, head_dim), contiguous.
        config: ``block_n`` and launch settings.
        num_splits: a power of two, 1 for a single pass.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, num_seqs = kv_cache.shape[3], metadata.num_decodes
    assert q.stride(2) == 1, f"the last dimension of q must be contiguous, its stride is {q.stride(2)}"
    assert out.is_contiguous(), "the output must be contiguous"
    assert kv_cache.is_contiguous(), "the KV cache must be contiguous"
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads for {num_kv_heads} KV heads"
    assert num_splits.bit_count() == 1, f"num_splits must be a power of two: {num_splits}"
    group = num_heads // num_kv_heads
    head_padded = max(16, triton.next_power_of_2(head_dim))
    score_factor, cap_factor = score_factors(scale, softcap)
    partial_out, partial_lse = out, out
    if num_splits > 1:
        partial_out = torch.empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((num_seqs, num_heads, num_splits), dtype=torch.float32, device=q.device)
    paged_decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        q,
        kv_cache[0],
        kv_cache[1],
        out,
        partial_out,
        partial_lse,
        metadata.block_tables,
        metadata.seq_lens,
        q.stride(0),
        q.stride(1),
        metadata.block_tables.stride(0),
        num_kv_heads * head_dim,
        score_factor,
        cap_factor,
        window or 0,
        num_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_PADDED=head_padded,
        BLOCK_N=config.block_n,
        BLOCK_SIZE=metadata.block_size,
        NUM_SPLITS=num_splits,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        EMULATE=is_interpreted(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        join_splits_kernel[(num_seqs, num_heads)](
            partial_out,
            partial_lse,
            out,
            metadata.seq_lens,
            window or 0,
            num_heads,
            HEAD_DIM=head_dim,
            HEAD_PADDED=head_padded,
            BLOCK_N=config.block_n,
            NUM_SPLITS=num_splits,
            HAS_WINDOW=window is not None,
            EMULATE=is_interpreted(),
            num_warps=4,
        )
