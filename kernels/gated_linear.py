"""``activation(gate(x)) * up(x)``, the first half of a gated MLP, in one pass where our own kernel does the products.

The kernel has a panel of output channels in its registers when a product is complete. With gates and ups side by side
in every panel, the activation costs no way through memory, and gate and up are not rounded in between::

    plain     gate 0 ................ gate n-1 | up 0 ................ up n-1
    panels    gate 0..31 | up 0..31 || gate 32..63 | up 32..63 || ...              (panels of 64 channels)
"""

from dataclasses import replace

import torch

from kernels.gelu_mul import gelu_tanh_mul
from kernels.linear import PackedWeight, Quantization, Weight, linear, linear_native, pack_weight
from kernels.native.library import Activation, kernels_for
from kernels.silu_mul import silu_mul

_GATES = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


def pack_gated_weight(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    quantization: Quantization = "none",
) -> tuple[Weight, torch.Tensor | None]:
    """Weight and bias as ``gated_linear`` reads them fastest; see ``kernels.linear.pack_weight``.

    Args:
        weight: (2 * intermediate, in_features), gate first.
        bias: (2 * intermediate,), or ``None``.
        activation: of the gate.
        quantization: of the weight.
    """
    kernels = kernels_for(weight)
    half = 0 if kernels is None else kernels.panel // 2
    if not half or weight.shape[0] % (2 * half):
        return pack_weight(weight, quantization), bias
    packed = pack_weight(_by_panels(weight, half), quantization)
    if not isinstance(packed, PackedWeight):
        return pack_weight(weight, quantization), bias
    return replace(packed, activation=activation), None if bias is None else _by_panels(bias, half)


def gated_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
    """Multiply every row of ``x`` and gate what comes out.

    Args:
        x: (num_tokens, in_features).
        weight, bias: from ``pack_gated_weight`` for the same activation, or plain.
        activation: of the gate.

    Returns:
        (num_tokens, intermediate).
    """
    if not isinstance(weight, PackedWeight) or weight.activation is None:
        return _GATES[activation](linear(x, weight, bias))
    assert weight.activation == activation, f"the weight was packed for {weight.activation}, not for {activation}"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, weight is {weight.dtype}"
    y = torch.empty((x.shape[0], weight.out_features // 2), dtype=x.dtype)
    linear_native(x, weight, bias, None, y)
    return y


def _by_panels(rows: torch.Tensor, half: int) -> torch.Tensor:
    """The first half of ``rows`` and the second, ``half`` rows in turns; a copy."""
    return rows.view(2, -1, half, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
