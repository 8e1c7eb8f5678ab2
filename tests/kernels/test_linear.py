"""The linear op, packed and plain, against its formula."""

import pytest
import torch
import torch.nn.functional as F

from kernels.linear import can_pack_weight, linear, linear_ref, pack_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 8, 130])
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (65, 33), (1, 1)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_linear_errs_at_most_twice_as_much_as_plain_torch(
    dtype: torch.dtype, num_tokens: int, in_features: int, out_features: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, in_features).to(dtype)
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    actual = linear(x, pack_weight(weight), bias)
    assert (actual.shape, actual.dtype) == ((num_tokens, out_features), dtype)
    if num_tokens:
        expected = linear_ref(x, weight, bias)
        plain = (F.linear(x, weight, bias).float() - expected).abs().max()
        # Sums in another order err by the size of what is summed, not of the sum; then one rounding.
        summed = (x.float().abs() @ weight.float().abs().T).max()
        rounding = 4 * torch.finfo(torch.float32).eps * summed + torch.finfo(dtype).eps * expected.abs().max()
        assert (actual.float() - expected).abs().max() <= 2 * plain + rounding


def test_packed_linear_takes_rows_that_are_not_contiguous() -> None:
    x, weight = torch.randn(7, 20)[:, 3:15], torch.randn(5, 12)
    torch.testing.assert_close(linear(x, pack_weight(weight)), linear_ref(x, weight))


def test_packed_weight_is_a_copy() -> None:
    weight = torch.ones(4, 8)
    if not can_pack_weight(weight):
        pytest.skip("this torch packs no weights")
    packed = pack_weight(weight)
    weight.zero_()
    assert linear(torch.ones(1, 8), packed).tolist() == [[8.0] * 4]


def test_weight_without_a_packed_layout_stays_as_it_is() -> None:
    weight = torch.ones(4, 8, dtype=torch.float64)
    assert pack_weight(weight) is weight


def test_linear_refuses_another_dtype() -> None:
    with pytest.raises(AssertionError, match=r"x is torch.bfloat16, weight is torch.float32"):
        linear(torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(4, 8))
