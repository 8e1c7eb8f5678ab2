"""``y = x W^T + b`` with weights laid out once for the processor.

Five layouts, each read by one implementation only:

- ``native``: bf16 pairs for our own kernel, on processors that multiply them by AVX-512 and have no matrix unit (AMX).
  As fast as oneDNN for hundreds of tokens; for one or a few, as in decoding, it takes half to two thirds of the time.
- oneDNN's blocks. ``torch.nn.functional.linear`` hands it the plain matrix, which is reordered in every call, or (fp32)
  takes another library. For SmolLM2's output projection and one token, a packed matrix takes half the time in bf16 and
  40 % of it in fp32; for 1,024 tokens in fp32 40 %, in bf16 94 %.
- ``fp8``: weights as 8-bit floats, see ``kernels.fp8_linear``; saves memory only.
- ``int8`` and ``fp8`` on GPUs, both sides on grids, see ``kernels.triton_kernels.quantized_linear``.
- ``int8``: weights rounded to a grid per output channel, inputs as they come to one per ``INT8_GROUP`` features of a
  row. Half the memory and more speed than bf16, for a loss that has to be measured on the model: only where
  ``quantization="int8"`` asks for it. With one grid for a whole row SmolLM2-135M loses four times as much (divergence
  of the next token, nats: 0.039 against 0.010), and leaving the projections with the largest inputs in bf16 does not
  mend it (0.026).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from kernels.fp8_linear import Fp8Weight, linear_fp8, pack_fp8
from kernels.native.library import (
    ACTIVATIONS,
    Activation,
    LinearArgs,
    NativeKernels,
    PackArgs,
    dtype_code,
    kernels_for,
)
from kernels.quantized_weight import QuantizedWeight
from kernels.triton_kernels.runtime import uses_triton

# Rows of the input that oneDNN's layout is made for; measured, it serves 1 to 2,048 rows alike.
_PACK_ROWS = 512

Quantization = Literal["none", "int8", "fp8"]
INT8_GROUP = 64
"""Features of the input that share a scale; ``kGroup`` of gemm_int8.h."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in a layout of our own kernels."""

    kernels: NativeKernels
    kind: Literal["bf16", "int8"]
    data: torch.Tensor
    """Padded to whole panels of output channels; bf16 or int8."""
    in_features: int
    out_features: int
    dtype: torch.dtype
    """Of inputs and outputs."""
    scales: torch.Tensor | None = None
    """(padded out_features,), fp32, int8 only."""
    sums: torch.Tensor | None = None
    """(padded out_features * groups of in_features,), int32, int8 only: what the offset of the inputs adds."""
    activation: Activation | None = None
    """Of a gated product, see ``kernels.gated_linear``."""


Weight = torch.Tensor | PackedWeight | Fp8Weight | QuantizedWeight
"""What ``linear`` takes: a plain matrix, or one from ``pack_weight``."""


