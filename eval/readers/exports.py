"""Exports of RAG applications: RAGAS sets, LlamaIndex sets, and a table of question, answer and context."""

from collections.abc import Iterator, Sequence
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
from eval.scoring import SearchText

QUESTION = ("user_input", "question", "query", "input")
ANSWER = ("reference", "ground_truth", "ground_truths", "reference_answer", "expected_answer", "answers", "answer")
CONTEXTS = ("retrieved_contexts", "contexts", "context", "passages", "documents")
GOLD_CONTEXTS = ("reference_contexts", "gold_contexts", "gold_context", "supporting_contexts")


def read_ragas(path: Path, num_chunks: int = NUM_CHUNKS) -> Iterator[Case]:
    """RAGAS in its present and its former fields; ``answer`` is the answer of the application there, not the truth."""
    rows = read_rows(path)
    if len(rows) == 1 and isinstance(rows[0].get("samples"), list):
        rows = rows[0]["samples"]
    yield from _cases(path, rows, "ragas", num_chunks, answer_fields=ANSWER[:-1])


def read_table(path: Path, num_chunks: int = NUM_CHUNKS) -> Iterator[Case]:
    """A CSV file (or JSON rows) with question, answer and context; rows of one question are its passages."""
    merged: dict[str, Row] = {}
    for place, row in enumerate(read_rows(path), start=1):
        lower = {str(name).strip().lower(): value for name, value in row.items() if name is not None}
        question = str(want(lower, f"{path}, row {place}", *QUESTION)).strip()
        context = as_texts(next((lower[name] for name in CONTEXTS if lower.get(name)), None))
        gold = as_texts(next((lower[name] for name in GOLD_CONTEXTS if lower.get(name)), None))
        answers = as_texts(next((lower[name] for name in ANSWER if lower.get(name)), None))
        entry = merged.setdefault(question, {"question": question, "contexts": [], "gold_contexts": [], "answers": []})
        entry.setdefault("id", lower.get("id"))
        entry["contexts"] += context
        entry["gold_contexts"] += gold
        entry["answers"] += answers
    yield from _cases(path, list(merged.values()), "table", num_chunks, answer_fields=("answers",))


def read_llama_index(path: Path, num_chunks: int = NUM_CHUNKS) -> Iterator[Case]:
    """``LabelledRagDataset`` (examples) or ``EmbeddingQAFinetuneDataset`` (queries, corpus, relevant_docs)."""
    rows = read_rows(path)
    if len(rows) == 1 and isinstance(rows[0].get("examples"), list):
        yield from _cases(path, rows[0]["examples"], "llama-index", num_chunks, answer_fields=("reference_answer",))
        return
    if len(rows) != 1 or not {"queries", "corpus", "relevant_docs"} <= rows[0].keys():
        raise DataError(f"{path}: neither examples nor queries, corpus and relevant_docs")
    whole = rows[0]
    corpus = Corpus(Passage(id=str(id), text=str(text)) for id, text in whole["corpus"].items())
    passages = {passage.id: passage for passage in corpus.passages}
    for id, question in whole["queries"].items():
        gold = [passages[str(name)] for name in whole["relevant_docs"].get(id, ()) if str(name) in passages]
        if gold:
            yield labelled_case(
                id=str(id),
                dataset="llama-index",
                question=str(question),
                answers=[],
                passages=corpus.retrieve(str(question), max(num_chunks, len(gold)), gold),
                gold={passage.id for passage in gold},
            )


def _cases(
    path: Path, rows: Sequence[Row], dataset: str, num_chunks: int, *, answer_fields: Sequence[str]
) -> Iterator[Case]:
    retrieved = [as_texts(_first(row, CONTEXTS)) for row in rows]
    named = [as_texts(_first(row, GOLD_CONTEXTS)) for row in rows]
    corpus = Corpus(_passage(text) for texts in (*retrieved, *named) for text in texts)
    for place, (row, contexts, gold_texts) in enumerate(zip(rows, retrieved, named, strict=True), start=1):
        where = f"{path}, row {place}"
        question = str(want(row, where, *QUESTION))
        references = as_texts(_first(row, answer_fields))
        answers = short_answers(references)
        gold = _gold_of(contexts, gold_texts, answers)
        if contexts and (set(contexts) - set(gold) or not gold):
            passages = [_passage(text) for text in dict.fromkeys(contexts)]  # the retriever's own order
        else:
            passages = corpus.retrieve(question, max(num_chunks, len(gold)), [_passage(text) for text in gold])
        if not passages:
            raise DataError(f"{where}: no context")
        yield labelled_case(
            id=str(row.get("id") or f"{dataset}-{place}"),
            dataset=dataset,
            question=question,
            answers=answers,
            reference=next((text for text in references if text not in answers), None),
            passages=passages,
            gold={text_id(text) for text in gold},
        )


def _gold_of(contexts: Sequence[str], named: Sequence[str], answers: Sequence[str]) -> list[str]:
    """Named evidence, in the retriever's words where it returned it; without names, what states a short answer."""
    if not named:
        stating = [text for text in contexts if any(SearchText(text).states(answer) for answer in answers)]
        return list(dict.fromkeys(stating or (contexts if len(set(contexts)) == 1 else [])))
    found = [text for text in contexts if any(_same(text, gold) for gold in named)]
    return list(dict.fromkeys(found or (named if not contexts else [])))


def _same(text: str, gold: str) -> bool:
    return SearchText(text).holds(gold) or SearchText(gold).holds(text)


def _first(row: Row, names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name)), None)


def _passage(text: str) -> Passage:
    return Passage(id=text_id(text), text=text)
