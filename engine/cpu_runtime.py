"""Process-wide settings that make torch fast on a CPU; the engine process applies them once at its start."""

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Sequence

import torch

# malloc.h of glibc
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30
_SMALLER = 32 << 20


def configure_cpu_runtime(num_threads: int | None) -> None:
    """Set the number of torch threads (``None`` leaves torch's own choice) and keep freed memory."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next allocation instead of giving it back to the system.

    A layer allocates and frees megabytes of activations, and every page that comes fresh from the system costs a
    fault: with 2,048 tokens in bf16, RMSNorm takes 3.3 ms with and 0.3 ms without them, the MLP's activation 4.0 and
    0.7 ms. The process keeps its peak size.

    Returns:
        Whether it took effect; other C libraries have no such setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Some builds cap the threshold and refuse more.
    has_threshold = any(mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in (_LARGE, _SMALLER))
    return bool(has_threshold and mallopt(_M_TRIM_THRESHOLD, _LARGE) == 1)


def lazy_zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Zeros that on a CPU cost memory and time only where they are touched, in large pages where there are any.

    ``torch.zeros`` writes everything at once: seconds for a KV cache of some GiB, most of which a quiet server never
    needs. The first touch in large pages costs a quarter of what it costs in pages of 4 KiB.

    Raises:
        MemoryError: the system does not grant so much address space.
    """
    if torch.device(device).type != "cpu" or not sys.platform.startswith("linux"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot reserve {num_bytes} bytes for a tensor of shape {tuple(shape)}: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
