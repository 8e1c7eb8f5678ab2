"""BEIR: a folder with ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/<split>.tsv``. Retrieval sets have no answers."""

from collections.abc import Iterator
from pathlib import Path

from eval.errors import DataError
from eval.readers.base import NUM_CHUNKS, Corpus, Passage, as_texts, labelled_case, read_rows, stored_bytes, want
from eval.samples import Case

SPLITS = ("test", "dev", "train")


def read_beir(path: Path, num_chunks: int = NUM_CHUNKS) -> Iterator[Case]:
    """Queries that have at least one relevant passage, judged by evidence (and by ``metadata.answer`` where given)."""
    corpus = Corpus(
        Passage(id=str(want(row, f"{path}, passage {place}", "_id", "id")), text=str(row.get("text") or ""),
                title=row.get("title") or None)
        for place, row in enumerate(read_rows(_file(path, "corpus.jsonl")), start=1)
    )  # fmt: skip
    passages = {passage.id: passage for passage in corpus.passages}
    relevant = _qrels(path)
    for place, row in enumerate(read_rows(_file(path, "queries.jsonl")), start=1):
        id = str(want(row, f"{path}, query {place}", "_id", "id"))
        gold = [passages[name] for name in relevant.get(id, ()) if name in passages]
        if not gold:
            continue
        question = str(want(row, f"{path}, query {place}", "text", "query"))
        metadata = row.get("metadata") or {}
        yield labelled_case(
            id=id,
            dataset=path.name,
            question=question,
            answers=as_texts(metadata.get("answer") if isinstance(metadata, dict) else None),
            passages=corpus.retrieve(question, max(num_chunks, len(gold)), gold),
            gold={passage.id for passage in gold},
        )


def _file(path: Path, name: str) -> Path:
    for candidate in (path / name, path / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise DataError(f"{path}: holds no {name}")


def _qrels(path: Path) -> dict[str, list[str]]:
    file = next(
        (path / "qrels" / f"{split}.tsv" for split in SPLITS if (path / "qrels" / f"{split}.tsv").is_file()), None
    )
    if file is None:
        raise DataError(f"{path}: holds none of {', '.join(f'qrels/{split}.tsv' for split in SPLITS)}")
    found: dict[str, list[str]] = {}
    for number, line in enumerate(stored_bytes(file).decode("utf-8", "replace").splitlines(), start=1):
        fields = line.split("\t")
        if number == 1 and not fields[-1].strip().lstrip("-").isdigit():
            continue  # the heading
        if not line.strip():
            continue
        if len(fields) < 3:
            raise DataError(f"{file}, line {number}: expected query, passage and score, got {len(fields)} fields")
        if int(fields[-1]) > 0:
            found.setdefault(fields[0], []).append(fields[-2])
    return found
