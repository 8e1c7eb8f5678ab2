"""RMSNorm, alone or after adding to the residual, in one pass over the rows."""

import torch
import triton
import triton.language as tl

from kernels.triton_kernels.numerics import narrow
from kernels.triton_kernels.runtime import is_interpreted

# Elements of one program's rows; heads of 64 or 128 share a program.
_MIN_ELEMENTS = 1024
MAX_HIDDEN = 65536
"""Longest row that one program holds."""


@triton.jit
def rms_norm_kernel(
    x,
    delta,
    weight,
    y,
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    delta_stride,
    hidden,
    eps,
    ROWS: tl.constexpr,
    HIDDEN_PADDED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """ROWS rows; row ``i`` of ``x`` lies at ``i // inner * outer_stride + i % inner * inner_stride``."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, HIDDEN_PADDED)
    mask = (rows[:, None] < num_rows) & (columns[None, :] < hidden)
    x_pointers = x + (rows // inner * outer_stride + rows % inner * inner_stride)[:, None] + columns[None, :]
    values = tl.load(x_pointers, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta + rows[:, None] * delta_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded = narrow(values, x.dtype.element_ty, EMULATE)
        tl.store(x_pointers, rounded, mask=mask)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, 1) / hidden
    factors = tl.load(weight + columns, mask=columns < hidden, other=0.0).to(tl.float32)
    normed = values * (1.0 / tl.sqrt(mean + eps))[:, None] * factors[None, :]
    tl.store(y + rows[:, None] * hidden + columns[None, :], narrow(normed, y.dtype.element_ty, EMULATE), mask=mask)


def can_rms_norm(x: torch.Tensor) -> bool:
    """Whether the rows of ``x`` can be read: two or three dimensions, or contiguous."""
    return (
        x.numel() > 0 and x.shape[-1] <= MAX_HIDDEN and x.stride(-1) == 1 and (x.dim() in (2, 3) or x.is_contiguous())
    )


def rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the rows of ``x``, after adding ``delta`` to them in place where there is one.

    Args:
        x: (..., hidden), see ``can_rms_norm``.
        delta: (num_rows, hidden), last dimension contiguous, with an ``x`` of two dimensions.
        weight: (hidden,), contiguous.
        eps: added to the mean of squares.

    Returns:
        A new contiguous tensor, shape and dtype of ``x``.
    """
    hidden = x.shape[-1]
    assert can_rms_norm(x), f"rows of shape {tuple(x.shape)} and strides {x.stride()} cannot be read"
    assert delta is None or (x.dim() == 2 and delta.stride(1) == 1), "a delta needs two dimensions, dense rows"
    assert weight.is_contiguous(), "the weight must be contiguous"
    num_rows = x.numel() // hidden
    inner, outer_stride, inner_stride = 1, hidden, 0
    if x.dim() == 2:
        outer_stride = x.stride(0)
    elif x.dim() == 3:
        inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(hidden)
    rows = max(1, _MIN_ELEMENTS // padded)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        x if delta is None else delta,
        weight,
        y,
        num_rows,
        inner,
        outer_stride,
        inner_stride,
        0 if delta is None else delta.stride(0),
        hidden,
        eps,
        ROWS=rows,
        HIDDEN_PADDED=padded,
        HAS_DELTA=delta is not None,
        EMULATE=is_interpreted(),
        num_warps=min(16, max(4, padded // 1024)),
    )
    return y
