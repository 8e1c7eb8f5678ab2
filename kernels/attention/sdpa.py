"""Attention by ``torch.nn.functional.scaled_dot_product_attention``: no compiler, any device.

The batch is split into what SDPA does well:

- decodes: the cached keys and values of several sequences, padded to one length, are one call. The query heads of one
  KV head are laid out as if they were queries at different positions: they see the same keys, so nothing is repeated,
  and torch streams K and V once for all of them (six times faster in bf16 than ``enable_gqa`` on a CPU).
- a prompt without context: ``is_causal`` on its own rows, nothing is gathered.
- a chunk with context: on a CPU two calls, one over the context without a mask and one causal over the chunk, joined
  by their log-sum-exp, so that no (query, key) mask is ever built; elsewhere rows in blocks with a mask each.
- a window shorter than the sequence: the same groups and rows over the blocks that the window reaches, with a mask.
  Scores with a soft cap, which SDPA does not know, are two plain products with the softmax between them.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from kernels.attention.base import AttentionMetadata, gather_kv

# Decodes of very different lengths are not padded to one: a call may read this many times what it needs.
_MAX_PADDING = 1.5
# Sequences up to this many tokens are cheaper to pad than to give a call of their own.
_MIN_PADDED_LEN = 128
# Rows per masked call where the log-sum-exp of SDPA is not available.
_MASKED_ROWS = 256


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes that share one padded call."""

    rows: torch.Tensor | slice
    """Their rows in the flattened batch."""
    num_seqs: int
    block_ids: torch.Tensor
    """(num_seqs * max_num_blocks,), int64: their block tables, padded, one after the other."""
    max_seq_len: int
    mask: torch.Tensor | None
    """(num_seqs, 1, 1, max_seq_len), added to the scores; ``None`` if all are equally long."""


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """What all layers of a step share."""

    decode_groups: list[DecodeGroup]
    """For full attention."""
    windowed_groups: dict[int, list[DecodeGroup]] = field(default_factory=dict)
    """By window, worked out when the first layer asks."""


class SdpaAttention:
    """The portable backend."""

    name = "sdpa"

    def prepare(self, metadata: AttentionMetadata, *, dtype: torch.dtype) -> AttentionMetadata:
        """Group the decodes by length and build their masks."""
        return replace(metadata, plan=SdpaPlan(_group_decodes(metadata, dtype)))

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
        assert isinstance(metadata.plan, SdpaPlan), "metadata must come from prepare() of this backend"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in _decode_groups(metadata, metadata.plan, window, q.dtype):
            out[group.rows] = _decode(q[group.rows], kv_cache, group, scale, softcap)
        end = metadata.num_decodes
        for index in range(metadata.num_decodes, metadata.num_seqs):
            start, end = end, end + metadata.query_lens[index]
            rows = slice(start, end)
            context_len = metadata.context_lens[index]
            seq_len = context_len + metadata.query_lens[index]
            is_windowed = window is not None and window < seq_len
            keys, values = k[rows], v[rows]
            if context_len:
                # blocks before the window of the first row are not read
                first = max(context_len + 1 - window, 0) // metadata.block_size if window is not None else 0
                context_len -= first * metadata.block_size
                seq_len -= first * metadata.block_size
                keys, values = gather_kv(kv_cache, metadata.block_tables[index, first:], seq_len)
            if is_windowed or softcap is not None:
                masked_prefill(q[rows], keys, values, context_len, scale, out[rows], window=window, softcap=softcap)
            else:
                self._prefill(q[rows], keys, values, context_len, scale, out[rows])
        return out

    def _prefill(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        context_len: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """One chunk: q, out (query_len, num_heads, head_dim); keys, values (context_len + query_len, ...)."""
        sdpa_prefill(q, keys, values, context_len, scale, out)


def masked_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context_len: int,
    scale: float,
    out: torch.Tensor,
    *,
    window: int | None,
    softcap: float | None,
) -> None:
    """One chunk under a window or a soft cap, rows in blocks, each over the keys that its window reaches.

    Args:
        q, out: (query_len, num_heads, head_dim).
        keys, values: (context_len + query_len, num_kv_heads, head_dim).
    """
    query_len, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    by_head = q.view(query_len, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    for start in range(0, query_len, _MASKED_ROWS):
        end = min(start + _MASKED_ROWS, query_len)
        first = 0 if window is None else max(context_len + start + 1 - window, 0)
        last = context_len + end
        positions = torch.arange(context_len + start, last, device=q.device)[:, None]
        key_positions = torch.arange(first, last, device=q.device)
        is_hidden = key_positions > positions
        if window is not None:
            is_hidden |= key_positions <= positions - window
        mask = torch.zeros(is_hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(is_hidden, float("-inf"))
        # the query heads of one KV head are rows of one matrix: nothing is repeated but the mask
        rows = by_head[:, :, start:end].reshape(1, num_kv_heads, -1, head_dim)
        attended = _attention(
            rows, keys[None, :, first:last], values[None, :, first:last], mask.repeat(group_size, 1), scale, softcap
        )
        out[start:end] = attended.view(num_kv_heads, group_size, -1, head_dim).permute(2, 0, 1, 3).flatten(1, 2)


def sdpa_prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context_len: int, scale: float, out: torch.Tensor
) -> None:
    """Causal attention of one chunk after ``context_len`` tokens, written into ``out``.

    Args:
        q, out: (query_len, num_heads, head_dim).
        keys, values: (context_len + query_len, num_kv_heads, head_dim).
    """
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, keys, values))
    if context_len == 0:
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        out.copy_(attended[0].transpose(0, 1))
    elif q.device.type == "cpu":
        out.copy_(_join_context_and_chunk(query, key, value, context_len, scale)[0].transpose(0, 1))
    else:
        out.copy_(_attend_masked(query, key, value, context_len, scale)[0].transpose(0, 1))


