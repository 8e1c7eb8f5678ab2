"""Cutting a passage to its best sentences."""

from factories_reducer import BrokenEncoder, HashEncoder, WordCounter, make_passages

from reducer.config import RankConfig
from reducer.encoder import Encoder
from reducer.passage_extracts import Extractor, PassageExtract
from reducer.rank import Query
from reducer.stage import Candidate


def extract(
    text: str, question: str, max_tokens: int, encoder: Encoder | None = None
) -> tuple[PassageExtract | None, str]:
    extractor = Extractor(Query(question), RankConfig(), WordCounter(), encoder or HashEncoder())
    passage = make_passages(text)[0]
    result = extractor.extract(Candidate(passage, 0, 1, 1, (passage.id,)), max_tokens)
    return result, " | ".join(text[s.start : s.end] for s in result.spans) if result else ""


PROSE = (
    "The bridge opened in 1932. It is painted grey. Many birds nest there. The architect was Ann Lee. It rains often."
)


def test_best_sentence_is_kept_verbatim() -> None:
    result, kept = extract(PROSE, "Who was the architect?", 8)
    assert kept == "The architect was Ann Lee. "
    assert result is not None
    assert result.num_tokens <= 8


def test_several_sentences_stay_in_text_order() -> None:
    _, kept = extract(PROSE, "Who was the architect and when was the bridge opened in 1932?", 16)
    assert kept == "The bridge opened in 1932.  | The architect was Ann Lee. "


def test_neighbours_become_one_span() -> None:
    result, _ = extract(PROSE, "anything", 1000)
    assert result is not None
    assert result.spans == ((0, len(PROSE)),)


def test_nothing_fits() -> None:
    assert extract(PROSE, "architect", 3)[0] is None
    assert extract("", "architect", 30)[0] is None


def test_table_rows_come_with_their_header() -> None:
    rows = [f"| item {n} | {n * 7} |\n" for n in range(40)]
    table = "| name | price |\n" + "".join(rows)
    _, kept = extract(table, "price of item 33", 20)
    assert kept == "| name | price |\n | | item 33 | 231 |\n"


def test_code_is_cut_at_lines() -> None:
    code = "import os\n\ndef first(x):\n    return os.path(x)\n\ndef second(y):\n    return y + 1\n"
    _, kept = extract(code, "second return", 14)
    assert kept.strip() == "def second(y):\n    return y + 1"


def test_answer_in_the_last_line_of_a_huge_passage() -> None:
    text = "Nothing is said here about the matter at all. " * 3000 + "The password of the vault is heron."
    _, kept = extract(text, "What is the password of the vault?", 12)
    assert kept == "The password of the vault is heron."


def test_failing_encoder_leaves_bm25() -> None:
    _, kept = extract(PROSE, "Who was the architect?", 8, BrokenEncoder())
    assert kept == "The architect was Ann Lee. "
