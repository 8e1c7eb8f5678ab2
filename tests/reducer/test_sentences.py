"""Splitting into sentences, rows and lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reducer.sentences import (
    MAX_UNIT_CHARS,
    is_code,
    is_dense_script,
    is_table,
    split_units,
    split_windows,
    text_weight,
)


def units(text: str) -> list[str]:
    return [text[span.start : span.end] for span in split_units(text)]


@given(st.text(alphabet=st.sampled_from("ab1 .!?。！？\n\t“”「」\"'|;,:…-[]()\u3000สวัสดี"), max_size=300))
def test_units_tile_the_text(text: str) -> None:
    assert "".join(units(text)) == text


def test_english_sentences() -> None:
    assert units("It opened in 1990. Did it close? No!") == ["It opened in 1990. ", "Did it close? ", "No!"]


@pytest.mark.parametrize(
    "sentence",
    [
        "Dr. Smith met J. K. Rowling at St. Mary's.",
        "The price is 3.14 dollars, i.e. cheap.",
        "Das gilt z. B. für Prof. Müller.",
        "См. рис. 3 на стр. 5.",
        "The U.S. Senate voted.",
        "Version 1.2.3 shipped.",
    ],
)
def test_abbreviations_and_numbers_do_not_end_a_sentence(sentence: str) -> None:
    assert units(sentence) == [sentence]


def test_chinese_and_japanese_sentences_end_without_spaces() -> None:
    assert units("今天下雨。明天晴！你来吗？") == ["今天下雨。", "明天晴！", "你来吗？"]
    assert units("彼は「行く。」と言った。雨だ。") == ["彼は「行く。」と言った。", "雨だ。"]


def test_thai_is_split_at_its_spaces() -> None:
    assert units("สวัสดีครับ วันนี้อากาศดี") == ["สวัสดีครับ ", "วันนี้อากาศดี"]


def test_line_break_inside_running_text_is_no_boundary() -> None:
    assert units("The quick brown\nfox jumps.\nIt lands.") == ["The quick brown\nfox jumps.\n", "It lands."]


def test_list_items_and_speakers_are_units() -> None:
    assert units("Steps:\n- open\n- close") == ["Steps:\n", "- open\n", "- close"]
    assert units("hello there\nBob: hi\nAnn: hey") == ["hello there\n", "Bob: hi\n", "Ann: hey"]


def test_lists_and_records_in_small_letters_are_cut_at_their_lines() -> None:
    paths = [f"src/module_{n}/file_{n}.py\n" for n in range(9)]
    assert units("".join(paths)) == paths
    records = [f"job {n} ended with state {n * 7}\n" for n in range(9)]
    assert units("".join(records)) == records
    prose = "the crane of the\nharbour lifted forty\ntons in its first\nyear."
    assert units(prose) == [prose]


def test_row_of_a_table_in_running_text_is_not_cut_at_its_sentences() -> None:
    rows = ["| AX-1. Big one! New | 13 |\n", "| AX-2 | 16. 17 |\n"]
    text = f"Prices rose. See:\n{''.join(rows)}They fell. Really."
    assert units(text) == ["Prices rose. ", "See:\n", *rows, "They fell. ", "Really."]


def test_table_rows_and_code_lines_stay_whole() -> None:
    table = "| part | price |\n|---|---|\n| bolt. Big | 3 |\n| nut | 4 |"
    assert is_table(table)
    assert units(table) == table.splitlines(keepends=True)
    code = "def f(x):\n    y = x. real\n    return y\n"
    assert is_code(code)
    assert units(code) == code.splitlines(keepends=True)


def test_prose_is_not_code() -> None:
    assert not is_code("The class of 1990 met again.\nIt was a return to form (for some).\nNobody left early.")


def test_text_without_marks_is_cut_at_white_space() -> None:
    text = "word " * 2000
    pieces = units(text)
    assert "".join(pieces) == text
    assert all(len(piece) <= MAX_UNIT_CHARS for piece in pieces)
    assert all(piece.endswith(" ") for piece in pieces)


def test_a_run_without_any_boundary_stays_whole() -> None:
    assert units("x" * 5000) == ["x" * 5000]


def test_windows_tile_and_respect_their_size() -> None:
    text = "This is one sentence of some length. " * 100
    windows = split_windows(text, 400)
    assert "".join(text[w.start : w.end] for w in windows) == text
    assert all(text_weight(text[w.start : w.end]) <= 400 for w in windows)


def test_cjk_characters_weigh_four() -> None:
    assert text_weight("ab你") == 6


def test_dense_script() -> None:
    assert is_dense_script("海底捞的CEO是谁")
    assert not is_dense_script("The CEO of 海底捞")
