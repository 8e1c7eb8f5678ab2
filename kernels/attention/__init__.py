"""Attention backends: ``get_attention_backend`` picks one by what the machine can do, or by name."""

import logging

import torch

from kernels.attention.base import AttentionBackend, AttentionMetadata
from kernels.capabilities import probe_capabilities
from kernels.native.build import NativeBuildError
from kernels.native.library import NATIVE_DTYPES, NativeKernels, load_kernels, native_kernels
from kernels.triton_kernels.runtime import TRITON_DTYPES, has_triton_for

__all__ = ("ATTENTION_BACKENDS", "AttentionBackend", "AttentionMetadata", "get_attention_backend")

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("reference", "sdpa", "tiled", "native", "triton", "flash")


def get_attention_backend(
    name: str | None = None, *, device: torch.device | str = "cpu", dtype: torch.dtype
) -> AttentionBackend:
    """The backend ``name``, or without one the fastest for this device and dtype. Backends are imported late.

    Raises:
        ValueError: no such backend, or it cannot compute this dtype on this device.
    """
    device = torch.device(device)
    if name is None:
        return _default_backend(device, dtype)
    if name == "flash":
        return _flash_backend(device, dtype)
    if name == "triton":
        if not has_triton_for(device) or dtype not in TRITON_DTYPES:
            raise ValueError(
                f"triton attention computes fp32, bf16 and fp16 on a GPU that Triton compiles for, not {dtype} on "
                f"{device.type}; on a CPU it needs TRITON_INTERPRET=1"
            )
        from kernels.attention.triton import TritonAttention

        return TritonAttention()
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


def _default_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """On a GPU flash, triton, sdpa; on a CPU native, tiled, sdpa: the first that can."""
    if device.type == "cuda":
        try:
            return _flash_backend(device, dtype)
        except ValueError as error:
            logger.info("no flash attention: %s", error)
        return get_attention_backend("triton" if has_triton_for(device) else "sdpa", device=device, dtype=dtype)
    if device.type == "cpu" and dtype in NATIVE_DTYPES and native_kernels() is not None:
        return get_attention_backend("native", device=device, dtype=dtype)
    is_native_bf16 = device.type == "cpu" and dtype == torch.bfloat16 and probe_capabilities().has_cpu_bf16
    return get_attention_backend("tiled" if is_native_bf16 else "sdpa", device=device, dtype=dtype)


def _flash_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    from kernels.attention.flash import FLASH_DTYPES, FlashAttention, load_flash_package

    version = probe_capabilities().flash_attn_version
    if device.type != "cuda" or dtype not in FLASH_DTYPES:
        raise ValueError(f"flash attention computes bf16 and fp16 on a GPU, not {dtype} on {device.type}")
    if version is None:
        raise ValueError("there is no flash-attn package for this GPU")
    try:
        package = load_flash_package(version)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"flash-attn {version} cannot be imported: {error}") from error
    name = "triton" if has_triton_for(device) else "sdpa"
    return FlashAttention(package, get_attention_backend(name, device=device, dtype=dtype))


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
