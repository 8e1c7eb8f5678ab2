"""Blocks of a Markdown page that are made from committed results, each between two marks."""

from pathlib import Path

Marks = tuple[str, str]
"""Comments before and behind a block."""


def between(marks: Marks, block: str) -> str:
    """The block as it stands in the page, marks included."""
    begin, end = marks
    return f"{begin}\n\n{block}\n\n{end}"


def put_into(text: str, marks: Marks, block: str) -> str:
    """``text`` with the block in the place of the old one. Raises ``ValueError`` where the marks are missing."""
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"the marks {marks[0]!r} and {marks[1]!r} are not both there")
    return before + between(marks, block) + after


def update(file: Path, marks: Marks, block: str) -> None:
    """Rewrites the block in a file. Raises ``ValueError`` where the marks are missing."""
    file.write_text(put_into(file.read_text(encoding="utf-8"), marks, block), encoding="utf-8")
