"""The native ops of every instruction set against their formulas."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from factories_kernels import get_kernels

from kernels.gated_linear import gated_linear, pack_gated_weight
from kernels.gelu_mul import gelu_tanh_mul, gelu_tanh_mul_ref
from kernels.linear import (
    INT8_GROUP,
    PackedWeight,
    Quantization,
    linear,
    linear_add_,
    linear_int8_ref,
    linear_ref,
    pack_weight,
)
from kernels.native.library import ISAS, Activation, using_kernels
from kernels.rms_norm import add_rms_norm_, rms_norm, rms_norm_ref
from kernels.rotary import rotary_tables
from kernels.rotary_store import HeadNorms, rotary_store, rotary_store_ref
from kernels.silu_mul import silu_mul, silu_mul_ref

DTYPES = [torch.float32, torch.bfloat16]
BF16_DOT = "avx512_bf16"


@pytest.fixture(autouse=True)
def _poison_new_tensors() -> Iterator[None]:
    """Memory that a kernel forgets to write is not a number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def use_isa() -> Iterator[Callable[[str], None]]:
    """Makes the ops take the kernels of one instruction set."""
    with contextlib.ExitStack() as stack:
        yield lambda isa: stack.enter_context(using_kernels(get_kernels(isa)))


def _assert_error_at_most_twice(actual: torch.Tensor, plain: torch.Tensor, expected: torch.Tensor) -> None:
    rounding = torch.finfo(actual.dtype).eps * expected.abs().max()
    assert torch.isfinite(actual).all()
    assert (actual.float() - expected).abs().max() <= 2 * (plain.float() - expected).abs().max() + rounding


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (300, 576), (0, 64), (2, 3, 40)])
def test_rms_norm(use_isa: Callable[[str], None], isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    use_isa(isa)
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.rand(shape[-1]).to(dtype)
    actual = rms_norm(x, weight, 1e-5)
    assert (actual.shape, actual.dtype) == (x.shape, dtype)
    if x.numel():
        plain = F.rms_norm(x, weight.shape, weight, 1e-5)
        _assert_error_at_most_twice(actual, plain, rms_norm_ref(x, weight, 1e-5))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [576, 33])
def test_add_rms_norm_updates_the_residual_and_normalises_it(
    use_isa: Callable[[str], None], isa: str, dtype: torch.dtype, hidden: int
) -> None:
    use_isa(isa)
    residual, weight = torch.randn(50, hidden).to(dtype), torch.rand(hidden).to(dtype)
    delta = torch.randn(50, hidden + 5).to(dtype)[:, 2 : hidden + 2]
    summed = residual + delta
    actual = add_rms_norm_(residual, delta, weight, 1e-6)
    assert torch.equal(residual, summed)
    _assert_error_at_most_twice(
        actual, F.rms_norm(summed, weight.shape, weight, 1e-6), rms_norm_ref(summed, weight, 1e-6)
    )


def test_add_rms_norm_without_native_kernels_is_the_same() -> None:
    residual, delta, weight = torch.randn(5, 16), torch.randn(5, 16), torch.rand(16)
    summed = residual + delta
    with using_kernels(None):
        actual = add_rms_norm_(residual, delta, weight, 1e-6)
    torch.testing.assert_close(actual, rms_norm_ref(summed, weight, 1e-6))
    assert torch.equal(residual, summed)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "inner"), [(1, 1536), (70, 1536), (3, 21)])
def test_silu_mul(use_isa: Callable[[str], None], isa: str, dtype: torch.dtype, num_rows: int, inner: int) -> None:
    use_isa(isa)
    gate_up = (torch.randn(num_rows, 2 * inner + 1) * 4).to(dtype)[:, 1:]
    gate, up = gate_up.chunk(2, dim=-1)
    actual = silu_mul(gate_up)
    assert actual.shape == (num_rows, inner)
    _assert_error_at_most_twice(actual, F.silu(gate) * up, silu_mul_ref(gate_up))


@pytest.mark.parametrize("isa", ISAS)
def test_silu_of_large_numbers_is_their_limit(use_isa: Callable[[str], None], isa: str) -> None:
    use_isa(isa)
    gate_up = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30] * 4 + [1.0] * 20])
    expected = torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e30] * 4])
    torch.testing.assert_close(silu_mul(gate_up), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "inner"), [(1, 1536), (70, 1536), (3, 21)])
def test_gelu_mul(use_isa: Callable[[str], None], isa: str, dtype: torch.dtype, num_rows: int, inner: int) -> None:
    use_isa(isa)
    gate_up = (torch.randn(num_rows, 2 * inner + 1) * 4).to(dtype)[:, 1:]
    gate, up = gate_up.chunk(2, dim=-1)
    actual = gelu_tanh_mul(gate_up)
    assert actual.shape == (num_rows, inner)
    _assert_error_at_most_twice(actual, F.gelu(gate, approximate="tanh") * up, gelu_tanh_mul_ref(gate_up))


