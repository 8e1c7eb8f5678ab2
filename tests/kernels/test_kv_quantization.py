"""Keys and values in 8 bits: rows round trip, and attention over them is attention over what they round to."""

import pytest
import torch
from factories_kernels import get_backend
from factories_model import AttentionCase

from kernels.attention.quantized import QuantizedKVAttention
from kernels.attention.reference import attention_ref
from kernels.kv_quantization import (
    KVFormat,
    dequantize_kv,
    is_quantized_kv,
    kv_row_size,
    kv_storage_dtype,
    quantize_kv,
    store_quantized_kv,
)

FORMATS: tuple[KVFormat, ...] = ("int8", "fp8")
RELATIVE = {"int8": 0.5 / 127, "fp8": 1 / 16}
"""Largest error as a share: of the row's largest element (int8), of the element itself (fp8)."""


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_rows_come_back_within_the_format(kv_format: KVFormat, dtype: torch.dtype, head_dim: int) -> None:
    x = (torch.randn(50, 3, head_dim, generator=torch.Generator().manual_seed(0)) * 7).to(dtype)
    rows = quantize_kv(x, kv_storage_dtype(kv_format))
    assert (rows.shape, rows.element_size()) == ((50, 3, kv_row_size(head_dim)), 1)
    error = (dequantize_kv(rows, torch.float32) - x.float()).abs()
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    scale = largest if kv_format == "int8" else torch.maximum(x.float().abs(), largest / 448 * 2.0**-6)
    assert (error <= 1.001 * RELATIVE[kv_format] * scale).all()
    assert dequantize_kv(rows, dtype).dtype == dtype


@pytest.mark.parametrize("kv_format", FORMATS)
def test_zeros_and_fresh_blocks_are_zero(kv_format: KVFormat) -> None:
    storage = kv_storage_dtype(kv_format)
    assert dequantize_kv(quantize_kv(torch.zeros(2, 8), storage), torch.float32).count_nonzero() == 0
    assert dequantize_kv(torch.zeros(2, 12, dtype=storage), torch.float32).count_nonzero() == 0


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_visible(kv_format: KVFormat, bad: float) -> None:
    x = torch.ones(2, 8)
    x[1, 3] = bad
    back = dequantize_kv(quantize_kv(x, kv_storage_dtype(kv_format)), torch.float32)
    assert back[0].isfinite().all()
    assert not back[1].isfinite().any()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("backend", ["reference", "sdpa", "tiled", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "window", "softcap"),
    [
        ([1, 1, 1], [0, 17, 40], None, None),
        ([20], [0], None, None),
        ([1, 5, 33], [30, 16, 0], None, None),
        ([1, 40], [50, 20], 24, 30.0),
    ],
)
def test_attention_is_that_over_the_rounded_keys_and_values(
    kv_format: KVFormat,
    backend: str,
    dtype: torch.dtype,
    query_lens: list[int],
    context_lens: list[int],
    window: int | None,
    softcap: float | None,
) -> None:
    case = AttentionCase(query_lens, context_lens, dtype=dtype)
    cache = quantize_kv(case.kv_cache, kv_storage_dtype(kv_format))
    store_quantized_kv(case.k, case.v, cache, case.metadata.slot_mapping)
    attention = QuantizedKVAttention(get_backend(backend, dtype), kv_format)
    metadata = attention.prepare(case.metadata, dtype=dtype)
    options = {"window": window, "softcap": softcap}
    actual = attention.attend(case.q, case.k, case.v, cache, metadata, case.scale, **options)  # type: ignore[arg-type]
    rounded = dequantize_kv(cache, dtype)
    expected = attention_ref(case.q, rounded, case.metadata, case.scale, **options)  # type: ignore[arg-type]
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


def test_storing_touches_only_its_slots() -> None:
    cache = torch.zeros(2, 3, 4, 1, 12, dtype=torch.int8)
    store_quantized_kv(torch.ones(2, 1, 8), torch.ones(2, 1, 8), cache, torch.tensor([5, 11]))
    assert is_quantized_kv(cache)
    is_touched = cache.flatten(1, 2).ne(0).any(dim=-1).squeeze(-1)
    assert is_touched.nonzero()[:, 1].tolist() == [5, 11, 5, 11]


def test_heads_without_room_for_an_aligned_scale_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        kv_row_size(6)
