"""The gate of Gemma against its formula."""

import pytest
import torch

from kernels.gelu_mul import gelu_tanh_mul, gelu_tanh_mul_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2), (5, 96), (129, 3072)])
def test_gelu_tanh_mul_agrees_with_the_formula(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = (torch.randn(*shape) * 4).to(dtype)
    actual = gelu_tanh_mul(gate_up)
    assert actual.shape == (shape[0], shape[1] // 2)
    torch.testing.assert_close(actual.float(), gelu_tanh_mul_ref(gate_up), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_gelu_tanh_mul_leaves_its_input_alone() -> None:
    gate_up = torch.randn(3, 8)
    before = gate_up.clone()
    gelu_tanh_mul(gate_up)
    assert torch.equal(gate_up, before)


def test_gelu_tanh_mul_refuses_an_odd_width() -> None:
    with pytest.raises(AssertionError, match="got 7"):
        gelu_tanh_mul(torch.zeros(1, 7))
