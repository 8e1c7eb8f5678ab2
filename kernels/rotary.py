"""Rotary position embedding in the half-split layout of Llama: element ``i`` turns together with ``i + head_dim / 2``.

x = [x1 | x2]     y = [x1 * cos - x2 * sin | x2 * cos + x1 * sin]      with angle = position * inv_freq[i]
"""

from typing import NamedTuple

import torch


class RotaryTables(NamedTuple):
    """Cosines and sines of one step, shared by all its layers; the first two (num_tokens, 1, head_dim)."""

    cos: torch.Tensor
    """Both halves alike."""
    sin: torch.Tensor
    """First half negated: ``y = x * cos + swap_halves(x) * sin``."""
    half_cos: torch.Tensor
    """(num_tokens, head_dim / 2), fp32, contiguous: for the fused kernels."""
    half_sin: torch.Tensor
    """Likewise, nothing negated."""


def rotary_tables(positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype) -> RotaryTables:
    """Tables for the tokens at ``positions``.

    Args:
        positions: (num_tokens,), integers.
        inv_freq: (head_dim / 2,), fp32, radians per position.
        dtype: of the tensors to be rotated. Angles are computed in fp32 in any case.
    """
    angles = positions.to(torch.float32)[:, None] * inv_freq.to(torch.float32)
    cos, sin = angles.cos(), angles.sin()
    return RotaryTables(
        cos=torch.cat((cos, cos), dim=-1).unsqueeze(1).to(dtype),
        sin=torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(dtype),
        half_cos=cos,
        half_sin=sin,
    )


def rotary(x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Rotate all heads of all tokens.

    Args:
        x: (num_tokens, num_heads, head_dim); query and key heads may share one call.
        tables: of the same tokens, in the dtype of ``x``.

    Returns:
        A new contiguous tensor with shape and dtype of ``x``.
    """
    assert tables.cos.shape == (x.shape[0], 1, x.shape[2]), f"tables {tuple(tables.cos.shape)}, x {tuple(x.shape)}"
    assert tables.cos.dtype == x.dtype, f"tables are {tables.cos.dtype}, x is {x.dtype}"
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * tables.cos, swapped, tables.sin)


def rotary_ref(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """The formula in fp32; returns fp32."""
    angles = (positions.double()[:, None] * inv_freq.double())[:, None, :]
    cos, sin = angles.cos().float(), angles.sin().float()
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
