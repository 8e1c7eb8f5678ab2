"""What the kernels share: rounding, matrix products and tanh, compiled or interpreted alike.

Triton's interpreter holds bf16 as its bits: it truncates where a GPU rounds, and multiplies the bits as integers. Its
fp8 conversion loses the carry. ``EMULATE`` puts that right; compiled, it is false and leaves no trace in the code.
"""

import os

import triton
import triton.language as tl

# Products and sums are fused as ever; some versions warn as long as nobody has said so.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@triton.jit
def narrow(x, dtype: tl.constexpr, EMULATE: tl.constexpr):
    """fp32 to ``dtype``, rounded to nearest even."""
    if EMULATE and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        # what is not finite keeps its bits
        bits = tl.where((bits & 0x7F800000) == 0x7F800000, bits, rounded)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def narrow_fp8(x, EMULATE: tl.constexpr):
    """fp32 within [-448, 448] to fp8 with 4 bits of exponent and 3 of mantissa, rounded to nearest even."""
    if EMULATE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        # below 2**-6 the grid is even, 2**-9 wide: the sum has no bits left for less
        even = (x + 24576.0) - 24576.0
        x = tl.where(tl.abs(x) < 0.015625, even, rounded)
    return x.to(tl.float8e4nv)


@triton.jit
def dot(a, b, EMULATE: tl.constexpr):
    """The matrix product in fp32, of fp32 without the shortcut through tf32."""
    if EMULATE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def tanh(x):
    """By one exponential, which cannot overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -magnitude, magnitude)
