"""Builds the C++ kernels on first use and keeps the library in the user's cache folder.

The library is named by a digest of sources, compiler and flags: a changed source is a new library, and several
versions live side by side. One process builds, the others wait for it; a library appears whole or not at all.

    <cache>/native/kernels-3f2a….so        one library for all processors of this architecture
    <cache>/native/kernels-3f2a….lock      held while it is being built

Every instruction set is one compilation of the same source; ``dispatch.cpp`` picks among them at run time. A compiler
that does not know an instruction set leaves that one out.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-w")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
_X86_ISAS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
}
_COMPILE_TIMEOUT_S = 300.0


class NativeBuildError(Exception):
    """The kernels cannot be built or loaded here; the text says why, in one line where possible."""


def cache_folder() -> Path:
    """Where libraries are kept: ``$FIRSTTOKEN_CACHE``, else ``$XDG_CACHE_HOME/firsttoken``, else the home's cache."""
    if own := os.environ.get("FIRSTTOKEN_CACHE"):
        return Path(own).expanduser() / "native"
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "firsttoken" / "native"


def find_compiler() -> list[str] | None:
    """The compiler's command: ``$CXX``, else the first of g++, clang++ and c++ that there is; ``None`` without one."""
    if named := os.environ.get("CXX"):
        command = shlex.split(named)
        return command if command and shutil.which(command[0]) else None
    return next(([name] for name in _COMPILERS if shutil.which(name)), None)


def build_library(folder: Path | None = None) -> Path:
    """The library for the sources as they are, built if it is not there yet.

    Args:
        folder: where libraries are kept; ``None`` is the user's cache.

    Raises:
        NativeBuildError: there is no compiler, it refuses the sources, or the folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX") or ", ".join(_COMPILERS)
        raise NativeBuildError(f"no C++ compiler ({wanted}); install g++ or clang++, or set CXX")
    folder = folder if folder is not None else cache_folder()
    library = folder / f"kernels-{_digest(compiler)}{'.dylib' if sys.platform == 'darwin' else '.so'}"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.is_file():
                _build(compiler, library)
    except OSError as error:
        raise NativeBuildError(f"cannot build in {folder}: {error.strerror or error}") from error
    return library


def _digest(compiler: list[str]) -> str:
    """Of everything that decides what the library will be."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(f"{source.name}\0".encode() + source.read_bytes() + b"\0")
    version = _run([*compiler, "--version"])
    digest.update(repr((compiler, version, _FLAGS, _X86_ISAS, platform.machine(), sys.platform)).encode())
    return digest.hexdigest()[:24]


def _build(compiler: list[str], library: Path) -> None:
    started = time.monotonic()
    logger.info("building the CPU kernels with %s; once, some seconds", " ".join(compiler))
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as name:
        folder = Path(name)
        isas = {"portable": (), **(_X86_ISAS if platform.machine().lower() in ("x86_64", "amd64") else {})}
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            compiled = pool.map(lambda isa: _compile_isa(compiler, folder, isa, isas[isa]), isas)
            objects = dict(zip(isas, compiled, strict=True))
        built = [isa for isa, target in objects.items() if target is not None]
        if "portable" not in built:
            raise NativeBuildError(f"{' '.join(compiler)} cannot compile the kernels: {_first_error(folder)}")
        if missing := [isa for isa in isas if isa not in built]:
            logger.warning("%s compiles no kernels for %s", " ".join(compiler), ", ".join(missing))
        common = []
        for source in ("dispatch", "parallel"):
            target = folder / f"{source}.o"
            defines = [f"-DFT_HAS_{isa}" for isa in built]
            _compile(compiler, [*_FLAGS, *defines, "-c", str(SOURCES / f"{source}.cpp"), "-o", str(target)])
            common.append(str(target))
        linked = folder / library.name
        objects_built = [str(objects[isa]) for isa in built]
        _compile(compiler, ["-shared", "-o", str(linked), *objects_built, *common, *_link_flags()])
        linked.replace(library)
    logger.info("built %s in %.1f s: %s", library.name, time.monotonic() - started, ", ".join(built))


def _compile_isa(compiler: list[str], folder: Path, isa: str, flags: tuple[str, ...]) -> Path | None:
    """The object file of one instruction set, or ``None`` where the compiler fails; it leaves its words in a file."""
    target = folder / f"{isa}.o"
    try:
        _compile(
            compiler,
            [*_FLAGS, *flags, f"-DFT_ISA={isa}", "-c", str(SOURCES / "kernels.cpp"), "-o", str(target)],
        )
    except NativeBuildError as error:
        (folder / f"{isa}.txt").write_text(str(error), encoding="utf-8")
        return None
    return target


def _first_error(folder: Path) -> str:
    return (folder / "portable.txt").read_text(encoding="utf-8")


def _link_flags() -> list[str]:
    return ["-ldl", "-lpthread"] if sys.platform.startswith("linux") else []


def _compile(compiler: list[str], arguments: list[str]) -> None:
    _run([*compiler, *arguments])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise NativeBuildError(f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}")
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the system drops it with the process that holds it."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
