"""Which reader reads which format, and how a format is recognised."""

from collections.abc import Callable, Iterator
from pathlib import Path

from eval.errors import DataError
from eval.readers.base import NUM_CHUNKS, read_rows
from eval.readers.beir import read_beir
from eval.readers.exports import read_llama_index, read_ragas, read_table
from eval.readers.hotpotqa import read_hotpotqa
from eval.readers.kilt import read_kilt
from eval.readers.squad import read_squad
from eval.samples import Case

Reader = Callable[[Path, int], Iterator[Case]]

FORMATS: dict[str, Reader] = {
    "squad": read_squad,
    "hotpotqa": read_hotpotqa,
    "kilt": read_kilt,
    "nq": read_kilt,
    "beir": read_beir,
    "ragas": read_ragas,
    "llama-index": read_llama_index,
    "csv": read_table,
}
"""Formats beside our own, ``cases``."""


def detect_format(path: Path) -> str:
    """The format of a file or folder by its fields; ``cases`` for our own. Raises DataError where none fits."""
    if path.is_dir():
        return "beir"
    if ".csv" in path.suffixes[-2:]:
        return "csv"
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path}: holds no case")
    names = rows[0].keys()
    signs = (
        ("cases", {"question", "chunks"}),
        ("cases", {"question", "history"}),
        ("cases", {"question", "probes"}),
        ("hotpotqa", {"supporting_facts", "context"}),
        ("squad", {"data"}),
        ("squad", {"context", "answers", "question"}),
        ("kilt", {"input", "output"}),
        ("nq", {"question", "ctxs"}),
        ("nq", {"question", "positive_ctxs"}),
        ("llama-index", {"examples"}),
        ("llama-index", {"queries", "corpus", "relevant_docs"}),
        ("ragas", {"user_input"}),
        ("ragas", {"question", "contexts"}),
        ("ragas", {"samples"}),
    )
    for name, fields in signs:
        if fields <= names:
            return name
    return "cases"


def read_cases(
    path: Path, format: str = "auto", *, num_chunks: int = NUM_CHUNKS, corpus: Path | None = None
) -> list[Case]:
    """All cases of a file in one of ``FORMATS``. Raises DataError for another name and for what cannot be read."""
    found = detect_format(path) if format == "auto" else format
    if found not in FORMATS:
        raise DataError(f"{path}: format {found!r} has no reader; known: cases, {', '.join(FORMATS)}")
    try:
        if found in ("kilt", "nq"):
            return list(read_kilt(path, num_chunks, corpus))
        return list(FORMATS[found](path, num_chunks))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise DataError(f"{path}: not in the format {found}: {type(error).__name__}: {error}") from None
