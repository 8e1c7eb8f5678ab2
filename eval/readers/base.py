"""What the readers share: raw JSON rows, passages with labels, distractors by BM25.

A public set often has one right passage for a question and none that are merely similar. A reducer that is handed the
right passage alone has nothing to prove, so the best passages of the other questions are put beside it, in the order in
which a retriever by words would have returned them.
"""

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from msgspec.structs import replace

from eval.baselines import bm25, index_words
from eval.errors import DataError
from eval.samples import Case, Chunk
from eval.scoring import SearchText, answer_score

NUM_CHUNKS = 20
"""Passages of a case where the format itself brings fewer."""
MAX_SHORT_WORDS = 8
"""A longer reference is no short answer: it is not looked up word for word."""
_GZIP_MAGIC = b"\x1f\x8b"

Row = dict[str, Any]


def stored_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if it is gzip. Raises DataError."""
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return gzip.decompress(stored) if stored.startswith(_GZIP_MAGIC) else stored
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a readable gzip file: {error}") from None


def read_rows(path: Path) -> list[Row]:
    """Objects of a JSON list, of a JSON document that is one object, of JSON lines, or rows of a CSV file."""
    content = stored_bytes(path)
    if ".csv" in path.suffixes[-2:]:
        return [dict(row) for row in csv.DictReader(io.StringIO(_text(path, content), newline=""))]
    text = _text(path, content)
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return list(_lines(path, text))
    found = whole if isinstance(whole, list) else [whole]
    for place, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, entry {place}: expected an object, got {type(row).__name__}")
    return found


def _lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
        yield row


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {error}") from None


def want(row: Mapping[str, Any], where: str, *names: str) -> Any:
    """The first of ``names`` that the row has. Raises DataError naming ``where`` and the names."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise DataError(f"{where}: none of the fields {', '.join(names)}")


def as_texts(value: Any) -> list[str]:
    """A list of texts from a list, one text, or a text that is a JSON list (as CSV files hold them)."""
    if value is None:
        return []
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                return as_texts(json.loads(value))
            except json.JSONDecodeError:
                pass
        return [value] if value.strip() else []
    if isinstance(value, Iterable):
        return [str(item) for item in value if item is not None and str(item).strip()]
    return [str(value)]


def short_answers(references: Sequence[str]) -> list[str]:
    """Those that are short enough to be looked up."""
    return [text for text in references if len(index_words(text)) <= MAX_SHORT_WORDS]


def text_id(text: str) -> str:
    """The same id for the same text in every case."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage before it has labels."""

    id: str
    text: str
    title: str | None = None
    score: float | None = None
    support: tuple[str, ...] = ()


class Corpus:
    """Passages that distractors are taken from, best first by BM25."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self.passages = list({passage.id: passage for passage in passages}.values())
        words = [index_words(f"{passage.title or ''} {passage.text}") for passage in self.passages]
        self._index: bm25s.BM25 | None = None
        if any(words):
            self._index = bm25s.BM25(k1=1.5, b=0.75)
            self._index.index(words, show_progress=False)

    def retrieve(self, question: str, num_passages: int, include: Sequence[Passage] = ()) -> list[Passage]:
        """The best ``num_passages``, those of ``include`` among them wherever their score puts them."""
        asked = index_words(question)
        if self._index is None or not asked:
            return list(include)[:num_passages]
        scores = np.asarray(self._index.get_scores(asked), dtype=np.float64)
        wanted = {passage.id for passage in include}
        order = [int(place) for place in np.argsort(-scores, kind="stable")]
        chosen: list[tuple[float, Passage]] = []
        num_others = max(0, num_passages - len(wanted))
        for place in order:
            passage = self.passages[place]
            if passage.id in wanted:
                continue
            if len(chosen) >= num_others:
                break
            chosen.append((float(scores[place]), passage))
        own: Iterable[float] = (
            bm25(question, [f"{passage.title or ''} {passage.text}" for passage in include]) if include else []
        )
        in_corpus = {self.passages[place].id: float(scores[place]) for place in range(len(order))}
        chosen += [(in_corpus.get(item.id, float(score)), item) for item, score in zip(include, own, strict=True)]
        chosen.sort(key=lambda pair: -pair[0])
        return [
            Passage(id=item.id, text=item.text, title=item.title, score=score, support=item.support)
            for score, item in chosen
        ]


def labelled_case(
    *,
    id: str,
    dataset: str,
    question: str,
    answers: Sequence[str],
    passages: Sequence[Passage],
    gold: AbstractSet[str],
    evidence: str = "any",
    reference: str | None = None,
    lang: str = "",
) -> Case:
    """A case of which ``gold`` passages are evidence; whether one of them states an answer is looked up here."""
    chunks = [
        Chunk(
            id=passage.id,
            text=passage.text,
            title=passage.title,
            score=passage.score,
            gold=passage.id in gold,
            gold_kind="annotated" if passage.id in gold else None,
            support=list(passage.support) if passage.id in gold else [],
        )
        for passage in passages
    ]
    case = Case(
        id=id,
        dataset=dataset,
        question=question,
        answers=list(answers),
        reference=reference,
        chunks=chunks,
        evidence="all" if evidence == "all" else "any",
        lang=lang,
    )
    if not answers:
        return case
    stated = any(answer_score(case, SearchText(f"{c.title or ''}\n{c.text}")) for c in chunks if c.gold)
    return replace(case, answer_in_gold=stated)
