"""The small Triton kernels and the quantized product against their formulas, and a model that computes with all."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from factories_model import generate, make_runner, save_llama
from factories_triton import DEVICE, error

from kernels.linear import INT8_GROUP, linear, linear_add_, linear_int8_ref, pack_weight
from kernels.quantized_weight import QuantizedKind, QuantizedWeight
from kernels.rms_norm import add_rms_norm_, rms_norm, rms_norm_ref
from kernels.rotary import rotary_tables
from kernels.rotary_store import rotary_store, rotary_store_ref
from kernels.silu_mul import silu_mul, silu_mul_ref
from kernels.triton_kernels.quantized_linear import can_quantize, quantize_rows
from kernels.triton_kernels.runtime import using_triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def _rounding(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Twice the error of a result that is rounded once."""
    return 2 * float(torch.finfo(dtype).eps * expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 1000), (5, 3, 128)])
def test_rms_norm_agrees_with_the_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = _rand(*shape[:-1], shape[-1] + 9, dtype=dtype)[..., : shape[-1]]
    weight = _rand(shape[-1], dtype=dtype)
    before = x.clone()
    with using_triton(True):
        actual = rms_norm(x, weight, 1e-5)
    expected = rms_norm_ref(before, weight, 1e-5)
    assert torch.equal(x, before)
    assert (actual.shape, actual.dtype) == (x.shape, dtype)
    assert error(actual, expected) <= _rounding(expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_stores_the_sum_and_normalises_what_it_stored(dtype: torch.dtype) -> None:
    residual, delta, weight = _rand(5, 200, dtype=dtype), _rand(5, 240, dtype=dtype)[:, :200], _rand(200, dtype=dtype)
    total = residual + delta
    with using_triton(True):
        actual = add_rms_norm_(residual, delta, weight, 1e-5)
    assert torch.equal(residual, total)
    expected = rms_norm_ref(total, weight, 1e-5)
    assert error(actual, expected) <= _rounding(expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 6), (1, 1), (3, 1536), (2, 1030)])