def _attend_masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context_len: int, scale: float
) -> torch.Tensor:
    """Rows in blocks, each with the mask of its own keys, so that no mask of all rows and keys is built."""
    parts = []
    for start in range(0, query.shape[2], _MASKED_ROWS):
        end = min(start + _MASKED_ROWS, query.shape[2])
        num_keys = context_len + end
        positions = torch.arange(context_len + start, num_keys, device=query.device)
        mask = torch.arange(num_keys, device=query.device) <= positions[:, None]
        rows, keys, values = query[:, :, start:end], key[:, :, :num_keys], value[:, :, :num_keys]
        parts.append(F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale, enable_gqa=True))
    return torch.cat(parts, dim=2)


def _join_context_and_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context_len: int, scale: float
) -> torch.Tensor:
    """Two softmaxes over disjoint keys, joined: ``o = w * o_context + (1 - w) * o_chunk``.

    ``w`` is the share of the context in the sum of exponentials, ``sigmoid(lse_context - lse_chunk)``.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out_context, lse_context = flash(query, key[:, :, :context_len], value[:, :, :context_len], 0.0, False, scale=scale)
    out_chunk, lse_chunk = flash(query, key[:, :, context_len:], value[:, :, context_len:], 0.0, True, scale=scale)
    weight = torch.sigmoid(lse_context.float() - lse_chunk.float()).unsqueeze(-1)
    joined: torch.Tensor = torch.lerp(out_chunk.float(), out_context.float(), weight)
    return joined


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """SDPA, or its formula where scores are capped. All (batch, num_kv_heads, ..., head_dim); ``mask`` is added."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = softcap * torch.tanh((query @ keys.transpose(-1, -2)).float() * (scale / softcap))
    if mask is not None:
        scores += mask
    return scores.softmax(dim=-1).to(values.dtype) @ values


