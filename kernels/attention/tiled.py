"""Prefill attention by batched matrix products, for processors that multiply bf16 in hardware.

torch's SDPA reaches about a sixth of such a processor's bf16 arithmetic, its batched matrix product nearly all of it.
So the scores of a tile of query rows are computed in full (the query heads of one KV head stacked into one matrix),
masked where the tile crosses the diagonal, and normalised; the context needs no special case::

    tile of rows [start, end)     keys 0 ............... context_len + start | ... context_len + end
                                  all visible                                | triangle

The product comes back in bf16, whose 8 bits would blur large scores. Softmax does not change when a number is
subtracted from a whole row, so each row is shifted inside the product (by one more input column, accumulated in fp32)
by its largest score among the first keys, to which trained models attend most: the scores that matter come out near
zero, where bf16 is fine. A bad guess of the maximum costs precision, never correctness, so it need not even be causal.
"""

import torch

from kernels.attention.sdpa import SdpaAttention, sdpa_prefill

# Query rows of one tile: more means fewer calls, and more work thrown away above the diagonal.
_TILE_ROWS = 128
# Scores of one tile stay below this many elements, so that they stay in the cache of the processor.
_MAX_TILE_SCORES = 6 * 2**20
# Prompts up to this many tokens are one small call of SDPA.
_MIN_SEQ_LEN = 128
# Keys at the start of the sequence that a row's maximum is guessed from.
_NUM_FIRST_KEYS = 16


class TiledAttention(SdpaAttention):
    """Decodes as SDPA does them, prefill tile by tile."""

    name = "tiled"

    def _prefill(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        context_len: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        if keys.shape[0] <= _MIN_SEQ_LEN:
            sdpa_prefill(q, keys, values, context_len, scale, out)
        else:
            tiled_prefill(q, keys, values, context_len, scale, out)


def tiled_prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context_len: int, scale: float, out: torch.Tensor
) -> None:
    """Causal attention of one chunk after ``context_len`` tokens, written into ``out``.

    Args:
        q, out: (query_len, num_heads, head_dim).
        keys, values: (context_len + query_len, num_kv_heads, head_dim).
    """
    query_len, num_heads, head_dim = q.shape
    seq_len, num_kv_heads = keys.shape[:2]
    group_size = num_heads // num_kv_heads
    by_head = (query_len, num_kv_heads, group_size, head_dim)
    # (num_kv_heads, head_dim + 1, seq_len): the last row is multiplied with the shift of the query
    ones = keys.new_ones(num_kv_heads, seq_len, 1)
    shifted_keys = torch.cat((keys.transpose(0, 1), ones), dim=-1).transpose(1, 2)
    values = values.transpose(0, 1).contiguous()
    # (num_kv_heads, group_size, query_len, head_dim + 1)
    query = (q * scale).view(by_head).permute(1, 2, 0, 3)
    first_keys = shifted_keys[:, None, :head_dim, :_NUM_FIRST_KEYS]
    query = torch.cat((query, -(query @ first_keys).amax(dim=-1, keepdim=True)), dim=-1)
    out = out.view(by_head).permute(1, 2, 0, 3)
    triangle = torch.full((_TILE_ROWS, _TILE_ROWS), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)

    start = 0
    while start < query_len:
        num_rows = min(_tile_rows(num_heads, context_len + start), query_len - start)
        end = start + num_rows
        num_keys = context_len + end
        rows = query[:, :, start:end].reshape(num_kv_heads, -1, head_dim + 1)
        scores = torch.bmm(rows, shifted_keys[:, :, :num_keys])
        on_diagonal = scores.view(num_kv_heads, group_size, num_rows, num_keys)[..., -num_rows:]
        on_diagonal += triangle[:num_rows, :num_rows]
        attended = torch.bmm(scores.softmax(dim=-1), values[:, :num_keys])
        out[:, :, start:end] = attended.view(num_kv_heads, group_size, num_rows, head_dim)
        start = end


def _tile_rows(num_heads: int, seq_len: int) -> int:
    """Rows per tile, fewer where each has many scores."""
    return max(16, min(_TILE_ROWS, _MAX_TILE_SCORES // (num_heads * max(seq_len, 1)) // 16 * 16))
