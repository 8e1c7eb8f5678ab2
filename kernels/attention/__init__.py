"""Attention backends: ``get_attention_backend`` picks one by what the machine can do, or by name."""

import torch

from kernels.attention.base import AttentionBackend, AttentionMetadata
from kernels.capabilities import probe_capabilities
from kernels.native.build import NativeBuildError
from kernels.native.library import NATIVE_DTYPES, NativeKernels, load_kernels, native_kernels

__all__ = ("ATTENTION_BACKENDS", "AttentionBackend", "AttentionMetadata", "get_attention_backend")

ATTENTION_BACKENDS = ("reference", "sdpa", "tiled", "native")


def get_attention_backend(
    name: str | None = None, *, device: torch.device | str = "cpu", dtype: torch.dtype
) -> AttentionBackend:
    """The backend ``name``, or without one the fastest for this device and dtype. Backends are imported late.

    Raises:
        ValueError: no such backend, or it cannot compute this dtype on this device.
    """
    device = torch.device(device)
    if name is None:
        name = _default_backend(device, dtype)
    if name == "native":
        from kernels.attention.native import NativeAttention

        return NativeAttention(_native_kernels(device, dtype))
    if name == "sdpa":
        from kernels.attention.sdpa import SdpaAttention

        return SdpaAttention()
    if name == "tiled":
        from kernels.attention.tiled import TiledAttention

        return TiledAttention()
    if name == "reference":
        from kernels.attention.reference import ReferenceAttention

        return ReferenceAttention()
    raise ValueError(f"unknown attention backend {name!r}; there are {', '.join(ATTENTION_BACKENDS)}")


def _default_backend(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cpu" and dtype in NATIVE_DTYPES and native_kernels() is not None:
        return "native"
    is_native_bf16 = device.type == "cpu" and dtype == torch.bfloat16 and probe_capabilities().has_cpu_bf16
    return "tiled" if is_native_bf16 else "sdpa"


def _native_kernels(device: torch.device, dtype: torch.dtype) -> NativeKernels:
    if device.type != "cpu" or dtype not in NATIVE_DTYPES:
        raise ValueError(f"native attention computes fp32 and bf16 on a CPU, not {dtype} on {device.type}")
    kernels = native_kernels()
    if kernels is not None:
        return kernels
    try:
        return load_kernels()
    except NativeBuildError as error:
        raise ValueError(f"no native attention: {error}") from error
