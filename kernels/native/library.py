"""Loads the C++ kernels, once per process, and calls them with tensors.

``FIRSTTOKEN_NATIVE`` overrides what is chosen: ``off`` for none, or the name of an instruction set (``portable``,
``avx2``, ``avx512``, ``avx512_vnni``, ``avx512_bf16``).
"""

import contextlib
import ctypes
import functools
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kernels.native.build import NativeBuildError, build_library

logger = logging.getLogger(__name__)

Activation = Literal["silu", "gelu_tanh"]
ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
_VARIABLE = "FIRSTTOKEN_NATIVE"
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2}
"""How the kernels name what is applied to the gate of a gated product; 0 is no gate."""
NATIVE_DTYPES = frozenset(_DTYPES)
"""What the kernels compute."""
_OUT_OF_MEMORY = 1

_pointer, _int64, _int32, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_double = ctypes.c_double


def _fields(text: str) -> list[tuple[str, Any]]:
    """``"p q; i64 stride"`` to the fields of a ctypes structure."""
    kinds = {"p": _pointer, "i64": _int64, "i32": _int32, "f": _float, "d": _double}
    fields = []
    for part in text.split(";"):
        kind, *names = part.replace(",", " ").split()
        fields += [(name, kinds[kind]) for name in names]
    return fields


class AttentionArgs(ctypes.Structure):
    """``FtAttention`` of abi.h."""

    _fields_ = _fields(
        "p q, k_cache, v_cache, out, block_tables, cu_seqlens_q, seq_lens;"
        "i64 q_token_stride, q_head_stride, table_stride;"
        "i32 num_seqs, num_heads, num_kv_heads, head_dim, block_size, dtype, window, num_threads; f scale, soft_cap"
    )


class RmsNormArgs(ctypes.Structure):
    """``FtRmsNorm`` of abi.h."""

    _fields_ = _fields(
        "p x, delta, weight, y; i64 num_rows, x_stride, delta_stride, hidden; i32 dtype, num_threads; f eps"
    )


class RotaryStoreArgs(ctypes.Structure):
    """``FtRotaryStore`` of abi.h."""

    _fields_ = _fields(
        "p q, k, v, cos, sin, q_norm, k_norm, k_cache, v_cache, slots; i64 num_tokens, q_token_stride, q_head_stride,"
        "k_token_stride, k_head_stride, v_token_stride, v_head_stride; i32 num_heads, num_kv_heads, head_dim, dtype,"
        "num_threads; f eps"
    )


class GatedMulArgs(ctypes.Structure):
    """``FtGatedMul`` of abi.h."""

    _fields_ = _fields("p gate_up, y; i64 num_rows, inner, row_stride; i32 dtype, activation, num_threads")


class LinearArgs(ctypes.Structure):
    """``FtLinear`` of abi.h."""

    _fields_ = _fields(
        "p x, weight, scales, sums, bias, addend, y; i64 num_rows, x_stride, in_features, out_features;"
        "i32 dtype, activation, num_threads"
    )


class PackArgs(ctypes.Structure):
    """``FtPack`` of abi.h."""

    _fields_ = _fields("p weight, packed, scales, sums; i64 in_features, out_features; i32 dtype, num_threads")


class WeightArgs(ctypes.Structure):
    """``FtWeight`` of abi.h."""

    _fields_ = _fields("p data, scales, sums, bias; i64 in_features, out_features")


class DecoderLayerArgs(ctypes.Structure):
    """``FtDecoderLayer`` of abi.h."""

    _fields_ = [
        *_fields("p input_norm, q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm"),
        *((name, WeightArgs) for name in ("qkv", "o", "gate_up", "down")),
        *_fields("p k_cache, v_cache; i32 window, is_local"),
    ]


class DecoderTimes(ctypes.Structure):
    """``FtDecoderTimes`` of abi.h."""

    _fields_ = _fields("d products, attention, norms, rotary")


class DecoderArgs(ctypes.Structure):
    """``FtDecoder`` of abi.h."""

    _fields_ = _fields(
        "p layers, residual, out, workspace, cos, sin, local_cos, local_sin, slots, block_tables, cu_seqlens_q,"
        "seq_lens, output_rows, times; i64 num_layers, num_tokens, num_output_rows, hidden, inner, table_stride;"
        "i32 num_seqs, num_heads, num_kv_heads, head_dim, block_size, dtype, activation, num_threads;"
        "f scale, soft_cap, eps"
    )


