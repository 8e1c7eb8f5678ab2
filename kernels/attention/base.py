"""The interface of attention over a paged KV cache: one call for a mixed batch of prefill chunks and decodes.

All new tokens of a step lie flattened in one tensor, sequence after sequence. A sequence has ``context_len`` tokens in
its blocks already and adds ``query_len`` new ones, which attend to the context and, causally, to each other::

    three sequences: two decodes (query_len 1), one chunk of 4 tokens after 3 cached ones; block_size 4

    q rows          0 | 1 | 2 3 4 5              cu_seqlens_q  [0, 1, 2, 6]        seq_lens  [6, 2, 7]
    context_lens    5 | 1 | 3                    num_decodes   2
    block_tables    [7, 2], [4, 0], [9, 3]       (shorter rows are padded with 0, never read beyond seq_len)
    slot_mapping    slot of each new token: block_id * block_size + position % block_size

    mask of the chunk     keys  0 1 2 | 3 4 5 6      the causal diagonal ends in the bottom right corner
                   row 2        x x x | x
                   row 3        x x x | x x
                   row 4        x x x | x x x
                   row 5        x x x | x x x x
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step are, for all layers alike. Travels with the forward pass."""

    query_lens: tuple[int, ...]
    """New tokens per sequence, each at least 1. On the host, so that no backend has to ask the device."""
    context_lens: tuple[int, ...]
    """Tokens per sequence whose keys and values are in its blocks already."""
    num_decodes: int
    """The leading sequences with exactly one new token; the caller sorts them to the front."""
    cu_seqlens_q: torch.Tensor
    """(num_seqs + 1,), int32: first row of each sequence in the flattened tensors."""
    seq_lens: torch.Tensor
    """(num_seqs,), int32: context and new tokens together."""
    block_tables: torch.Tensor
    """(num_seqs, max_num_blocks), int32, padded with 0."""
    slot_mapping: torch.Tensor
    """(num_tokens,), int64."""
    block_size: int
    plan: object = None
    """What a backend prepared for this step; opaque to everyone else."""

    @property
    def num_seqs(self) -> int:
        """Sequences of this step."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """New tokens of this step."""
        return self.slot_mapping.shape[0]

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "AttentionMetadata":
        """Lay out one step; all arguments have one entry per sequence, in the order of the flattened rows."""
        seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        rows, slots = [], []
        for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
            assert query_len > 0, "a sequence without new tokens has no place in a step"
            assert len(blocks) * block_size >= seq_len, f"{len(blocks)} blocks of {block_size} for {seq_len} tokens"
            row = torch.tensor(blocks[: -(-seq_len // block_size)], dtype=torch.int64)
            positions = torch.arange(seq_len - query_len, seq_len)
            rows.append(row)
            slots.append(row[positions // block_size] * block_size + positions % block_size)
        num_decodes = next((index for index, query_len in enumerate(query_lens) if query_len != 1), len(query_lens))
        cu_seqlens_q = torch.zeros(len(seq_lens) + 1, dtype=torch.int32)
        cu_seqlens_q[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
        return cls(
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            num_decodes=num_decodes,
            cu_seqlens_q=cu_seqlens_q.to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_tables=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device, torch.int32),
            slot_mapping=torch.cat(slots).to(device),
            block_size=block_size,
        )


class AttentionBackend(Protocol):
    """One way to compute attention. Has no state of its own: what belongs to a step lives in the metadata."""

    name: str

    def prepare(self, metadata: AttentionMetadata, *, dtype: torch.dtype) -> AttentionMetadata:
        """Do once what all layers of the step can share (index tensors, masks).

        Returns:
            The metadata to pass to ``attend``, with ``plan`` filled in if this backend uses one.
        """
        ...

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
        """Attention of one layer for the whole batch.

        Args:
            q: (num_tokens, num_heads, head_dim); rows of the batch, any strides but a contiguous last dimension.
            k, v: (num_tokens, num_kv_heads, head_dim), ``num_heads`` a multiple of ``num_kv_heads``: query head ``h``
                reads KV head ``h // (num_heads // num_kv_heads)``. Already stored in ``kv_cache``; given again so
                that a prompt without context need not be gathered from its blocks.
            kv_cache: (2, num_blocks, block_size, num_kv_heads, head_dim), dtype of ``q``.
            metadata: of this step, from ``prepare``.
            scale: factor of the scores, usually ``head_dim ** -0.5``.
            window: keys that a query sees at most, its own included: sliding attention; ``None`` is all before it.
            softcap: scaled scores become ``softcap * tanh(score / softcap)``; ``None`` leaves them.

        Returns:
            (num_tokens, num_heads, head_dim), dtype of ``q``, contiguous.
        """
        ...


def gather_kv(kv_cache: torch.Tensor, block_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Keys and values of the first ``num_tokens`` tokens of one sequence.

    Args:
        kv_cache: (2, num_blocks, block_size, num_kv_heads, head_dim).
        block_ids: (num_blocks_of_sequence,), int32 or int64, covering at least ``num_tokens`` tokens.

    Returns:
        (2, num_tokens, num_kv_heads, head_dim), a copy.
    """
    return kv_cache.index_select(1, block_ids).flatten(1, 2)[:, :num_tokens]
