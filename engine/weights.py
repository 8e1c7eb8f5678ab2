"""Opens the weights of a model, whatever they are stored in, and names them by what is in them.

checkpoint = open_checkpoint(path)     # reads the configuration
checkpoint.spec                        # sizes, RoPE, ...: a ModelSpec
for name, values, origin in checkpoint.tensors(): ...
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from engine import model_store
from engine.errors import ModelError
from engine.gguf_weights import GGUFCheckpoint, gguf_parts
from engine.model_spec import ModelSpec
from engine.named_tensor import NamedTensor
from engine.safetensors_weights import SafetensorsCheckpoint, safetensors_files

_READ_BYTES = 1 << 22
# Reading a smaller file takes no longer than looking up what it gave last time.
_MIN_NOTED_BYTES = 16 << 20


class Checkpoint(Protocol):
    """Weights of one model on disk."""

    path: Path
    files: list[Path]
    """All files that hold weights."""
    spec: ModelSpec

    def tensors(self) -> Iterator[NamedTensor]:
        """All weights, one at a time. Raises ModelError naming file and tensor."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file, or a folder with one GGUF model in it.

    Raises:
        ModelError: there is no model, or one that is not supported; the text names the file.
    """
    gguf = _find_gguf(path)
    return SafetensorsCheckpoint(path) if gguf is None else GGUFCheckpoint(gguf)


def weights_files(path: Path) -> list[Path]:
    """The files that decide what a model computes: its weights, and ``config.json`` where there is one."""
    gguf = _find_gguf(path)
    return [path / "config.json", *safetensors_files(path)] if gguf is None else gguf_parts(gguf)


def weights_digest(path: Path, cache_dir: Path | None = None) -> str:
    """SHA-256 over the weights of a model, as hex: of the file itself where it is a single one.

    Reading gigabytes takes seconds, so the digest of each large file is kept in ``cache_dir`` (by default the user's
    cache folder) under its path, size and modification time. A cache that cannot be written is no error.

    Raises:
        ModelError: a file is missing.
    """
    cache_dir = cache_dir if cache_dir is not None else model_store.cache_dir()
    files = weights_files(path)
    digests = [_file_digest(file, cache_dir) for file in files]
    if len(files) == 1:
        return digests[0]
    listing = "".join(f"{digest}  {file.name}\n" for file, digest in zip(files, digests, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def _find_gguf(path: Path) -> Path | None:
    """The GGUF file that ``path`` means, or ``None`` for a Hugging Face folder."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a folder nor a .gguf file")
        return path
    if not path.is_dir():
        raise ModelError(f"{path} does not exist")
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return None
    models = sorted({gguf_parts(file)[0] for file in path.glob("*.gguf")})
    if len(models) == 1:
        return models[0]
    if models:
        raise ModelError(f"{path} holds {len(models)} GGUF models; name one: {', '.join(file.name for file in models)}")
    raise ModelError(f"{path} holds neither config.json with safetensors nor a .gguf file")


def _file_digest(file: Path, cache_dir: Path) -> str:
    file = file.resolve()
    try:
        status = file.stat()
        is_noted = status.st_size >= _MIN_NOTED_BYTES
        identity = [str(file), status.st_size, status.st_mtime_ns]
        note = cache_dir / "digests" / f"{hashlib.sha256(str(file).encode()).hexdigest()[:32]}.json"
        known = _read_note(note) if is_noted else None
        if known is not None and known[0] == identity:
            return known[1]
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    if is_noted:
        _write_note(note, [identity, digest.hexdigest()])
    return digest.hexdigest()


def _read_note(note: Path) -> tuple[list[object], str] | None:
    try:
        identity, digest = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return (identity, digest) if isinstance(digest, str) else None


def _write_note(note: Path, content: list[object]) -> None:
    """Whole or not at all: another process may read it at any time."""
    draft = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(note)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
