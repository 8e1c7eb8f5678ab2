"""The gate of a gated MLP: ``y = silu(gate) * up``, both halves in one tensor as one projection makes them."""

import torch
import torch.nn.functional as F

from kernels.native.gated_mul import gated_mul
from kernels.native.library import kernels_for
from kernels.triton_kernels.runtime import uses_triton


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply the activated first half of every row with its second half.

    Args:
        gate_up: (num_tokens, 2 * intermediate), gate first.

    Returns:
        (num_tokens, intermediate), dtype of ``gate_up``.
    """
    assert gate_up.shape[-1] % 2 == 0, f"gate and up need an even width, got {gate_up.shape[-1]}"
    if uses_triton(gate_up) and gate_up.dim() == 2 and gate_up.stride(1) == 1:
        from kernels.triton_kernels import silu_mul as triton_silu_mul

        return triton_silu_mul.silu_mul(gate_up)
    kernels = kernels_for(gate_up)
    if kernels is None or gate_up.dim() != 2 or gate_up.stride(1) != 1:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    return gated_mul(kernels, gate_up, "silu")


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """The formula in fp32; returns fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
