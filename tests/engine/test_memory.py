"""What counts as free memory: the machine's, unless the container has less."""

from pathlib import Path

import pytest

from engine.memory import free_memory_bytes

MEMINFO = "MemTotal:       8000000 kB\nMemFree:        1000000 kB\nMemAvailable:   4000000 kB\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "meminfo").write_text(MEMINFO)
    return folder


def container(tmp_path: Path, limit: str, used: int, inactive_file: int = 0) -> Path:
    folder = tmp_path / "cgroup"
    folder.mkdir()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")
    return folder


def test_what_the_kernel_calls_available_is_free(proc: Path, tmp_path: Path) -> None:
    assert free_memory_bytes(proc=proc, cgroup=tmp_path / "none") == 4_000_000 * 1024
    assert free_memory_bytes(proc=proc, cgroup=container(tmp_path, "max", 5)) == 4_000_000 * 1024


def test_limit_of_the_container_counts_and_its_idle_file_pages_are_free(proc: Path, tmp_path: Path) -> None:
    assert free_memory_bytes(proc=proc, cgroup=container(tmp_path, "1000000", 700_000, 200_000)) == 500_000


def test_full_container_has_nothing_free(proc: Path, tmp_path: Path) -> None:
    assert free_memory_bytes(proc=proc, cgroup=container(tmp_path, "1000", 2000)) == 0


def test_system_that_says_nothing_has_a_little(tmp_path: Path) -> None:
    assert free_memory_bytes(proc=tmp_path, cgroup=tmp_path) == 4 << 30


def test_this_machine_has_some() -> None:
    assert free_memory_bytes() > 1 << 20
