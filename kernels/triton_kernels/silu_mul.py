"""The gate of a gated MLP: ``y = silu(gate) * up``."""

import torch
import triton
import triton.language as tl

from kernels.triton_kernels.numerics import narrow
from kernels.triton_kernels.runtime import is_interpreted

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up, y, row_stride, inner, BLOCK: tl.constexpr, EMULATE: tl.constexpr):
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    gate = tl.load(gate_up + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + inner + columns, mask=mask, other=0.0).to(tl.float32)
    # by the exponential that cannot overflow
    shrunk = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, shrunk) / (1.0 + shrunk)
    tl.store(y + row * inner + columns, narrow(gate * sigmoid * up, y.dtype.element_ty, EMULATE), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: (num_tokens, 2 * inner), last dimension contiguous. Returns (num_tokens, inner)."""
    assert gate_up.dim() == 2, f"gate_up must be a matrix, got {tuple(gate_up.shape)}"
    assert gate_up.stride(1) == 1, f"rows must be dense, their stride is {gate_up.stride(1)}"
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        silu_mul_kernel[(num_rows, triton.cdiv(inner, _BLOCK))](
            gate_up, y, gate_up.stride(0), inner, BLOCK=_BLOCK, EMULATE=is_interpreted(), num_warps=4
        )
    return y
