"""Whether the Triton kernels compute a tensor, without importing ``triton`` to find out.

``FIRSTTOKEN_TRITON=off`` leaves a GPU to torch. With ``TRITON_INTERPRET=1`` Triton runs its kernels by numpy, on CPU
tensors as well: far too slow to serve, right for finding a fault and for tests without a GPU.
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator

import torch

_VARIABLE = "FIRSTTOKEN_TRITON"
TRITON_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What the kernels compute, int8 and fp8 weights apart."""
# Triton compiles for Volta and later.
_MIN_COMPUTE_CAPABILITY = 7

_override: list[bool] = []


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels; read as Triton itself reads it, when they are first imported."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def has_triton() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _runs_on_gpu() -> bool:
    """Installed, not switched off, and a GPU that it compiles for.

    Raises:
        ValueError: the variable has a value that means nothing.
    """
    wanted = os.environ.get(_VARIABLE, "").strip().lower()
    if wanted not in ("", "on", "off", "1", "0"):
        raise ValueError(f"{_VARIABLE} is {wanted!r}; there are on, off")
    if wanted in ("off", "0") or not has_triton() or not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= _MIN_COMPUTE_CAPABILITY


def has_triton_for(device: torch.device) -> bool:
    """Whether the kernels run on ``device``; on a CPU under the interpreter only."""
    if device.type == "cuda":
        return _runs_on_gpu()
    return device.type == "cpu" and has_triton() and is_interpreted()


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether an op on this tensor goes to the Triton kernels by itself: on GPUs, or as ``using_triton`` says."""
    if tensor.dtype not in TRITON_DTYPES:
        return False
    if _override:
        return _override[-1]
    return tensor.is_cuda and _runs_on_gpu()


@contextlib.contextmanager
def using_triton(enabled: bool) -> Iterator[None]:
    """Make the whole process use the Triton kernels for a while, on a CPU too, or leave them; for tests and benches."""
    assert not enabled or has_triton(), "triton is not installed"
    _override.append(enabled)
    try:
        yield
    finally:
        _override.pop()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Programs that ``device`` runs side by side at least; 1 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
