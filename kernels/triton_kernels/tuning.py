"""Tile sizes and launch settings of the kernels, read from ``configs.json`` beside this file.

The file maps a kernel to devices, a device to shape classes, a class to a configuration::

    {"prefill": {"default": {"d64_16": {"block_m": 128, "block_n": 64, "num_warps": 4, "num_stages": 3}, ...},
                 "NVIDIA H100": {"d128_16": {...}}}}

A device is found by the longest of the file's names that its own name contains; what it has no entry for comes from
``default``. ``FIRSTTOKEN_TRITON_CONFIGS`` names a file of the same form whose entries come before these; ``tuner``
writes one for the GPU at hand. The entries here are starting points that fit the memory of the device, not the outcome
of a search.
"""

import functools
import os
from pathlib import Path

import msgspec
import torch

from kernels.triton_kernels.runtime import is_interpreted

_FILE = Path(__file__).with_name("configs.json")
_VARIABLE = "FIRSTTOKEN_TRITON_CONFIGS"
_DEFAULT = "default"
# Blocks so small that tests cross their borders, and numpy still has whole tiles to work on.
_INTERPRETER = "interpreter"


class KernelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one kernel is launched; blocks that it does not have stay at 0."""

    block_m: int = 0
    """Rows of a tile."""
    block_n: int = 0
    """Keys of a tile, or output channels."""
    block_k: int = 0
    """Input channels read at a time."""
    num_warps: int = 4
    num_stages: int = 2
    """Loads under way while a tile is computed."""

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = getattr(self, name)
            if value and (value < 0 or value & (value - 1)):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if not 1 <= self.num_warps <= 32:
            raise ValueError(f"num_warps must be 1 to 32, got {self.num_warps}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be 1 to 8, got {self.num_stages}")


ConfigTable = dict[str, dict[str, dict[str, KernelConfig]]]
"""Kernel, device, shape class."""


def find_config(kernel: str, shape_class: str, device: torch.device) -> KernelConfig:
    """The configuration of ``kernel`` for a shape class on ``device``."""
    name = _INTERPRETER if is_interpreted() else _device_name(device)
    return _find(kernel, shape_class, name, os.environ.get(_VARIABLE, ""))


def attention_class(head_dim: int, dtype: torch.dtype) -> str:
    """Classes of attention: the head size as it is padded, and the bits of an element."""
    padded = next((size for size in (64, 128) if head_dim <= size), 256)
    return f"d{padded}_{8 * dtype.itemsize}"


def matmul_class(num_rows: int) -> str:
    """Classes of matrix products: how many rows the input has."""
    return next((f"m{limit}" for limit in (16, 64) if num_rows <= limit), "m128")


def read_configs(path: Path) -> ConfigTable:
    """Read a file of configurations.

    Raises:
        ValueError: it cannot be read, or holds something else; says where.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=ConfigTable)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"Triton configurations in {path.name}: {error}") from error


def find_in(tables: list[ConfigTable], kernel: str, shape_class: str, device_name: str) -> KernelConfig:
    """The first table that knows the device decides, then the first that has a default.

    Raises:
        ValueError: no table has the kernel or the shape class.
    """
    for table in tables:
        devices = table.get(kernel, {})
        for name in sorted((name for name in devices if name in device_name), key=len, reverse=True):
            if shape_class in devices[name]:
                return devices[name][shape_class]
    for table in tables:
        found = table.get(kernel, {}).get(_DEFAULT, {}).get(shape_class)
        if found is not None:
            return found
    raise ValueError(f"no Triton configuration of {kernel!r} for {shape_class!r}")


@functools.cache
def _find(kernel: str, shape_class: str, device_name: str, extra_file: str) -> KernelConfig:
    tables = [read_configs(Path(extra_file))] if extra_file else []
    return find_in([*tables, read_configs(_FILE)], kernel, shape_class, device_name)


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _INTERPRETER