_KERNELS = {
    "attention": AttentionArgs,
    "rms_norm": RmsNormArgs,
    "rotary_store": RotaryStoreArgs,
    "gated_mul": GatedMulArgs,
    "linear_bf16": LinearArgs,
    "pack_bf16": PackArgs,
    "linear_int8": LinearArgs,
    "pack_int8": PackArgs,
    "decoder": DecoderArgs,
}


class _KernelTable(ctypes.Structure):
    """``FtKernels`` of abi.h."""

    _fields_ = [("isa", ctypes.c_char_p), ("panel", _int64), *((name, _pointer) for name in _KERNELS)]


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The kernels of one instruction set."""

    isa: str
    panel: int
    """Output channels that packed weights are padded to a multiple of."""
    functions: dict[str, Any]
    """Name to C function; those that this instruction set lacks are missing."""

    def has(self, name: str) -> bool:
        """Whether this build has a kernel of that name."""
        return name in self.functions

    def call(self, name: str, arguments: ctypes.Structure) -> None:
        """Run one kernel; the tensors behind ``arguments`` must live until it returns.

        Raises:
            MemoryError: no scratch memory.
        """
        status = self.functions[name](ctypes.byref(arguments))
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"no memory for the buffers of {name}")
        assert status == 0, f"{name} returned {status}"


@functools.cache
def load_kernels(isa: str | None = None) -> NativeKernels:
    """The kernels of ``isa``, by default the best of this processor. Builds the library if need be.

    Raises:
        NativeBuildError: they cannot be built, or this processor or build has no such instruction set.
    """
    if sys.platform == "win32":
        raise NativeBuildError("the CPU kernels are built on Linux and macOS only")
    path = build_library()
    try:
        library = ctypes.CDLL(str(path))
        find = library.ft_find_kernels
    except (OSError, AttributeError) as error:
        raise NativeBuildError(f"cannot load {path}: {error}") from error
    find.restype = ctypes.POINTER(_KernelTable)
    find.argtypes = [ctypes.c_char_p]
    table = find(None if isa is None else isa.encode())
    if not table:
        raise NativeBuildError(f"this processor or build has no kernels for {isa!r}; there are {', '.join(ISAS)}")
    functions = {}
    for name, arguments in _KERNELS.items():
        address = getattr(table.contents, name)
        if address:
            functions[name] = ctypes.CFUNCTYPE(_int32, ctypes.POINTER(arguments))(address)
    return NativeKernels(isa=table.contents.isa.decode(), panel=table.contents.panel, functions=functions)


def native_kernels() -> NativeKernels | None:
    """The kernels that this process uses, or ``None`` with the reason in the log. Follows ``FIRSTTOKEN_NATIVE``."""
    return _override[-1] if _override else _configured_kernels()


@contextlib.contextmanager
def using_kernels(kernels: NativeKernels | None) -> Iterator[None]:
    """Make the whole process use other kernels for a while, or none; for tests and benches.

    Weights that were packed and attention backends that were made before keep theirs.
    """
    _override.append(kernels)
    try:
        yield
    finally:
        _override.pop()


_override: list[NativeKernels | None] = []


@functools.cache
def _configured_kernels() -> NativeKernels | None:
    wanted = os.environ.get(_VARIABLE, "").strip().lower()
    if wanted in ("off", "0", "none"):
        return None
    if wanted and wanted not in ISAS:
        raise ValueError(f"{_VARIABLE} is {wanted!r}; there are off, {', '.join(ISAS)}")
    try:
        return load_kernels(wanted or None)
    except NativeBuildError as error:
        if wanted:
            raise
        logger.warning("no native CPU kernels, torch's are used: %s", error)
        return None


def dtype_code(dtype: torch.dtype) -> int:
    """How the kernels name a dtype; ``KeyError`` for one they do not compute."""
    return _DTYPES[dtype]


def kernels_for(tensor: torch.Tensor) -> NativeKernels | None:
    """The kernels for this tensor's device and dtype, or ``None`` where torch has to do it."""
    return native_kernels() if tensor.device.type == "cpu" and tensor.dtype in _DTYPES else None