def test_silu_mul_agrees_with_the_formula(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = 5 * _rand(shape[0], 2 * shape[1] + 3, dtype=dtype)[:, : 2 * shape[1]]
    with using_triton(True):
        actual = silu_mul(gate_up)
    assert (actual.shape, actual.dtype) == (shape, dtype)
    if actual.numel():
        expected = silu_mul_ref(gate_up)
        assert error(actual, expected) <= _rounding(expected, dtype)


def test_silu_mul_of_extreme_gates_is_finite() -> None:
    gate_up = torch.tensor([[1e4, -1e4, 0.0, 1.0, 1.0, 1.0]], device=DEVICE)
    with using_triton(True):
        assert silu_mul(gate_up).tolist() == [[1e4, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (2, 1, 6)])
def test_rotary_store_turns_stores_and_leaves_the_rest(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    qkv = _rand(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    cache = torch.full((2, 3, 4, num_kv_heads, head_dim), float("nan"), device=DEVICE, dtype=dtype)
    positions = torch.tensor([0, 17, 4000, 5, 6], device=DEVICE)
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    slots = torch.tensor([3, 8, 0, 11, -1], device=DEVICE)
    expected_cache, stored = cache.clone(), slots >= 0
    expected_q, expected_k = rotary_store_ref(
        q[stored], k[stored], v[stored], positions[stored], inv_freq, expected_cache, slots[stored]
    )
    tables = rotary_tables(positions, inv_freq, dtype)
    values = v.clone()
    with using_triton(True):
        turned_q, turned_k = rotary_store(q, k, v, tables, cache, slots)
    assert error(turned_q[stored], expected_q) <= _rounding(expected_q, dtype) + 1e-3 * (dtype == torch.float32)
    assert error(turned_k[stored], expected_k) <= _rounding(expected_k, dtype) + 1e-3 * (dtype == torch.float32)
    rows = cache.flatten(1, 2)
    assert torch.equal(rows[0, slots[stored]], turned_k[stored])
    assert torch.equal(rows[1, slots[stored]], values[stored])
    is_free = torch.ones(12, dtype=torch.bool, device=DEVICE)
    is_free[slots[stored]] = False
    assert rows[:, is_free].isnan().all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_rows_are_the_nearest_of_their_grid(kind: QuantizedKind, dtype: torch.dtype) -> None:
    x = _rand(6, 300, dtype=dtype) * torch.tensor([1e-3, 1, 50, 1, 1, 0], device=DEVICE, dtype=dtype)[:, None]
    x[3, 7:] *= 1e-4  # below the normal numbers of fp8
    quantized, scales = quantize_rows(x, kind)
    largest = x.float().abs().amax(dim=1)
    torch.testing.assert_close(scales, largest / (127 if kind == "int8" else 448))
    assert not quantized[5].float().any()
    scaled = x[:5].float() / scales[:5, None]
    nearest = scaled.round() if kind == "int8" else scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    # a number in the middle of two may go either way
    is_equal = quantized[:5].float() == nearest
    assert is_equal.float().mean() > 0.99
    step = torch.exp2(scaled.abs().clamp(min=2.0**-6).log2().floor() - 3) if kind == "fp8" else torch.ones_like(scaled)
    assert ((quantized[:5].float() - scaled).abs() <= 0.501 * step).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "in_features", "out_features"), [(0, 32, 16), (1, 64, 48), (7, 100, 33), (20, 32, 70)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_quantized_product_is_the_product_of_the_rounded_sides(
    kind: QuantizedKind, dtype: torch.dtype, num_tokens: int, in_features: int, out_features: int, has_bias: bool
) -> None:
    if not can_quantize(kind, DEVICE):
        pytest.skip(f"this GPU has no {kind}")
    x, weight = _rand(num_tokens, in_features, dtype=dtype), _rand(out_features, in_features, dtype=dtype)
    bias = _rand(out_features, dtype=dtype) if has_bias else None
    with using_triton(True):
        packed = pack_weight(weight, kind)
    assert isinstance(packed, QuantizedWeight)
    actual = linear(x, packed, bias)
    assert (actual.shape, actual.dtype) == ((num_tokens, out_features), dtype)
    residual = _rand(num_tokens, out_features, dtype=dtype)
    before = residual.clone()
    assert linear_add_(residual, x, packed, bias) is residual
    if num_tokens == 0:
        return
    rounded, scales = quantize_rows(x, kind)
    sides = (rounded.double() * scales[:, None].double(), packed.data.double() * packed.scales[:, None].double())
    expected = (sides[0] @ sides[1].T).float()
    if bias is not None:
        expected += bias.float()
    # an fp32 sum of fp8 products, then one rounding
    slack = _rounding(expected, dtype) + 1e-5 * float((sides[0].abs() @ sides[1].abs().T).max())
    assert error(actual, expected) <= slack
    assert error(residual, expected + before.float()) <= slack + _rounding(before.float(), dtype)
    if kind == "int8" and in_features <= INT8_GROUP:  # where a row is one group, both kernels have one grid
        assert error(actual, linear_int8_ref(x, weight, bias)) <= slack + 0.05


def test_int8_product_is_near_the_product_in_full_precision() -> None:
    x, weight = _rand(20, 256), _rand(64, 256)
    with using_triton(True):
        actual = linear(x, pack_weight(weight, "int8"))
    expected = F.linear(x, weight)
    assert (actual - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_model_computes_the_same_tokens_with_the_triton_kernels(tmp_path: Path, quantization: str) -> None:
    if DEVICE.type != "cpu":
        pytest.skip("the runner of the factories computes on a CPU")
    folder = save_llama(tmp_path)
    prompts = {"a": list(range(3, 22)), "b": [7, 9]}
    blocks = {"a": [5, 2], "b": [0, 1]}
    with using_triton(True):
        runner = make_runner(folder, attention_backend="triton")
        actual = generate(runner, prompts, 3, block_ids=blocks)
    if quantization == "none":
        expected = generate(make_runner(folder, attention_backend="reference"), prompts, 3, block_ids=blocks)
        assert actual == expected
