"""Prefill attention by batched matrix products, for processors that multiply bf16 in hardware.

torch's SDPA reaches about a sixth of such a processor's bf16 arithmetic, its batched matrix product nearly all of it.
So the scores of a tile of query rows are computed in full (the query heads of one KV head stacked into one matrix),
masked where the tile crosses the diagonal, and normalised; the context needs no special case::

    tile of rows [start, end)     keys 0 ............... context_len + start | ... context_len + end
                                  all visible                                | triangle

The product comes back in bf16, whose 8 bits would blur large scores. Softmax does not change when a number is
subtracted from a whole row, so an estimate of the row's maximum is subtracted inside the product (as one more input
column, accumulated in fp32): the scores that matter are then near zero, where bf16 is fine. The estimate may be wrong;
that costs precision, never correctness.
"""

import torch

from kernels.attention.sdpa import SdpaAttention, sdpa_prefill

# Query rows of one tile: more means fewer calls, and more work thrown away above the diagonal.
_TILE_ROWS = 128
# Scores of one tile stay below this many elements, so that they stay in the cache of the processor.
_MAX_TILE_SCORES = 6 * 2**20
# Prompts up to this many tokens are one small call of SDPA.
_MIN_SEQ_LEN = 128
# Keys at the start of the sequence that estimate a row's maximum besides its own: trained models attend to them most.
_NUM_SINKS = 16


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
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    # (num_kv_heads, group_size, query_len, head_dim), and the same view of the output
    query = (q * scale).view(query_len, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    out = out.view(query_len, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    # (num_kv_heads, seq_len, head_dim + 1): the last column is multiplied with the row's shift
    ones = torch.ones(1, 1, 1, dtype=keys.dtype, device=keys.device).expand(num_kv_heads, keys.shape[0], 1)
    shifted_keys = torch.cat((keys.transpose(0, 1), ones), dim=-1).transpose(1, 2)
    values = values.transpose(0, 1).contiguous()
    triangle = torch.full((_TILE_ROWS, _TILE_ROWS), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)

    start = 0
    while start < query_len:
        seq_len = context_len + start
        num_rows = min(_tile_rows(num_heads, seq_len), query_len - start)
        seq_len += num_rows
        rows = query[:, :, start : start + num_rows].reshape(num_kv_heads, -1, head_dim)
        mask = triangle[:num_rows, :num_rows]
        shift = _estimate_row_maximum(rows, shifted_keys[:, :head_dim, :seq_len], mask)
        scores = torch.bmm(torch.cat((rows, -shift), dim=-1), shifted_keys[:, :, :seq_len])
        scores.view(num_kv_heads, group_size, num_rows, seq_len)[..., seq_len - num_rows :].add_(mask)
        attended = torch.bmm(scores.softmax(dim=-1), values[:, :seq_len])
        out[:, :, start : start + num_rows] = attended.view(num_kv_heads, group_size, num_rows, head_dim)
        start += num_rows


def _estimate_row_maximum(rows: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The largest score of each row among the tile's own keys and the first ones.

    Args:
        rows: (num_kv_heads, group_size * num_rows, head_dim), scaled.
        keys: (num_kv_heads, head_dim, seq_len).
        mask: (num_rows, num_rows), the triangle of the last ``num_rows`` keys.

    Returns:
        (num_kv_heads, group_size * num_rows, 1).
    """
    num_rows = mask.shape[0]
    local = torch.bmm(rows, keys[:, :, -num_rows:])
    local.view(rows.shape[0], -1, num_rows, num_rows).add_(mask)
    maximum = local.amax(dim=-1, keepdim=True)
    num_sinks = min(_NUM_SINKS, keys.shape[2] - num_rows)
    if num_sinks > 0:
        sinks = torch.bmm(rows, keys[:, :, :num_sinks]).amax(dim=-1, keepdim=True)
        maximum = torch.maximum(maximum, sinks)
    return maximum


def _tile_rows(num_heads: int, seq_len: int) -> int:
    """Rows per tile, fewer where each has many scores."""
    return max(16, min(_TILE_ROWS, _MAX_TILE_SCORES // (num_heads * max(seq_len, 1)) // 16 * 16))
