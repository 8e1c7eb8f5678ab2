"""RMSNorm against its formula."""

import pytest
import torch

from kernels.rms_norm import rms_norm, rms_norm_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 2, 96)])
def test_rms_norm_agrees_with_the_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(*shape) * 3).to(dtype)
    weight = torch.rand(shape[-1]).to(dtype)
    expected = rms_norm_ref(x, weight, 1e-5)
    actual = rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    # one rounding of the normalised value, one of the product
    torch.testing.assert_close(actual.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_rms_norm_of_a_zero_row_is_zero() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).tolist() == [[0.0] * 8] * 2


def test_rms_norm_takes_the_mean_in_fp32() -> None:
    # squares of 300 overflow fp16
    x = torch.full((1, 16), 300.0, dtype=torch.float16)
    assert rms_norm(x, torch.ones(16, dtype=torch.float16), 1e-5).tolist() == [[1.0] * 16]


def test_rms_norm_refuses_a_weight_of_another_dtype() -> None:
    with pytest.raises(AssertionError, match="weight is"):
        rms_norm(torch.zeros(2, 8), torch.ones(8, dtype=torch.bfloat16), 1e-6)