def can_pack_weight(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a packed layout on this processor, with this torch and dtype."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not has_onednn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_weight(weight: torch.Tensor, quantization: Quantization = "none") -> Weight:
    """A copy of ``weight`` that only ``linear`` can read, or ``weight`` itself where packing is not possible.

    Args:
        weight: (out_features, in_features).
        quantization: ``int8`` and ``fp8`` round the weights, see above.

    Raises:
        ValueError: ``int8`` without native or Triton kernels, or for another dtype than fp32 and bf16; ``fp8``
            where torch has no such dtype.
    """
    assert weight.dim() == 2, f"weight must be a matrix, got {tuple(weight.shape)}"
    if quantization != "none" and uses_triton(weight):
        from kernels.triton_kernels import quantized_linear

        if quantized_linear.can_quantize(quantization, weight.device):
            return quantized_linear.quantize_weight(weight, quantization)
    if quantization == "fp8":
        return pack_fp8(weight)
    kernels = kernels_for(weight)
    if quantization == "int8":
        if kernels is None:
            raise ValueError(f"int8 weights need the native CPU kernels and fp32 or bf16, not {weight.dtype}")
        return _pack_int8(kernels, weight)
    if kernels is not None and weight.dtype == torch.bfloat16 and kernels.has("linear_bf16") and not _has_amx():
        return _pack_bf16(kernels, weight)
    if not can_pack_weight(weight):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    return packed


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply every row of ``x``.

    Args:
        x: (num_tokens, in_features), dtype of ``weight``.
        weight: (out_features, in_features), plain or from ``pack_weight``.
        bias: (out_features,), dtype of ``x``.

    Returns:
        (num_tokens, out_features).
    """
    assert x.dtype == weight.dtype, f"x is {x.dtype}, weight is {weight.dtype}"
    if isinstance(weight, PackedWeight):
        assert weight.activation is None, "the weight of a gated product is read by gated_linear alone"
        y = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype)
        linear_native(x, weight, bias, None, y)
        return y
    if isinstance(weight, Fp8Weight):
        return linear_fp8(x, weight, bias)
    if isinstance(weight, QuantizedWeight):
        from kernels.triton_kernels.quantized_linear import quantized_linear

        return quantized_linear(x, weight, bias)
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def linear_add_(
    residual: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Add ``linear(x, weight, bias)`` to ``residual``, in place and with one rounding where the kernel is our own.

    Args:
        residual: (num_tokens, out_features), dtype of ``x``.

    Returns:
        ``residual``.
    """
    if isinstance(weight, QuantizedWeight) and residual.is_contiguous():
        from kernels.triton_kernels.quantized_linear import quantized_linear

        return quantized_linear(x, weight, bias, addend=residual)
    if not isinstance(weight, PackedWeight) or not residual.is_contiguous():
        residual += linear(x, weight, bias)
        return residual
    assert x.dtype == weight.dtype == residual.dtype, f"x is {x.dtype}, weight {weight.dtype}, sum {residual.dtype}"
    assert residual.shape == (x.shape[0], weight.out_features), f"residual {tuple(residual.shape)}, x {tuple(x.shape)}"
    linear_native(x, weight, bias, residual, residual)
    return residual


def linear_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The formula in fp32, for a plain weight; returns fp32."""
    y = torch.einsum("ti,oi->to", x.float(), weight.float())
    return y if bias is None else y + bias.float()


def linear_int8_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The int8 product by its definition: both sides rounded to their grids, then exact; returns fp32."""
    groups = F.pad(x.float(), (0, -x.shape[1] % INT8_GROUP)).view(x.shape[0], -1, INT8_GROUP)
    (a, x_scales), (q, w_scales) = _to_grid(groups), _to_grid(weight.float())
    y = (a * x_scales).flatten(1)[:, : x.shape[1]].double() @ (q * w_scales).double().T
    return y.float() if bias is None else y.float() + bias.float()


def _to_grid(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers up to 127, and the scale of each row."""
    largest = values.abs().amax(dim=-1, keepdim=True)
    steps = torch.where(largest > 0, (values * (torch.full_like(largest, 127) / largest)).round(), 0.0)
    return steps, largest / 127


def _has_amx() -> bool:
    """oneDNN multiplies with the matrix unit, which our kernel does not know."""
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return probe is not None and bool(probe())


def _padded(out_features: int, kernels: NativeKernels) -> int:
    return -(-out_features // kernels.panel) * kernels.panel


def _pack_bf16(kernels: NativeKernels, weight: torch.Tensor) -> PackedWeight:
    out_features, in_features = weight.shape
    weight = weight.contiguous()
    data = torch.empty(_padded(out_features, kernels) * (in_features + in_features % 2), dtype=torch.bfloat16)
    arguments = PackArgs(
        weight=weight.data_ptr(),
        packed=data.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        dtype=dtype_code(weight.dtype),
        num_threads=torch.get_num_threads(),
    )
    kernels.call("pack_bf16", arguments)
    return PackedWeight(kernels, "bf16", data, in_features, out_features, weight.dtype)


def _pack_int8(kernels: NativeKernels, weight: torch.Tensor) -> PackedWeight:
    out_features, in_features = weight.shape
    weight = weight.contiguous()
    num_padded = _padded(out_features, kernels)
    data = torch.empty(num_padded * (-(-in_features // 4) * 4), dtype=torch.int8)
    num_groups = -(-in_features // INT8_GROUP)
    scales, sums = torch.empty(num_padded), torch.empty(num_padded * num_groups, dtype=torch.int32)
    arguments = PackArgs(
        weight=weight.data_ptr(),
        packed=data.data_ptr(),
        scales=scales.data_ptr(),
        sums=sums.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        dtype=dtype_code(weight.dtype),
        num_threads=torch.get_num_threads(),
    )
    kernels.call("pack_int8", arguments)
    return PackedWeight(kernels, "int8", data, in_features, out_features, weight.dtype, scales, sums)


def linear_native(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """One product by our own kernel into ``y``; see ``linear_add_`` and ``kernels.gated_linear``."""
    assert x.shape == (x.shape[0], weight.in_features), f"x {tuple(x.shape)} for {weight.in_features} features"
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous()), "bias must be contiguous, in dtype of x"
    if x.stride(1) != 1:
        x = x.contiguous()
    arguments = LinearArgs(
        x=x.data_ptr(),
        weight=weight.data.data_ptr(),
        scales=None if weight.scales is None else weight.scales.data_ptr(),
        sums=None if weight.sums is None else weight.sums.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        addend=None if addend is None else addend.data_ptr(),
        y=y.data_ptr(),
        num_rows=x.shape[0],
        x_stride=x.stride(0),
        in_features=weight.in_features,
        out_features=weight.out_features,
        dtype=dtype_code(x.dtype),
        activation=0 if weight.activation is None else ACTIVATIONS[weight.activation],
        num_threads=torch.get_num_threads(),
    )
    weight.kernels.call(f"linear_{weight.kind}", arguments)