@pytest.mark.parametrize("isa", ISAS)
def test_gelu_of_large_numbers_is_their_limit(use_isa: Callable[[str], None], isa: str) -> None:
    use_isa(isa)
    gate_up = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30] * 4 + [1.0] * 20])
    expected = torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e30] * 4])
    torch.testing.assert_close(gelu_tanh_mul(gate_up), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 7, 100])
@pytest.mark.parametrize(("in_features", "inner"), [(576, 1536), (65, 64), (96, 50)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_bf16_product_errs_at_most_twice_as_much_as_plain_torch(
    use_isa: Callable[[str], None],
    activation: Activation,
    num_tokens: int,
    in_features: int,
    inner: int,
    has_bias: bool,
) -> None:
    use_isa(BF16_DOT)
    x = torch.randn(num_tokens, in_features + 2).bfloat16()[:, 1:-1]
    weight = torch.randn(2 * inner, in_features).bfloat16() / in_features**0.5
    bias = torch.randn(2 * inner).bfloat16() if has_bias else None
    actual = gated_linear(x, *pack_gated_weight(weight, bias, activation), activation)
    assert (actual.shape, actual.dtype) == ((num_tokens, inner), torch.bfloat16)
    if num_tokens:
        apply, formula = {
            "silu": (F.silu, silu_mul_ref),
            "gelu_tanh": (lambda gate: F.gelu(gate, approximate="tanh"), gelu_tanh_mul_ref),
        }[activation]
        gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
        _assert_error_at_most_twice(actual, apply(gate) * up, formula(linear_ref(x, weight, bias)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_int8_product_is_the_gate_of_the_product(
    use_isa: Callable[[str], None], isa: str, dtype: torch.dtype, has_bias: bool
) -> None:
    use_isa(isa)
    x, weight = torch.randn(23, 150).to(dtype), torch.randn(2 * 96, 150).to(dtype) / 12
    bias = torch.randn(2 * 96).to(dtype) if has_bias else None
    packed, packed_bias = pack_gated_weight(weight, bias, "silu", "int8")
    assert isinstance(packed, PackedWeight)
    assert packed.activation == "silu"
    expected = silu_mul_ref(linear_int8_ref(x, weight, bias))
    actual = gated_linear(x, packed, packed_bias, "silu").float()
    tolerance = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_gated_weight_that_fills_no_whole_panels_stays_in_two_halves() -> None:
    get_kernels()
    packed, _ = pack_gated_weight(torch.randn(2 * 50, 70), None, "silu", "int8")
    assert isinstance(packed, PackedWeight)
    assert packed.activation is None


def test_int8_rows_with_one_large_feature_keep_the_small_ones() -> None:
    get_kernels()
    x, weight = torch.randn(4, 4 * INT8_GROUP), torch.randn(40, 4 * INT8_GROUP)
    weight[:, 0] = 0.0
    expected = linear_ref(x, weight)
    x[:, 0] = 1e4
    error = (linear(x, pack_weight(weight, "int8")) - expected).abs().amax()
    quiet = x.clone()
    quiet[:, :INT8_GROUP] = 0.0
    # the group of the large feature loses its digits, the others keep theirs
    lost = (linear_ref(x - quiet, weight)).abs().amax()
    assert error <= lost + 0.05 * expected.abs().amax()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 64), (90, 64), (5, 80), (4, 12)])
def test_rotary_store_normalises_heads_first(
    use_isa: Callable[[str], None], isa: str, dtype: torch.dtype, num_tokens: int, head_dim: int
) -> None:
    use_isa(isa)
    q, k, v = torch.split(torch.randn(num_tokens, 6 + 2 + 2, head_dim).to(dtype) * 3, [6, 2, 2], dim=1)
    positions = torch.arange(num_tokens) * 7
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    slots = torch.randperm(8 * 16)[:num_tokens]
    norms = HeadNorms(torch.rand(head_dim).to(dtype) + 0.5, torch.rand(head_dim).to(dtype) + 0.5, 1e-5)
    cache = torch.full((2, 8, 16, 2, head_dim), float("nan")).to(dtype)
    expected_cache, plain_cache = cache.clone(), cache.clone()
    expected_q, expected_k = rotary_store_ref(q, k, v, positions, inv_freq, expected_cache, slots, norms=norms)
    tables = rotary_tables(positions, inv_freq, dtype)
    with using_kernels(None):
        plain_q, plain_k = rotary_store(q.clone(), k.clone(), v, tables, plain_cache, slots, norms=norms)
    turned_q, turned_k = rotary_store(q, k, v, tables, cache, slots, norms=norms)
    # angles of some hundred radians are rounded to fp32 before their cosine is taken
    for actual, plain, expected in ((turned_q, plain_q, expected_q), (turned_k, plain_k, expected_k)):
        limit = 2 * (plain.float() - expected).abs().max() + 1e-4
        assert (actual.float() - expected).abs().max() <= limit
    assert torch.equal(cache[0].flatten(0, 1)[slots], turned_k)
    assert torch.equal(torch.isnan(cache), torch.isnan(expected_cache))
    assert torch.equal(torch.nan_to_num(cache[1]), torch.nan_to_num(expected_cache[1]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 64), (90, 64), (5, 80), (4, 12)])