def _decode(
    q: torch.Tensor, kv_cache: torch.Tensor, group: DecodeGroup, scale: float, softcap: float | None
) -> torch.Tensor:
    """q: (num_seqs, num_heads, head_dim), one new token per sequence. Returns the same shape."""
    num_kv_heads, head_dim = kv_cache.shape[3:]
    kv = kv_cache.index_select(1, group.block_ids)
    keys, values = kv.view(2, group.num_seqs, -1, num_kv_heads, head_dim)[:, :, : group.max_seq_len].transpose(2, 3)
    query = q.view(q.shape[0], num_kv_heads, -1, head_dim)
    return _attention(query, keys, values, group.mask, scale, softcap).flatten(1, 2)


def _decode_groups(
    metadata: AttentionMetadata, plan: SdpaPlan, window: int | None, dtype: torch.dtype
) -> list[DecodeGroup]:
    """The groups of full attention where the window covers every sequence, else those of the window."""
    longest = max(metadata.context_lens[: metadata.num_decodes], default=0) + 1
    if window is None or window >= longest:
        return plan.decode_groups
    if window not in plan.windowed_groups:
        plan.windowed_groups[window] = _group_decodes(metadata, dtype, window)
    return plan.windowed_groups[window]


def _group_decodes(metadata: AttentionMetadata, dtype: torch.dtype, window: int | None = None) -> list[DecodeGroup]:
    """Cut the decodes, longest first, into groups whose padding stays small."""
    firsts = [_first_block(context_len, window, metadata.block_size) for context_len in metadata.context_lens]
    lens = [
        context_len + 1 - first * metadata.block_size
        for context_len, first in zip(metadata.context_lens, firsts, strict=True)
    ][: metadata.num_decodes]
    order = sorted(range(len(lens)), key=lambda index: -lens[index])
    groups: list[list[int]] = []
    num_needed = 0
    for index in order:
        if groups:
            max_len, num_padded = lens[groups[-1][0]], lens[groups[-1][0]] * (len(groups[-1]) + 1)
            if max_len <= _MIN_PADDED_LEN or num_padded <= _MAX_PADDING * (num_needed + lens[index]):
                groups[-1].append(index)
                num_needed += lens[index]
                continue
        groups.append([index])
        num_needed = lens[index]
    return [_make_group(metadata, sorted(members), lens, firsts, dtype, window) for members in groups]


def _first_block(context_len: int, window: int | None, block_size: int) -> int:
    """The first block that the window of a token after ``context_len`` others reaches."""
    return 0 if window is None else max(context_len + 1 - window, 0) // block_size


def _make_group(
    metadata: AttentionMetadata,
    members: list[int],
    all_lens: list[int],
    firsts: list[int],
    dtype: torch.dtype,
    window: int | None,
) -> DecodeGroup:
    """``all_lens`` counts the keys of each sequence from its block number ``firsts`` on."""
    device = metadata.block_tables.device
    lens = [all_lens[index] for index in members]
    max_seq_len = max(lens)
    num_blocks = -(-max_seq_len // metadata.block_size)
    is_everything = len(members) == metadata.num_decodes
    rows = slice(0, metadata.num_decodes) if is_everything else torch.tensor(members, device=device)
    if window is None:
        block_ids = metadata.block_tables[rows, :num_blocks]
    else:
        columns = torch.tensor([firsts[index] for index in members], device=device)[:, None]
        columns = columns + torch.arange(num_blocks, device=device)
        # a shorter sequence of the group is padded with whatever its last column holds, and masked
        columns.clamp_(max=metadata.block_tables.shape[1] - 1)
        block_ids = metadata.block_tables[rows].gather(1, columns)
    mask = None
    if min(lens) < max_seq_len or (window is not None and max_seq_len > window):
        positions = torch.arange(max_seq_len, device=device)
        ends = torch.tensor(lens, device=device)[:, None]
        is_hidden = positions >= ends
        if window is not None:
            is_hidden |= positions < ends - window
        mask = torch.zeros(len(lens), 1, 1, max_seq_len, dtype=dtype, device=device)
        mask.masked_fill_(is_hidden[:, None, None], float("-inf"))
    return DecodeGroup(
        rows=rows,
        num_seqs=len(members),
        block_ids=block_ids.flatten().long(),
        max_seq_len=max_seq_len,
        mask=mask,
    )
