"""Table rows among the units of a passage, and the header that each needs to be understood.

| Article | Price |      header of both rows below
|---------|-------|
| AX-1    | 13    |
| AX-2    | 16    |      cut to this row, a passage still says that 16 is a price
"""

import re
from collections.abc import Sequence

from reducer.sentences import column_mark

_DELIMITER = re.compile(r"\|?(?:\s*+:?-++:?\s*+\|)++(?:\s*+:?-++:?)?")


def header_rows(text: str, units: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """For each unit that is a table row, the units of its header; ``units`` tile ``text``.

    In running text a table is one only with its delimiter row, as in Markdown; where the whole text is a table, its
    first row is the header without one too.
    """
    mark = column_mark(text)
    headers: dict[int, tuple[int, ...]] = {}
    current: tuple[int, ...] = ()
    for number, unit in enumerate(units):
        is_row = unit.count(mark) > 0 if mark is not None else _is_framed(unit.strip())
        if not is_row:
            if mark is None:
                current = ()
            continue
        if number + 1 < len(units) and _is_delimiter(units[number + 1]) and not _is_delimiter(unit):
            current = (number, number + 1)
        elif mark is not None and not current:
            current = (number,)
        if current and number not in current:
            headers[number] = current
    return headers


def _is_framed(line: str) -> bool:
    return len(line) > 1 and line[0] == line[-1] == "|"


def _is_delimiter(unit: str) -> bool:
    return "-" in unit and _DELIMITER.fullmatch(unit.strip()) is not None
