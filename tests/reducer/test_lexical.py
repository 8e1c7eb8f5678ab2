"""Index words and BM25."""

import numpy as np
import pytest

from reducer.lexical import bm25_scores, covered_share, stem, words


def test_identifiers_stay_whole_and_are_indexed_by_parts() -> None:
    assert words("part QX-417-KD") == ["part", "qx-417-kd", "qx", "417", "kd"]


def test_camel_case_and_snake_case_are_split_too() -> None:
    assert words("getUserName") == ["getusername", "get", "user", "name"]
    assert words("get_site_name") == ["get_site_name", "get", "site", "name"]


def test_grouped_number_equals_plain_number() -> None:
    assert words("1,240 km") == words("1240 km")


def test_cjk_is_indexed_by_pairs() -> None:
    assert words("海底捞") == ["海底", "底捞"]
    assert words("海") == ["海"]


def test_full_width_equals_plain() -> None:
    assert words("ＱＸ４１７") == words("qx417")


def test_stop_words_are_left_out() -> None:
    assert words("who is the king of spain") == ["king", "spain"]


def test_stem_takes_plain_endings_only() -> None:
    assert [stem(w) for w in ("cities", "boxes", "cats", "glass", "Ürün", "bus")] == [
        "city",
        "box",
        "cat",
        "glass",
        "Ürün",
        "bus",
    ]


def test_exact_identifier_beats_its_neighbour() -> None:
    scores = bm25_scores([words("QX-417-KD passed"), words("QX-471-KD failed")], words("did QX-471-KD fail"))
    assert scores[1] > scores[0]


def test_no_shared_word_scores_zero() -> None:
    np.testing.assert_array_equal(bm25_scores([["a"], []], ["b"]), [0, 0])
    np.testing.assert_array_equal(bm25_scores([[], []], ["b"]), [0, 0])
    np.testing.assert_array_equal(bm25_scores([["a"]], []), [0])


def test_covered_share_is_that_of_the_text_with_most_of_the_query() -> None:
    corpus = [["apple", "pear"], ["apple"], ["plum"]]
    assert covered_share(corpus, ["apple", "pear"]) == pytest.approx(1)
    assert covered_share(corpus, ["cherry"]) == 0
    assert covered_share(corpus, []) == 1
    assert covered_share([], ["apple"]) == 0
    assert covered_share(corpus, ["apple", "quince"]) < 0.5  # a rare word weighs more
    assert covered_share(corpus, ["pear", "pear", "quince"]) == covered_share(corpus, ["pear", "quince"])
