"""Reads data files: one case a line, JSON, usually gzip."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from eval.errors import DataError
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


def read_dataset(path: Path, *, limit: int | None = None) -> Dataset:
    """Reads the first ``limit`` cases of ``path`` (all of them by default).

    Every line is checked, also behind the limit. Raises DataError naming the file, and the line where one is at fault.
    """
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    cases = list(_decode(path, stored))
    if not cases:
        raise DataError(f"{path}: holds no case")
    return Dataset(
        name=path.name,
        sha256=hashlib.sha256(stored).hexdigest(),
        cases=cases if limit is None else cases[:limit],
        num_cases_in_file=len(cases),
    )


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
