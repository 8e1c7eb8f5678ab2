"""Which rows of a table are the header of which."""

import pytest

from reducer.sentences import split_units
from reducer.table_rows import header_rows

HEADER = "| Article | Price |\n|:--|--:|\n"


def headers(text: str) -> dict[str, str]:
    """For each row, stripped, the header it needs."""
    units = [text[span.start : span.end] for span in split_units(text)]
    assert "".join(units) == text
    return {
        units[row].strip(): "".join(units[n] for n in header).strip()
        for row, header in header_rows(text, units).items()
    }


def test_delimiter_row_belongs_to_the_header() -> None:
    assert headers(f"{HEADER}| AX-1 | 13 |\n| AX-2 | 16 |") == dict.fromkeys(
        ["| AX-1 | 13 |", "| AX-2 | 16 |"], HEADER.strip()
    )


def test_title_above_a_table_is_no_header() -> None:
    rows = "".join(f"| AX-{n} | {n} |\n" for n in range(6))
    assert set(headers(f"Prices of May:\n\n{HEADER}{rows}").values()) == {HEADER.strip()}


def test_table_in_running_text_has_its_header_and_whole_rows() -> None:
    text = f"Our prices rose. They may rise again.\n\n{HEADER}| AX-1. Big one | 13 |\n\nOrders go to Ann. She is in."
    assert headers(text) == {"| AX-1. Big one | 13 |": HEADER.strip()}


def test_two_tables_have_two_headers() -> None:
    other = "| Name | Phone |\n|---|---|\n"
    text = f"{HEADER}| AX-1 | 13 |\n\n{other}| Ann | 4417 |\n"
    assert headers(text) == {"| AX-1 | 13 |": HEADER.strip(), "| Ann | 4417 |": other.strip()}


@pytest.mark.parametrize("rows", [("Article | Price", "AX-1 | 13", "AX-2 | 16"), ("A\tB\tC", "1\t2\t3", "4\t5\t6")])
def test_columns_without_a_delimiter_row_have_the_first_one(rows: tuple[str, ...]) -> None:
    assert headers("\n".join(rows)) == dict.fromkeys(rows[1:], rows[0])


@pytest.mark.parametrize("text", ["", "One. Two.", "a | b", "| not | closed\nby a bar", "Use a | b. Or c | d.\nOr e."])
def test_text_without_a_table_has_none(text: str) -> None:
    assert headers(text) == {}


@pytest.mark.parametrize(
    "text", ["|" * 500_000, "| " * 300_000 + "x", "|-" * 300_000 + "\n" + " " * 300_000 + "x", "|\n" * 200_000]
)
def test_bars_are_no_trap(text: str) -> None:
    assert all(
        row not in header for row, header in header_rows(text, [text[s:e] for s, e in split_units(text)]).items()
    )
