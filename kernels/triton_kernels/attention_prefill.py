"""Prefill attention over the paged cache: causal after a context, grouped heads, window, soft cap.

The query heads of one KV head are rows of one tile, so that keys and values are read once for all of them::

    row of the tile     0      1      2      3      4      5   ...       GROUP = 3
    token               first  first  first  +1     +1     +1
    head                0      1      2      0      1      2             rows beyond BLOCK_Q * GROUP stay empty

    keys of a tile      | masked: the window begins | every row sees all | masked: the diagonal |
                        lo                          full_from            full_to                last

Tiles are listed on the host, those with the most keys first, so that no long one is left over at the end.
"""

import torch
import triton
import triton.language as tl

from kernels.attention.base import AttentionMetadata
from kernels.triton_kernels.attention_tile import attend_tile, head_pointers, score_factors, start_of_tile
from kernels.triton_kernels.numerics import narrow
from kernels.triton_kernels.runtime import is_interpreted
from kernels.triton_kernels.tuning import KernelConfig


@triton.jit
def paged_prefill_kernel(
    q,
    key_cache,
    value_cache,
    out,
    tiles,
    block_tables,
    cu_seqlens_q,
    seq_lens,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    table_stride,
    slot_stride,
    score_factor,
    cap_factor,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One tile of query rows and one KV head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    first_row = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first_row
    seq_len = tl.load(seq_lens + seq)
    context_len = seq_len - query_len

    rows = tl.arange(0, BLOCK_M)
    tokens = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, HEAD_PADDED)
    is_row = (rows < BLOCK_Q * GROUP) & (tokens < query_len)
    is_element = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    token_rows = (first_row + tokens).to(tl.int64)
    q_offsets = token_rows[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    query = tl.load(q + q_offsets, mask=is_element, other=0.0)
    positions = context_len + tokens

    last = tl.minimum(context_len + first + BLOCK_Q, seq_len)
    full_to = start_of_tile(context_len + first + 1, BLOCK_N)
    table, keys_of_head, values_of_head = head_pointers(
        block_tables, key_cache, value_cache, seq, kv_head, table_stride, HEAD_DIM
    )
    acc = tl.zeros([BLOCK_M, HEAD_PADDED], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)

    full_from = 0
    if HAS_WINDOW:
        lo = start_of_tile(context_len + first - window + 1, BLOCK_N)
        full_from = start_of_tile(last - window + BLOCK_N - 1, BLOCK_N)
        full_from = tl.minimum(full_from, tl.maximum(full_to, lo))
        for key_start in range(lo, full_from, BLOCK_N):
            acc, row_sum, row_max = attend_tile(
                acc, row_sum, row_max, query, key_start, last, positions, keys_of_head, values_of_head, table,
                slot_stride, score_factor, cap_factor, window,
                HEAD_DIM, HEAD_PADDED, BLOCK_N, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, True, EMULATE,
            )  # fmt: skip
    for key_start in range(full_from, full_to, BLOCK_N):
        acc, row_sum, row_max = attend_tile(
            acc, row_sum, row_max, query, key_start, last, positions, keys_of_head, values_of_head, table,
            slot_stride, score_factor, cap_factor, window,
            HEAD_DIM, HEAD_PADDED, BLOCK_N, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, False, EMULATE,
        )  # fmt: skip
    for key_start in range(tl.maximum(full_to, full_from), last, BLOCK_N):
        acc, row_sum, row_max = attend_tile(
            acc, row_sum, row_max, query, key_start, last, positions, keys_of_head, values_of_head, table,
            slot_stride, score_factor, cap_factor, window,
            HEAD_DIM, HEAD_PADDED, BLOCK_N, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, True, EMULATE,
        )  # fmt: skip

    # empty rows may have seen no key
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    out_offsets = token_rows[:, None] * out_token_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + out_offsets, narrow(acc / row_sum[:, None], out.dtype.element_ty, EMULATE), mask=is_element)


def query_block(config: KernelConfig, group: int) -> int:
    """Tokens of one tile when ``group`` query heads share it."""
    return _rows_of(config, group) // group


def list_tiles(metadata: AttentionMetadata, tokens_per_tile: int) -> torch.Tensor:
    """The tiles of all sequences after the leading decodes, those with the most keys first.

    Returns:
        (num_tiles, 2), int32: the sequence, and the first of its new tokens in the tile.
    """
    tiles = [
        (metadata.context_lens[seq] + first, seq, first)
        for seq in range(metadata.num_decodes, metadata.num_seqs)
        for first in range(0, metadata.query_lens[seq], tokens_per_tile)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    return torch.tensor([tile[1:] for tile in tiles], dtype=torch.int32, device=metadata.seq_lens.device)


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    config: KernelConfig,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Attention of the rows that ``tiles`` cover, written into ``out``; see ``AttentionBackend.attend``.

    Args:
        q: (num_tokens, num_heads, head_dim), last dimension contiguous.
        kv_cache: (2, num_blocks, block_size, num_kv_heads, head_dim), contiguous, dtype of ``q``.
        metadata: of the step, on the device of ``q``.
        tiles: from ``list_tiles`` with ``query_block(config, group)``.
        out: (num_tokens, num_heads, head_dim), contiguous.
        config: sizes of the tile.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_cache.shape[3]
    assert q.stride(2) == 1, f"the last dimension of q must be contiguous, its stride is {q.stride(2)}"
    assert out.is_contiguous(), "the output must be contiguous"
    assert kv_cache.is_contiguous(), "the KV cache must be contiguous"
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads for {num_kv_heads} KV heads"
    group = num_heads // num_kv_heads
    score_factor, cap_factor = score_factors(scale, softcap)
    paged_prefill_kernel[(tiles.shape[0], num_kv_heads)](
        q,
        kv_cache[0],
        kv_cache[1],
        out,
        tiles,
        metadata.block_tables,
        metadata.cu_seqlens_q,
        metadata.seq_lens,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        metadata.block_tables.stride(0),
        num_kv_heads * head_dim,
        score_factor,
        cap_factor,
        window or 0,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PADDED=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=_rows_of(config, group),
        BLOCK_N=config.block_n,
        BLOCK_SIZE=metadata.block_size,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        EMULATE=is_interpreted(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _rows_of(config: KernelConfig, group: int) -> int:
    rows: int = max(config.block_m, triton.next_power_of_2(group))
    return rows
