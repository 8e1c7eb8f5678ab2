"""What the kernel tests share: native kernels per instruction set, skipped where this machine has none."""

import pytest
import torch

from kernels.attention import AttentionBackend, get_attention_backend
from kernels.attention.native import NativeAttention
from kernels.native.build import NativeBuildError, find_compiler
from kernels.native.library import NativeKernels, load_kernels

# The others have tests of their own: GPUs, or an interpreter that is too slow for all of these.
CPU_BACKENDS = ("reference", "sdpa", "tiled", "native")


def get_kernels(isa: str | None = None) -> NativeKernels:
    """The native kernels of ``isa``; skips the test where the machine cannot build or run them."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    try:
        return load_kernels(isa)
    except NativeBuildError as error:
        if isa is None:
            raise
        pytest.skip(str(error))


def get_backend(name: str, dtype: torch.dtype, isa: str | None = None) -> AttentionBackend:
    """An attention backend by name; ``isa`` forces the instruction set of the native one."""
    if name == "native":
        return NativeAttention(get_kernels(isa))
    return get_attention_backend(name, dtype=dtype)
