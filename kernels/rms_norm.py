"""Root-mean-square layer norm: ``y = x / sqrt(mean(x**2) + eps) * weight``."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise every row of ``x``.

    Args:
        x: (..., hidden), any floating dtype; the mean is taken in fp32.
        weight: (hidden,), dtype of ``x``.
        eps: added to the mean of squares.

    Returns:
        A new tensor with shape and dtype of ``x``.
    """
    assert weight.shape == x.shape[-1:], f"weight {tuple(weight.shape)} does not fit rows of {x.shape[-1]}"
    assert weight.dtype == x.dtype, f"weight is {weight.dtype}, x is {x.dtype}"
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula in fp32; returns fp32."""
    x = x.float()
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight.float()
