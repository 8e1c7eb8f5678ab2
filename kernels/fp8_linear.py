"""Weights rounded to 8-bit floats (e4m3) per output channel, multiplied in the dtype of the inputs.

The weights take half the memory of bf16 and are widened again in every call, so this saves memory, not time: processors
without an fp8 unit have nothing to multiply them with. Scales are powers of two: a float keeps its relative precision
under them, and widening is exact in every dtype.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

FP8_MAX = 448.0
"""Largest number of e4m3."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight in 8-bit floats."""

    data: torch.Tensor
    """(out_features, in_features), float8_e4m3fn."""
    scales: torch.Tensor
    """(out_features, 1), fp32, powers of two."""
    dtype: torch.dtype
    """Of inputs and outputs."""


def fp8_dtype() -> torch.dtype:
    """e4m3 of this torch. Raises ValueError where it has none."""
    dtype = getattr(torch, "float8_e4m3fn", None)
    if dtype is None:
        raise ValueError(f"torch {torch.__version__} has no float8_e4m3fn")
    assert isinstance(dtype, torch.dtype), "float8_e4m3fn is a dtype"
    return dtype


def pack_fp8(weight: torch.Tensor) -> Fp8Weight:
    """Round ``weight``, (out_features, in_features) of any floating dtype. Raises ValueError: torch has no fp8."""
    dtype = fp8_dtype()
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    scales = torch.exp2(torch.log2(largest / FP8_MAX).ceil())
    scales = torch.where(largest > 0, scales, 1.0)
    return Fp8Weight((weight.float() / scales).clamp_(-FP8_MAX, FP8_MAX).to(dtype), scales, weight.dtype)


def linear_fp8(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: (num_tokens, in_features), dtype of ``weight``. Returns (num_tokens, out_features)."""
    return F.linear(x, weight.data.to(x.dtype).mul_(weight.scales.to(x.dtype)), bias)


def linear_fp8_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product by its definition, each channel's weights rounded to 4 significant bits; returns fp32."""
    rounded = torch.empty_like(weight, dtype=torch.float32)
    for channel, values in enumerate(weight.double()):
        scale = 2.0 ** torch.log2(values.abs().max() / FP8_MAX).ceil() if values.any() else torch.tensor(1.0)
        scaled = values / scale
        # 3 bits behind the leading one, and a fixed step of 2**-9 below the smallest normal number
        steps = torch.exp2(torch.log2(scaled.abs().clamp(min=2.0**-6)).floor() - 3)
        rounded[channel] = ((scaled / steps).round() * steps * scale).float()
    y = torch.einsum("ti,oi->to", x.float(), rounded)
    return y if bias is None else y + bias.float()
