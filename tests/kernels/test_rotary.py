"""Rotary embedding against its formula."""

import pytest
import torch

from kernels.rotary import rotary, rotary_ref, rotary_tables


def _inv_freq(head_dim: int) -> torch.Tensor:
    return 1.0 / (10_000.0 ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3 * 2**-8), (torch.float16, 3 * 2**-11)]
)
@pytest.mark.parametrize("head_dim", [2, 64, 96])
def test_rotary_agrees_with_the_formula(dtype: torch.dtype, tolerance: float, head_dim: int) -> None:
    positions = torch.tensor([0, 1, 5, 100])
    # a slice of a fused projection, not contiguous
    x = torch.randn(4, 5, head_dim).to(dtype)[:, :3]
    actual = rotary(x, rotary_tables(positions, _inv_freq(head_dim), dtype))
    expected = rotary_ref(x, positions, _inv_freq(head_dim))
    size = x.float().abs().max()
    assert (actual.float() - expected).abs().max() <= tolerance * size


def test_rotary_stays_exact_at_the_end_of_a_long_window() -> None:
    positions = torch.tensor([8191])
    x = torch.randn(1, 2, 64)
    actual = rotary(x, rotary_tables(positions, _inv_freq(64), torch.float32))
    torch.testing.assert_close(actual, rotary_ref(x, positions, _inv_freq(64)), rtol=0, atol=2e-3)


def test_rotary_at_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 2, 8)
    assert torch.equal(rotary(x, rotary_tables(torch.tensor([0]), _inv_freq(8), torch.float32)), x)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 64).expand(2, 1, 64), torch.randn(1, 1, 64).expand(2, 1, 64)
    near = rotary_tables(torch.tensor([3, 103]), _inv_freq(64), torch.float32)
    far = rotary_tables(torch.tensor([10, 110]), _inv_freq(64), torch.float32)
    scores = (rotary(q, near) * rotary(k, far)).sum(dim=-1).flatten()
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_rotary_refuses_tables_of_other_tokens() -> None:
    with pytest.raises(AssertionError, match="tables"):
        rotary(torch.zeros(2, 1, 8), rotary_tables(torch.tensor([0]), _inv_freq(8), torch.float32))
