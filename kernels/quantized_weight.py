"""Weights on a grid per output channel, for the GPU kernels; on its own so that holding one needs no Triton."""

from dataclasses import dataclass
from typing import Literal

import torch

QuantizedKind = Literal["int8", "fp8"]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight that only ``kernels.triton_kernels.quantized_linear`` can read."""

    kind: QuantizedKind
    data: torch.Tensor
    """(out_features, in_features), int8 or fp8 e4m3, contiguous."""
    scales: torch.Tensor
    """(out_features,), fp32."""
    dtype: torch.dtype
    """Of inputs and outputs."""
