"""What this machine can compute fast, probed once per process."""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.native.build import find_compiler
from kernels.triton_kernels.runtime import has_triton


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts that the choice of a backend or a dtype depends on."""

    has_cuda: bool
    has_cpu_bf16: bool
    """The processor multiplies bf16 in hardware (AVX-512 BF16 or AMX), so bf16 is the faster dtype on it."""
    has_compiler: bool
    """There is a C++ compiler, so that the native CPU kernels can be built."""
    has_triton: bool
    """The package is there; whether it runs on a device, ``has_triton_for`` says."""
    flash_attn_version: int | None
    """2, 3 or 4: the newest flash-attn package for this GPU, none without one."""


@functools.cache
def probe_capabilities() -> Capabilities:
    """Look at processor, devices and installed packages; nothing is imported for it."""
    return Capabilities(
        has_cuda=torch.cuda.is_available(),
        has_cpu_bf16=_has_cpu_bf16(),
        has_compiler=find_compiler() is not None,
        has_triton=has_triton(),
        flash_attn_version=_flash_attn_version(),
    )


def _has_cpu_bf16() -> bool:
    """Older torch has no public question for it, so ask the private ones where they exist."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(probe()) for name in probes if (probe := getattr(torch.cpu, name, None)) is not None)


def _flash_attn_version() -> int | None:
    """By the modules that the packages install: version 3 has one of its own, 4 is a subpackage of version 2's."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    major = torch.cuda.get_device_capability()[0]
    package = importlib.util.find_spec("flash_attn")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    if major == 9 and importlib.util.find_spec("flash_attn_interface") is not None:
        return 3
    if major in (9, 10) and any((Path(folder) / "cute").is_dir() for folder in folders):
        return 4
    # the parent of version 4 alone has no compiled kernels
    return 2 if major >= 8 and folders and importlib.util.find_spec("flash_attn_2_cuda") is not None else None


def default_dtype(device: torch.device) -> torch.dtype:
    """The dtype that ``auto`` means: bf16 where ``device`` computes it natively, else fp32."""
    capabilities = probe_capabilities()
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if capabilities.has_cpu_bf16 else torch.float32
