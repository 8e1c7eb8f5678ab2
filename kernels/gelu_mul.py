"""The gate of Gemma's MLP: ``y = gelu(gate) * up`` with the tanh form of GELU, both halves in one tensor."""

import math

import torch
import torch.nn.functional as F

from kernels.native.gated_mul import gated_mul
from kernels.native.library import kernels_for


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply the activated first half of every row with its second half.

    Args:
        gate_up: (num_tokens, 2 * intermediate), gate first.

    Returns:
        (num_tokens, intermediate), dtype of ``gate_up``.
    """
    assert gate_up.shape[-1] % 2 == 0, f"gate and up need an even width, got {gate_up.shape[-1]}"
    kernels = kernels_for(gate_up)
    if kernels is not None and gate_up.dim() == 2 and gate_up.stride(1) == 1:
        return gated_mul(kernels, gate_up, "gelu_tanh")
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_tanh_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """The formula in fp32; returns fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate.pow(3))
    return 0.5 * gate * (1 + inner.tanh()) * up
