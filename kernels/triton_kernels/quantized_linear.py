"""``y = x W^T + b`` with int8 or fp8 weights per output channel and inputs rounded per row as they come.

    scale[row] = max|row| / 127 (int8) or 448 (fp8 e4m3)      y = (x_q W_q^T) * x_scale[row] * w_scale[channel] + b

torch has an int8 product without scales and, on some GPUs, an fp8 one; this one takes any number of rows and channels
and applies scales, bias and the addition to the residual before anything is written.
"""

import torch
import triton
import triton.language as tl

from kernels.quantized_weight import QuantizedKind, QuantizedWeight
from kernels.triton_kernels.numerics import narrow, narrow_fp8
from kernels.triton_kernels.runtime import is_interpreted
from kernels.triton_kernels.tuning import KernelConfig, find_config, matmul_class

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Triton has fp8 with 4 bits of exponent from Ada and Hopper on.
_MIN_FP8_CAPABILITY = (8, 9)
MAX_IN_FEATURES = 65536
"""Longest row that is quantized by one program."""
# Tiles of this many row blocks are computed before the next channels, so that weights stay in the L2 cache.
_ROW_BLOCKS_TOGETHER = 8


@triton.jit
def quantize_rows_kernel(
    x, quantized, scales, x_stride, num_columns, LARGEST: tl.constexpr, PADDED: tl.constexpr, IS_FP8: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    """One row to its grid, rounded to nearest even."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    mask = columns < num_columns
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    # a row of zeros has no grid
    inverse = tl.where(largest > 0.0, LARGEST / tl.where(largest > 0.0, largest, 1.0), 0.0)
    scaled = tl.minimum(tl.maximum(values * inverse, -LARGEST), LARGEST)
    if IS_FP8:  # noqa: SIM108, the halves differ in type
        rounded = narrow_fp8(scaled, EMULATE)
    else:
        # the sum has no bits left for fractions
        rounded = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    tl.store(quantized + row * num_columns + columns, rounded, mask=mask)
    tl.store(scales + row, largest / LARGEST)


@triton.jit
def quantized_matmul_kernel(
    x,
    weight,
    x_scales,
    weight_scales,
    bias,
    addend,
    y,
    num_rows,
    num_channels,
    num_inputs,
    y_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One tile of the product, with the scales, the bias and the addend."""
    program = tl.program_id(0)
    blocks_m = tl.cdiv(num_rows, BLOCK_M)
    blocks_n = tl.cdiv(num_channels, BLOCK_N)
    first_m = program // (GROUP_M * blocks_n) * GROUP_M
    group = tl.minimum(blocks_m - first_m, GROUP_M)
    within = program % (GROUP_M * blocks_n)
    rows = (first_m + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = (within // group) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    x_rows = x + rows[:, None].to(tl.int64) * num_inputs
    weight_columns = weight + channels[None, :].to(tl.int64) * num_inputs
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32 if IS_FP8 else tl.int32)
    for start in range(0, num_inputs, BLOCK_K):
        columns = start + inputs
        x_mask = (rows[:, None] < num_rows) & (columns[None, :] < num_inputs)
        w_mask = (channels[None, :] < num_channels) & (columns[:, None] < num_inputs)
        if IS_FP8:
            a = tl.load(x_rows + columns[None, :], mask=x_mask, other=0.0)
            b = tl.load(weight_columns + columns[:, None], mask=w_mask, other=0.0)
        else:
            a = tl.load(x_rows + columns[None, :], mask=x_mask, other=0)
            b = tl.load(weight_columns + columns[:, None], mask=w_mask, other=0)
        acc = tl.dot(a, b, acc)
    row_scales = tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)
    channel_scales = tl.load(weight_scales + channels, mask=channels < num_channels, other=0.0)
    product = acc.to(tl.float32) * row_scales[:, None] * channel_scales[None, :]
    if HAS_BIAS:
        product += tl.load(bias + channels, mask=channels < num_channels, other=0.0).to(tl.float32)[None, :]
    mask = (rows[:, None] < num_rows) & (channels[None, :] < num_channels)
    offsets = rows[:, None].to(tl.int64) * y_stride + channels[None, :]
    if HAS_ADDEND:
        product += tl.load(addend + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + offsets, narrow(product, y.dtype.element_ty, EMULATE), mask=mask)


def can_quantize(kind: QuantizedKind, device: torch.device) -> bool:
    """Whether ``device`` has the arithmetic; the interpreter has it all."""
    if kind == "int8" or device.type != "cuda" or torch.version.hip is not None:
        return kind == "int8" or device.type != "cuda"
    return torch.cuda.get_device_capability(device) >= _MIN_FP8_CAPABILITY


def quantize_rows(x: torch.Tensor, kind: QuantizedKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Round every row to its own grid.

    Args:
        x: (num_rows, num_columns), last dimension contiguous.
        kind: of the grid.

    Returns:
        (num_rows, num_columns), int8 or fp8, and the scales, (num_rows,), fp32: ``x`` is about the one times the other.
    """
    num_rows, num_columns = x.shape
    assert x.stride(1) == 1, "rows must be dense"
    assert num_columns <= MAX_IN_FEATURES, f"rows must have at most {MAX_IN_FEATURES} elements, got {num_columns}"
    quantized = torch.empty((num_rows, num_columns), dtype=_DTYPES[kind], device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        padded = triton.next_power_of_2(num_columns)
        quantize_rows_kernel[(num_rows,)](
            x,
            quantized,
            scales,
            x.stride(0),
            num_columns,
            LARGEST=_LARGEST[kind],
            PADDED=padded,
            IS_FP8=kind == "fp8",
            EMULATE=is_interpreted(),
            num_warps=min(16, max(4, padded // 1024)),
        )
    return quantized, scales


def quantize_weight(weight: torch.Tensor, kind: QuantizedKind) -> QuantizedWeight:
    """A copy of ``weight``, (out_features, in_features), rounded per output channel."""
    data, scales = quantize_rows(weight.contiguous(), kind)
    return QuantizedWeight(kind, data, scales, weight.dtype)


def quantized_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    config: KernelConfig | None = None,
) -> torch.Tensor:
    """Multiply every row of ``x``; with an ``addend`` the sum goes into it, with one rounding.

    Args:
        x: (num_rows, in_features), ``weight.dtype``.
        bias: (out_features,), contiguous.
        addend: (num_rows, out_features), contiguous, or ``None`` for a new tensor.
        config: tile sizes; by default those of the file.

    Returns:
        (num_rows, out_features): ``addend``, or a new tensor.
    """
    out_features, in_features = weight.data.shape
    num_rows = x.shape[0]
    assert x.shape == (num_rows, in_features), f"x {tuple(x.shape)} for {in_features} features"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, weight is {weight.dtype}"
    assert addend is None or (addend.shape == (num_rows, out_features) and addend.is_contiguous()), (
        "addend does not fit"
    )
    y = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device) if addend is None else addend
    if num_rows == 0:
        return y
    quantized, scales = quantize_rows(x if x.stride(1) == 1 else x.contiguous(), weight.kind)
    if config is None:
        config = find_config("quantized_matmul", matmul_class(num_rows), x.device)
    grid = (triton.cdiv(num_rows, config.block_m) * triton.cdiv(out_features, config.block_n),)
    quantized_matmul_kernel[grid](
        quantized,
        weight.data,
        scales,
        weight.scales,
        weight.scales if bias is None else bias,
        y,
        y,
        num_rows,
        out_features,
        in_features,
        y.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=_ROW_BLOCKS_TOGETHER,
        IS_FP8=weight.kind == "fp8",
        HAS_BIAS=bias is not None,
        HAS_ADDEND=addend is not None,
        EMULATE=is_interpreted(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y
