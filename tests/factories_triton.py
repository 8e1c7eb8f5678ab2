"""What the Triton tests share. Without a GPU the interpreter runs the kernels, as is decided here on import."""

import os
from collections.abc import Sequence

import pytest
import torch
from factories_model import AttentionCase

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed")

from kernels.attention.reference import attention_ref
from kernels.attention.triton import TritonAttention
from kernels.triton_kernels.runtime import is_interpreted

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")
EXACT = {"rtol": 1e-5, "atol": 1e-5}


class TritonCase(AttentionCase):
    """A batch on the device of the tests; what no sequence has stored is NaN."""

    def __init__(self, query_lens: Sequence[int], context_lens: Sequence[int], **sizes: object) -> None:
        super().__init__(query_lens, context_lens, **sizes)  # type: ignore[arg-type]
        size = self.metadata.block_size
        is_used = torch.zeros(self.kv_cache.shape[1] * size, dtype=torch.bool)
        for row, seq_len in zip(self.metadata.block_tables.long(), self.metadata.seq_lens.tolist(), strict=True):
            positions = torch.arange(seq_len)
            is_used[row[positions // size] * size + positions % size] = True
        self.kv_cache.flatten(1, 2)[:, ~is_used] = float("nan")
        self.q, self.k, self.v = self.q.to(DEVICE), self.k.to(DEVICE), self.v.to(DEVICE)
        self.kv_cache = self.kv_cache.to(DEVICE)
        blocks = [
            row[: -(-seq_len // size)]
            for row, seq_len in zip(self.metadata.block_tables.tolist(), self.metadata.seq_lens.tolist(), strict=True)
        ]
        self.metadata = type(self.metadata).build(query_lens, context_lens, blocks, size, device=DEVICE)

    def expected(self, *, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        """By the reference, fp32."""
        return attention_ref(self.q, self.kv_cache, self.metadata, self.scale, window=window, softcap=softcap)

    def attend(self, *, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        """By the Triton backend."""
        backend = TritonAttention()
        metadata = backend.prepare(self.metadata, dtype=self.q.dtype)
        return backend.attend(
            self.q, self.k, self.v, self.kv_cache, metadata, self.scale, window=window, softcap=softcap
        )


def plain_attention(case: AttentionCase) -> torch.Tensor:
    """Matrix product, softmax, matrix product in the dtype of the case: what its rounding is measured by."""
    outputs, row = [], 0
    lens = zip(case.metadata.query_lens, case.metadata.context_lens, strict=True)
    for index, (query_len, context_len) in enumerate(lens):
        blocks = case.metadata.block_tables[index].long()
        keys, values = case.kv_cache[:, blocks].flatten(1, 2)[:, : context_len + query_len].transpose(1, 2)
        query = case.q[row : row + query_len].transpose(0, 1)
        group_size = query.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(group_size, 0), values.repeat_interleave(group_size, 0)
        shape = (query_len, context_len + query_len)
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(context_len)
        scores = (query @ keys.transpose(1, 2) * case.scale).masked_fill(~mask, float("-inf"))
        outputs.append((scores.softmax(dim=-1) @ values).transpose(0, 1))
        row += query_len
    return torch.cat(outputs)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference; NaN stays NaN, which no limit holds."""
    return float((actual.float() - expected.float()).abs().max())
