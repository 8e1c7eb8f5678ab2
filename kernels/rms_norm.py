"""Root-mean-square layer norm: ``y = x / sqrt(mean(x**2) + eps) * weight``, alone or after adding to the residual."""

import torch
import torch.nn.functional as F

from kernels.native.library import NativeKernels, RmsNormArgs, dtype_code, kernels_for
from kernels.triton_kernels.runtime import uses_triton


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
    if uses_triton(x):
        from kernels.triton_kernels import rms_norm as triton_rms_norm

        if triton_rms_norm.can_rms_norm(x):
            return triton_rms_norm.rms_norm(x, None, weight.contiguous(), eps)
    kernels = kernels_for(x)
    if kernels is None or not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)):
        return F.rms_norm(x, weight.shape, weight, eps)
    return _call(kernels, x, None, weight, eps)


def add_rms_norm_(residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add ``delta`` to ``residual``, in place, and normalise the rows of the sum.

    Args:
        residual, delta: (num_tokens, hidden), one dtype.
        weight: (hidden,), dtype of ``residual``.
        eps: added to the mean of squares.

    Returns:
        A new tensor, (num_tokens, hidden).
    """
    assert residual.shape == delta.shape, f"residual {tuple(residual.shape)}, delta {tuple(delta.shape)}"
    assert residual.dtype == delta.dtype, f"residual is {residual.dtype}, delta is {delta.dtype}"
    if uses_triton(residual) and residual.dim() == 2 and delta.stride(1) == 1:
        from kernels.triton_kernels import rms_norm as triton_rms_norm

        if triton_rms_norm.can_rms_norm(residual):
            return triton_rms_norm.rms_norm(residual, delta, weight.contiguous(), eps)
    kernels = kernels_for(residual)
    if kernels is None or residual.dim() != 2 or residual.stride(1) != 1 or delta.stride(1) != 1:
        residual += delta
        return rms_norm(residual, weight, eps)
    assert weight.shape == residual.shape[-1:], f"weight {tuple(weight.shape)} for rows of {residual.shape[-1]}"
    assert weight.dtype == residual.dtype, f"weight is {weight.dtype}, residual is {residual.dtype}"
    return _call(kernels, residual, delta, weight, eps)


def _call(
    kernels: NativeKernels, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    hidden = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype)
    weight = weight.contiguous()
    arguments = RmsNormArgs(
        x=x.data_ptr(),
        delta=None if delta is None else delta.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        num_rows=x.numel() // hidden if hidden else 0,
        x_stride=x.stride(0) if x.dim() == 2 else hidden,
        delta_stride=0 if delta is None else delta.stride(0),
        hidden=hidden,
        dtype=dtype_code(x.dtype),
        num_threads=torch.get_num_threads(),
        eps=eps,
    )
    kernels.call("rms_norm", arguments)
    return y


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula in fp32; returns fp32."""
    x = x.float()
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight.float()