def test_rotary_store_turns_and_stores(
    use_isa: Callable[[str], None], isa: str, dtype: torch.dtype, num_tokens: int, head_dim: int
) -> None:
    use_isa(isa)
    q, k, v = torch.split(torch.randn(num_tokens, 6 + 2 + 2, head_dim).to(dtype), [6, 2, 2], dim=1)
    positions = torch.arange(num_tokens) * 83
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    slots = torch.randperm(8 * 16)[:num_tokens]
    cache = torch.randn(2, 8, 16, 2, head_dim).to(dtype)
    expected_cache = cache.clone()
    expected_q, expected_k = rotary_store_ref(q, k, v, positions, inv_freq, expected_cache, slots)
    turned_q, turned_k = rotary_store(q, k, v, rotary_tables(positions, inv_freq, dtype), cache, slots)
    # angles of some thousand radians are rounded to fp32 before their cosine is taken
    tolerance = {"rtol": 0, "atol": 3e-3 if dtype == torch.float32 else 3e-2}
    torch.testing.assert_close(turned_q.float(), expected_q, **tolerance)
    torch.testing.assert_close(turned_k.float(), expected_k, **tolerance)
    torch.testing.assert_close(cache, expected_cache, **tolerance)
    assert torch.equal(cache[0].flatten(0, 1)[slots], turned_k)
    assert torch.equal(cache[1], expected_cache[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 6, 7, 100])
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (65, 33), (1, 1), (128, 64), (150, 70)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_product_is_exact_on_its_grid(
    use_isa: Callable[[str], None],
    dtype: torch.dtype,
    num_tokens: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
) -> None:
    for isa in (name for name in ISAS if name in _isas_here()):
        use_isa(isa)
        x = torch.randn(num_tokens, in_features + 2).to(dtype)[:, 1:-1]
        weight = torch.randn(out_features, in_features).to(dtype)
        bias = torch.randn(out_features).to(dtype) if has_bias else None
        packed = pack_weight(weight, "int8")
        actual = linear(x, packed, bias)
        assert (actual.shape, actual.dtype) == ((num_tokens, out_features), dtype)
        if num_tokens == 0:
            continue
        expected = linear_int8_ref(x, weight, bias)
        rounding = torch.finfo(dtype).eps * expected.abs() + 1e-6 * expected.abs().max()
        assert ((actual.float() - expected).abs() <= rounding).all(), isa


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 6, 7, 100])
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (65, 33), (1, 1), (128, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bf16_product_of_our_own_errs_at_most_twice_as_much_as_plain_torch(
    use_isa: Callable[[str], None], num_tokens: int, in_features: int, out_features: int, has_bias: bool
) -> None:
    use_isa(BF16_DOT)
    x = torch.randn(num_tokens, in_features + 2).bfloat16()[:, 1:-1]
    weight = torch.randn(out_features, in_features).bfloat16()
    bias = torch.randn(out_features).bfloat16() if has_bias else None
    packed = pack_weight(weight)
    if not isinstance(packed, PackedWeight):
        pytest.skip("this processor has a matrix unit, which oneDNN uses")
    actual = linear(x, packed, bias)
    assert actual.shape == (num_tokens, out_features)
    if num_tokens:
        _assert_error_at_most_twice(actual, F.linear(x, weight, bias), linear_ref(x, weight, bias))


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "out_features"), [(1, 33), (50, 100), (7, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_is_added_in_place(
    quantization: Quantization, dtype: torch.dtype, num_tokens: int, out_features: int, has_bias: bool
) -> None:
    get_kernels()
    x, weight = torch.randn(num_tokens, 70).to(dtype), torch.randn(out_features, 70).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    packed = pack_weight(weight, quantization)
    residual = torch.randn(num_tokens, out_features).to(dtype)
    expected = residual.float() + linear(x, packed, bias).float()
    actual = linear_add_(residual, x, packed, bias)
    assert actual is residual
    # the product alone was rounded once, the sum here once
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rows_that_are_zero_or_not_finite_stay_so(
    use_isa: Callable[[str], None], isa: str, dtype: torch.dtype
) -> None:
    use_isa(isa)
    weight = torch.randn(20, 70).to(dtype)
    weight[3] = 0.0
    x = torch.randn(4, 70).to(dtype)
    x[1] = 0.0
    x[2, 69] = float("nan")
    x[3, 0] = float("inf")
    actual = linear(x, pack_weight(weight, "int8"))
    assert torch.isfinite(actual[0]).all()
    assert actual[0, 3] == 0.0
    assert actual[1].tolist() == [0.0] * 20
    assert not torch.isfinite(actual[2:]).any()


def test_int8_without_native_kernels_is_refused() -> None:
    with using_kernels(None), pytest.raises(ValueError, match="int8 weights need the native CPU kernels and fp32 or"):
        pack_weight(torch.ones(4, 4), "int8")


def _isas_here() -> list[str]:
    names = []
    for isa in ISAS:
        try:
            get_kernels(isa)
        except pytest.skip.Exception:
            continue
        names.append(isa)
    return names
