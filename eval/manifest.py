"""What a result was made with: commit, command, settings, seed, device, versions, data and date.

Folders of this machine stay out of it: of every path only the file name is kept.
"""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from eval.datasets import Dataset

_PACKAGES = (
    "firsttoken",
    "torch",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "litestar",
    "msgspec",
    "numpy",
    "bm25s",
    "datasketch",
    "httpx",
)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that the client ran on; also the server's where the run started it."""

    processor: str
    num_cores: int
    """Cores this process may use."""
    memory_gib: float | None
    system: str


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """The data file and how much of it was used."""

    name: str
    sha256: str
    num_cases: int
    num_cases_in_file: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to run a result again."""

    date: str
    """UTC, ISO 8601."""
    command: list[str]
    commit: str | None
    """Of the checkout the code runs from; ``None`` outside a checkout."""
    has_local_changes: bool | None
    settings: dict[str, Any]
    seed: int
    config_name: str | None
    config_sha256: str | None
    """Of the gateway's configuration file, where one was named."""
    started_gateway: bool
    """The run started the gateway itself, so commit and versions are the gateway's too."""
    model: str
    max_model_len: int | None
    device: Device
    python: str
    versions: dict[str, str]
    data: DataFile


def make_manifest(
    *,
    dataset: Dataset,
    settings: Mapping[str, Any],
    seed: int,
    model: str,
    max_model_len: int | None,
    started_gateway: bool,
    config: Path | None = None,
    command: Sequence[str] | None = None,
) -> Manifest:
    """Collects the manifest of a run on ``dataset``; ``command`` is this process's command line by default."""
    commit, has_local_changes = _commit()
    return Manifest(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=_without_folders(sys.argv if command is None else command),
        commit=commit,
        has_local_changes=has_local_changes,
        settings=dict(settings),
        seed=seed,
        config_name=None if config is None else config.name,
        config_sha256=None if config is None else hashlib.sha256(config.read_bytes()).hexdigest(),
        started_gateway=started_gateway,
        model=model,
        max_model_len=max_model_len,
        device=_device(),
        python=platform.python_version(),
        versions=_versions(),
        data=DataFile(
            name=dataset.name,
            sha256=dataset.sha256,
            num_cases=len(dataset.cases),
            num_cases_in_file=dataset.num_cases_in_file,
        ),
    )


class MachineManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a result needs that used no data file: a bench of kernels or of the engine alone."""

    date: str
    """UTC, ISO 8601."""
    command: list[str]
    commit: str | None
    has_local_changes: bool | None
    settings: dict[str, Any]
    seed: int
    device: Device
    python: str
    versions: dict[str, str]


def make_machine_manifest(*, settings: Mapping[str, Any], seed: int) -> MachineManifest:
    """Collects the manifest of a run without data; the command is this process's command line."""
    commit, has_local_changes = _commit()
    return MachineManifest(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=_without_folders(sys.argv),
        commit=commit,
        has_local_changes=has_local_changes,
        settings=dict(settings),
        seed=seed,
        device=_device(),
        python=platform.python_version(),
        versions=_versions(),
    )


def _without_folders(command: Sequence[str]) -> list[str]:
    """``--data=/a/b.jsonl`` becomes ``--data=b.jsonl``; URLs and relative names without folders stay."""
    shortened = []
    for argument in command:
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        is_path = os.sep in value and "://" not in value
        shortened.append(option + equals + (Path(value).name if is_path else value))
    return _without_keys(shortened)


def _without_keys(command: list[str]) -> list[str]:
    hidden = list(command)
    for place, argument in enumerate(command):
        if argument == "--api-key" and place + 1 < len(command):
            hidden[place + 1] = "…"
        elif argument.startswith("--api-key="):
            hidden[place] = "--api-key=…"
    return hidden


def _commit() -> tuple[str | None, bool | None]:
    folder = Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None, None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit, bool(status)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _device() -> Device:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device(
        processor=_processor(),
        num_cores=cores,
        memory_gib=_memory_gib(),
        system=f"{platform.system()} {platform.machine()}",
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
