"""Reads data files: our own (one case a line, JSON, usually gzip), or a public format by its reader."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from eval.errors import DataError
from eval.readers import detect_format, read_cases
from eval.readers.base import NUM_CHUNKS
from eval.samples import Case

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Dataset:
    """The cases of one file and what identifies the file."""

    name: str
    """File name without folder."""
    sha256: str
    """Of the file as stored."""
    cases: list[Case]
    num_cases_in_file: int


def read_dataset(
    path: Path,
    *,
    limit: int | None = None,
    format: str = "cases",
    num_chunks: int = NUM_CHUNKS,
    corpus: Path | None = None,
) -> Dataset:
    """Reads the first ``limit`` cases of ``path`` (all of them by default).

    ``format`` is ``cases``, ``auto`` or a name of ``eval.readers.FORMATS``; the readers fill up to ``num_chunks``
    passages a case and take texts that a format only names from ``corpus``. Every line is checked, also behind the
    limit. Raises DataError naming the file, and the line where one is at fault.
    """
    if format == "auto":
        format = detect_format(path)
    stored = b"".join(_stored(file) for file in _files(path))
    if format == "cases":
        cases = list(_decode(path, stored))
    else:
        cases = read_cases(path, format, num_chunks=num_chunks, corpus=corpus)
        _check_ids(path, cases)
    if not cases:
        raise DataError(f"{path}: holds no case")
    return Dataset(
        name=path.name,
        sha256=hashlib.sha256(stored).hexdigest(),
        cases=cases if limit is None else cases[:limit],
        num_cases_in_file=len(cases),
    )


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _stored(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _check_ids(path: Path, cases: list[Case]) -> None:
    seen: set[str] = set()
    for place, case in enumerate(cases, start=1):
        if case.id in seen:
            raise DataError(f"{path}, case {place}: the id {case.id!r} is there twice")
        seen.add(case.id)


def _decode(path: Path, stored: bytes) -> Iterator[Case]:
    try:
        content = gzip.decompress(stored) if stored.startswith(_GZIP_MAGIC) else stored
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a readable gzip file: {error}") from None
    decoder = msgspec.json.Decoder(Case)
    seen: dict[str, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            case = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        if case.id in seen:
            raise DataError(f"{path}, line {number}: case {case.id!r} is on line {seen[case.id]} already")
        seen[case.id] = number
        yield case
