"""Calls the C++ kernel that both gates of gated MLPs share."""

import torch

from kernels.native.library import ACTIVATIONS, Activation, GatedMulArgs, NativeKernels, dtype_code


def gated_mul(kernels: NativeKernels, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Multiply the activated first half of every row with its second half.

    Args:
        kernels: that compute it.
        gate_up: (num_tokens, 2 * intermediate), gate first, columns contiguous, fp32 or bf16.
        activation: of the gate.

    Returns:
        (num_tokens, intermediate), dtype of ``gate_up``.
    """
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_rows, inner), dtype=gate_up.dtype)
    arguments = GatedMulArgs(
        gate_up=gate_up.data_ptr(),
        y=y.data_ptr(),
        num_rows=num_rows,
        inner=inner,
        row_stride=gate_up.stride(0),
        dtype=dtype_code(gate_up.dtype),
        activation=ACTIVATIONS[activation],
        num_threads=torch.get_num_threads(),
    )
    kernels.call("gated_mul", arguments)
    return y
