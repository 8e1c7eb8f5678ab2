"""SQuAD 1.1 and 2.0: the published JSON, or the flat rows of its copies. Distractors are the article's paragraphs."""

from collections.abc import Iterator
from pathlib import Path

from eval.readers.base import NUM_CHUNKS, Corpus, Passage, Row, labelled_case, read_rows, text_id, want
from eval.samples import Case


def read_squad(path: Path, num_chunks: int = NUM_CHUNKS) -> Iterator[Case]:
    """Questions with an answer; those of SQuAD 2.0 without one have nothing that a reduction could lose."""
    rows = read_rows(path)
    flat = list(_flat(path, rows[0]["data"]) if len(rows) == 1 and "data" in rows[0] else rows)
    corpus = Corpus(_passage(row, f"{path}, question {place}") for place, row in enumerate(flat, start=1))
    seen: set[str] = set()
    for place, row in enumerate(flat, start=1):
        where = f"{path}, question {place}"
        answers = list(dict.fromkeys(want(row, where, "answers").get("text", [])))
        if not answers:
            continue
        question, gold = str(want(row, where, "question")), _passage(row, where)
        id = str(row.get("id") or f"squad-{place}")
        if id in seen:
            continue
        seen.add(id)
        yield labelled_case(
            id=id,
            dataset="squad",
            question=question,
            answers=answers,
            passages=corpus.retrieve(question, num_chunks, [gold]),
            gold={gold.id},
            lang="en",
        )


def _flat(path: Path, articles: list[Row]) -> Iterator[Row]:
    for number, article in enumerate(articles, start=1):
        for paragraph in want(article, f"{path}, article {number}", "paragraphs"):
            for asked in want(paragraph, f"{path}, article {number}", "qas"):
                texts = [answer["text"] for answer in asked.get("answers") or []]
                yield {
                    "id": asked.get("id"),
                    "title": article.get("title"),
                    "context": want(paragraph, f"{path}, article {number}", "context"),
                    "question": asked.get("question"),
                    "answers": {"text": [] if asked.get("is_impossible") else texts},
                }


def _passage(row: Row, where: str) -> Passage:
    text = str(want(row, where, "context"))
    title = row.get("title")
    return Passage(id=text_id(text), text=text, title=str(title).replace("_", " ") if title else None)
