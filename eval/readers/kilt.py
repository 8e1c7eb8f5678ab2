"""KILT tasks (NQ, TriviaQA, HotpotQA …) and NaturalQuestions as DPR, FiD and open-domain copies hold it.

KILT names paragraphs of a Wikipedia dump without their text; ``corpus`` is that knowledge source (JSON lines with
``wikipedia_id`` or ``_id``, ``wikipedia_title`` and the list ``text``), or a part of it that holds the pages named.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.errors import DataError
from eval.readers.base import (
    NUM_CHUNKS,
    Corpus,
    Passage,
    Row,
    as_texts,
    labelled_case,
    read_rows,
    short_answers,
    text_id,
    want,
)
from eval.samples import Case

_RETRIEVED = ("ctxs", "positive_ctxs", "hard_negative_ctxs", "negative_ctxs")


def read_kilt(path: Path, num_chunks: int = NUM_CHUNKS, corpus: Path | None = None) -> Iterator[Case]:
    """Questions with their paragraphs."""
    rows = read_rows(path)
    pages = _pages(corpus) if corpus is not None else {}
    own = [_own_passages(row, pages) for row in rows]
    pool = Corpus(passage for gold, others in own for passage in (*gold, *others))
    for place, (row, (gold, others)) in enumerate(zip(rows, own, strict=True), start=1):
        where = f"{path}, question {place}"
        question = str(want(row, where, "input", "question"))
        if not gold:
            raise DataError(f"{where}: no passage with text is named as evidence; give the knowledge source as corpus")
        brought = [*gold, *others]
        if row.get("ctxs"):
            passages = sorted(brought, key=lambda item: -(item.score or 0.0))[:num_chunks]
        else:
            passages = pool.retrieve(question, num_chunks, gold)
        answers = _answers(row)
        yield labelled_case(
            id=str(row.get("id") or f"nq-{place}"),
            dataset="kilt" if "output" in row else "nq",
            question=question,
            answers=short_answers(answers),
            reference=next((text for text in answers if text not in short_answers(answers)), None),
            passages=passages,
            gold={passage.id for passage in gold},
            lang="en",
        )


def _answers(row: Row) -> list[str]:
    if "output" in row:
        return list(dict.fromkeys(str(out["answer"]) for out in row["output"] or [] if out.get("answer")))
    return as_texts(row.get("answers") or row.get("answer"))


def _own_passages(row: Row, pages: dict[str, Row]) -> tuple[list[Passage], list[Passage]]:
    """Passages that are evidence, and others that the row brings."""
    if "output" in row:
        return [*_provenance(row, pages)], []
    gold: list[Passage] = []
    others: list[Passage] = []
    for field in _RETRIEVED:
        for item in row.get(field) or []:
            is_gold = field == "positive_ctxs" or bool(
                item.get("isgold", item.get("has_answer", item.get("hasanswer")))
            )
            (gold if is_gold else others).append(_retrieved(item))
    return gold, others


def _retrieved(item: Row) -> Passage:
    text = str(item.get("text") or item.get("contents") or "")
    score = item.get("score")
    return Passage(id=text_id(text), text=text, title=item.get("title"), score=float(score) if score else None)


def _provenance(row: Row, pages: dict[str, Row]) -> Iterator[Passage]:
    seen = set()
    for out in row["output"] or []:
        for named in out.get("provenance") or []:
            for text in _named_texts(named, pages):
                if text.strip() and (id := text_id(text)) not in seen:
                    seen.add(id)
                    yield Passage(id=id, text=text.strip(), title=named.get("title"))


def _named_texts(named: Row, pages: dict[str, Row]) -> list[str]:
    page = pages.get(str(named.get("wikipedia_id")))
    if page is not None:
        paragraphs = as_texts(page["text"])
        start = int(named.get("start_paragraph_id", 0))
        return paragraphs[start : int(named.get("end_paragraph_id", start)) + 1]
    inline: Any = named.get("text") or (named.get("meta") or {}).get("evidence_span")
    return as_texts(inline)[:1]


def _pages(path: Path) -> dict[str, Row]:
    return {str(want(row, f"{path}, page {n}", "wikipedia_id", "_id")): row for n, row in enumerate(read_rows(path), 1)}
