"""What this machine can compute fast, probed once per process."""

import functools
import importlib.util
from dataclasses import dataclass

import torch

from kernels.native.build import find_compiler


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts that the choice of a backend or a dtype depends on."""

    has_cuda: bool
    has_cpu_bf16: bool
    """The processor multiplies bf16 in hardware (AVX-512 BF16 or AMX), so bf16 is the faster dtype on it."""
    has_compiler: bool
    """There is a C++ compiler, so that the native CPU kernels can be built."""
    has_triton: bool
    has_flash_attn: bool


@functools.cache
def probe_capabilities() -> Capabilities:
    """Look at processor, devices and installed packages; nothing is imported for it."""
    return Capabilities(
        has_cuda=torch.cuda.is_available(),
        has_cpu_bf16=_has_cpu_bf16(),
        has_compiler=find_compiler() is not None,
        has_triton=importlib.util.find_spec("triton") is not None,
        has_flash_attn=importlib.util.find_spec("flash_attn") is not None,
    )


def _has_cpu_bf16() -> bool:
    """Older torch has no public question for it, so ask the private ones where they exist."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(probe()) for name in probes if (probe := getattr(torch.cpu, name, None)) is not None)


def default_dtype(device: torch.device) -> torch.dtype:
    """The dtype that ``auto`` means: bf16 where ``device`` computes it natively, else fp32."""
    capabilities = probe_capabilities()
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if capabilities.has_cpu_bf16 else torch.float32
