"""What our flash backend hands to the package, computed by the formula here, and the package itself on a GPU."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from factories_model import AttentionCase

from kernels.attention import get_attention_backend
from kernels.attention.flash import FlashAttention, FlashPackage
from kernels.attention.reference import ReferenceAttention, attention_ref
from kernels.capabilities import probe_capabilities

BATCHES = {
    "decodes": ((1, 1), (5, 40)),
    "prompts": ((3, 40), (0, 0)),
    "mixed": ((1, 1, 17, 40, 5), (0, 33, 0, 100, 16)),
}


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window_size: Any, softcap: float
) -> torch.Tensor:
    """Causal attention that ends in the bottom right corner; q, k, v (len, heads, head_dim)."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    rows = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    columns = torch.arange(k.shape[0])
    is_hidden = columns > rows
    if window_size[0] not in (None, -1):
        is_hidden |= columns < rows - window_size[0]
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """As the package documents ``flash_attn_varlen_func``."""
    starts_q, starts_k = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    assert options["causal"]
    assert starts_q[-1] == q.shape[0]
    assert starts_k[-1] == k.shape[0]
    assert options["max_seqlen_q"] == max(b - a for a, b in pairwise(starts_q))
    assert options["max_seqlen_k"] == max(b - a for a, b in pairwise(starts_k))
    parts = []
    for index in range(len(starts_q) - 1):
        rows = slice(starts_q[index], starts_q[index + 1])
        keys = slice(starts_k[index], starts_k[index + 1])
        arguments = options["softmax_scale"], options["window_size"], options["softcap"]
        parts.append(_attend(q[rows], k[keys], v[keys], *arguments))
    return torch.cat(parts)


def _with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any) -> torch.Tensor:
    """As version 3 documents ``flash_attn_with_kvcache``."""
    parts = []
    for row, table, seq_len in zip(q, options["page_table"].long(), options["cache_seqlens"].tolist(), strict=True):
        keys, values = (cache[table].flatten(0, 1)[:seq_len] for cache in (k_cache, v_cache))
        arguments = options["softmax_scale"], options["window_size"], options["softcap"]
        parts.append(_attend(row, keys, values, *arguments))
    return torch.stack(parts)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (16, None), (None, 2.0)])
def test_what_the_package_is_given_makes_the_reference(
    batch: str, version: int, window: int | None, softcap: float | None
) -> None:
    case = AttentionCase(*BATCHES[batch], num_heads=6, num_kv_heads=2)

    def varlen(*args: torch.Tensor, **options: Any) -> Any:
        attended = _varlen(*args, **options)
        return (attended, None) if version == 4 else attended

    package = FlashPackage(version, varlen, _with_kvcache if version == 3 else None)
    backend = FlashAttention(package, ReferenceAttention())
    metadata = backend.prepare(case.metadata, dtype=torch.float32)
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    actual = backend.attend(case.q, case.k, case.v, case.kv_cache, metadata, case.scale, **options)
    expected = attention_ref(case.q, case.kv_cache, case.metadata, case.scale, **options)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [36, 264])
def test_heads_that_the_package_has_no_kernel_for_go_to_the_paged_backend(head_dim: int) -> None:
    case = AttentionCase(*BATCHES["mixed"], head_dim=head_dim)
    backend = FlashAttention(FlashPackage(2, lambda: None, None), ReferenceAttention())
    metadata = backend.prepare(case.metadata, dtype=torch.float32)
    actual = backend.attend(case.q, case.k, case.v, case.kv_cache, metadata, case.scale)
    assert torch.equal(actual, attention_ref(case.q, case.kv_cache, case.metadata, case.scale))


def test_flash_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"computes bf16 and fp16 on a GPU, not torch.float32 on cpu"):
        get_attention_backend("flash", dtype=torch.float32)
    if probe_capabilities().flash_attn_version is None:
        with pytest.raises(ValueError, match="no flash-attn package"):
            get_attention_backend("flash", device="cuda", dtype=torch.bfloat16)


def test_triton_on_a_cpu_is_refused_without_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"not torch.float32 on cpu; on a CPU it needs TRITON_INTERPRET=1"):
        get_attention_backend("triton", dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(probe_capabilities().flash_attn_version is None, reason="there is no flash-attn for a GPU here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("window", [None, 16])
def test_package_agrees_with_the_reference(dtype: torch.dtype, batch: str, window: int | None) -> None:
    case = AttentionCase(*BATCHES[batch], num_heads=6, num_kv_heads=2, dtype=dtype)
    blocks = case.metadata.block_tables.tolist()
    lens = case.metadata.query_lens, case.metadata.context_lens
    metadata = type(case.metadata).build(*lens, blocks, case.metadata.block_size, device="cuda")
    q, k, v, cache = (tensor.cuda() for tensor in (case.q, case.k, case.v, case.kv_cache))
    backend = get_attention_backend("flash", device="cuda", dtype=dtype)
    actual = backend.attend(q, k, v, cache, backend.prepare(metadata, dtype=dtype), case.scale, window=window)
    expected = attention_ref(case.q, case.kv_cache, case.metadata, case.scale, window=window)
    assert (actual.cpu().float() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
