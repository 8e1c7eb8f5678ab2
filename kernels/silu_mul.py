"""The gate of a gated MLP: ``y = silu(gate) * up``, both halves in one tensor as one projection makes them."""

import torch
import torch.nn.functional as F

from kernels.native.library import SiluMulArgs, dtype_code, kernels_for
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
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_rows, inner), dtype=gate_up.dtype)
    arguments = SiluMulArgs(
        gate_up=gate_up.data_ptr(),
        y=y.data_ptr(),
        num_rows=num_rows,
        inner=inner,
        row_stride=gate_up.stride(0),
        dtype=dtype_code(gate_up.dtype),
        num_threads=torch.get_num_threads(),
    )
    kernels.call("silu_mul", arguments)
    return y


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """The formula in fp32; returns fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
