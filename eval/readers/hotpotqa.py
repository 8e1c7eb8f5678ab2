"""HotpotQA, distractor setting: ten paragraphs a question, two of which hold the supporting sentences."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.readers.base import NUM_CHUNKS, Passage, Row, labelled_case, read_rows, want
from eval.samples import Case


def read_hotpotqa(path: Path, num_chunks: int = NUM_CHUNKS) -> Iterator[Case]:
    """All questions; both the published lists and the columns of later copies are understood."""
    for place, row in enumerate(read_rows(path), start=1):
        where = f"{path}, question {place}"
        facts = _pairs(want(row, where, "supporting_facts"), "title", "sent_id")
        context = _pairs(want(row, where, "context"), "title", "sentences")
        support: dict[str, list[int]] = {}
        for title, sentence in facts:
            support.setdefault(str(title), []).append(int(sentence))
        passages = [
            Passage(
                id=f"{number}-{title}",
                title=str(title),
                text="".join(sentences).strip(),
                support=tuple(sentences[at].strip() for at in support.get(str(title), ()) if 0 <= at < len(sentences)),
            )
            for number, (title, sentences) in enumerate(context[:num_chunks] if num_chunks else context)
        ]
        yield labelled_case(
            id=str(row.get("_id") or row.get("id") or f"hotpotqa-{place}"),
            dataset="hotpotqa",
            question=str(want(row, where, "question")),
            answers=[str(want(row, where, "answer"))],
            passages=passages,
            gold={passage.id for passage in passages if passage.title in support},
            evidence="all",
            lang="en",
        )


def _pairs(value: Any, first: str, second: str) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(zip(value[first], value[second], strict=True))
    rows: list[Row | list[Any]] = value
    return [(row[first], row[second]) if isinstance(row, dict) else (row[0], row[1]) for row in rows]
