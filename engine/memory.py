"""How much memory is still free: of the machine, of the container that the process runs in, or of a GPU."""

from pathlib import Path

import torch

_UNKNOWN_FREE_BYTES = 4 << 30
"""Where the system does not say: half of a small machine."""
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(device: torch.device | str = "cpu", *, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be allocated now without swapping, and without passing the limit of the container.

    Args:
        device: of a GPU its own memory is told.
        proc: where the kernel tells of the machine.
        cgroup: where it tells of the container (version 2 of the interface).
    """
    if torch.device(device).type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes)
    free = [bytes_ for bytes_ in (_free_of_machine(proc), _free_of_container(cgroup)) if bytes_ is not None]
    return max(0, min(free, default=_UNKNOWN_FREE_BYTES))


def _free_of_machine(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeError):
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_of_container(cgroup: Path) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = (cgroup / "memory.current").read_text(encoding="ascii").strip()
        inactive = _inactive_file_bytes((cgroup / "memory.stat").read_text(encoding="ascii"))
    except (OSError, UnicodeError):
        return None
    # Pages of files that nobody uses count as used, but are given back when memory is short.
    return None if limit == "max" else int(limit) - int(used) + inactive


def _inactive_file_bytes(stat: str) -> int:
    return next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
