"""Weights in 8-bit floats against their definition."""

import pytest
import torch

from kernels import fp8_linear
from kernels.fp8_linear import Fp8Weight, linear_fp8_ref, pack_fp8
from kernels.linear import linear, linear_add_, pack_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fp8_product_is_that_of_the_rounded_weights(dtype: torch.dtype, num_tokens: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = (
        torch.randn(num_tokens, 65).to(dtype),
        (torch.randn(31, 65) * torch.logspace(-3, 2, 31)[:, None]).to(dtype),
    )
    weight[5] = 0.0
    bias = torch.randn(31).to(dtype) if has_bias else None
    actual = linear(x, pack_weight(weight, "fp8"), bias)
    assert (actual.shape, actual.dtype) == ((num_tokens, 31), dtype)
    expected = linear_fp8_ref(x, weight, bias)
    summed = x.float().abs() @ weight.float().abs().T
    tolerance = 4 * torch.finfo(torch.float32).eps * summed + torch.finfo(dtype).eps * expected.abs() + 1e-6
    assert ((actual.float() - expected).abs() <= tolerance).all()


def test_fp8_weights_take_a_byte_each_and_err_by_a_sixteenth_at_most() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = pack_fp8(weight)
    assert packed.data.element_size() == 1
    widened = packed.data.float() * packed.scales
    is_normal = weight.float().abs() / packed.scales >= 2.0**-6
    assert ((widened - weight.float()).abs() <= weight.float().abs() / 16)[is_normal].all()
    assert widened.bfloat16().float().equal(widened)


def test_fp8_product_is_added_to_the_residual_in_place() -> None:
    residual, x, weight = torch.ones(3, 4), torch.randn(3, 8), torch.randn(4, 8)
    packed = pack_weight(weight, "fp8")
    assert isinstance(packed, Fp8Weight)
    assert linear_add_(residual, x, packed) is residual
    torch.testing.assert_close(residual, 1 + linear(x, packed))


def test_torch_without_fp8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fp8_linear.torch, "float8_e4m3fn")
    with pytest.raises(ValueError, match=r"torch \S+ has no float8_e4m3fn"):
        pack_weight(torch.ones(4, 8), "fp8")
