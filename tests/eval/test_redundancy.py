"""Removal of copies against hand-computed counts."""

from pathlib import Path

import pytest
from factories_eval import DATA_FOLDER, make_case, make_chunk

from eval.datasets import read_dataset
from eval.redundancy import RedundancyCounts, has_redundancy_labels, redundancy_counts
from eval.samples import Case


def _case() -> Case:
    return make_case(
        [
            make_chunk("a"),
            make_chunk("a~1", dup_of="a"),
            make_chunk("a~2", dup_of="a"),
            make_chunk("a!", near_of="a"),
            make_chunk("b"),
            make_chunk("b!", near_of="b"),
            make_chunk("c"),
        ]
    )


def test_removing_all_copies_but_one_is_perfect() -> None:
    counts = redundancy_counts(_case(), {"a", "a~2"})
    assert counts == RedundancyCounts(removed_right=2, near_pairs=2, near_pairs_kept=2)
    assert (counts.precision, counts.recall, counts.near_kept) == (1.0, 1.0, 1.0)


def test_copies_left_in_lower_recall() -> None:
    counts = redundancy_counts(_case(), {"a~1"})
    assert (counts.removed_right, counts.left_in) == (1, 1)
    assert (counts.precision, counts.recall) == (1.0, 0.5)


def test_removing_a_whole_cluster_is_wrong_and_breaks_its_near_pair() -> None:
    counts = redundancy_counts(_case(), {"a", "a~1", "a~2"})
    assert (counts.removed_right, counts.removed_wrong, counts.left_in) == (0, 3, 0)
    assert counts.near_kept == 0.5


def test_removing_a_passage_that_states_another_figure_is_wrong() -> None:
    counts = redundancy_counts(_case(), {"b!", "a~1", "a~2"})
    assert counts.precision == pytest.approx(2 / 3)
    assert counts.near_kept == 0.5


def test_nothing_removed_has_no_precision() -> None:
    counts = redundancy_counts(_case(), set())
    assert (counts.precision, counts.recall) == (None, 0.0)


def test_counts_add_up_over_cases() -> None:
    total = redundancy_counts(_case(), {"a"}) + redundancy_counts(_case(), {"c"})
    assert total == RedundancyCounts(removed_right=1, removed_wrong=1, left_in=1 + 2, near_pairs=4, near_pairs_kept=4)


def test_labels_are_found() -> None:
    assert has_redundancy_labels(_case())
    assert not has_redundancy_labels(make_case([make_chunk("a")]))


_FILES = sorted(DATA_FOLDER.glob("*-redundant.jsonl.gz")) if DATA_FOLDER.is_dir() else []


@pytest.mark.skipif(not _FILES, reason="no evaluation data: set FIRSTTOKEN_EVAL_DATA to its folder")
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_removing_every_labelled_copy_is_perfect_in_every_real_file(path: Path) -> None:
    total = RedundancyCounts()
    for case in read_dataset(path, limit=60).cases:
        total += redundancy_counts(case, {chunk.id for chunk in case.chunks if chunk.dup_of})
    assert (total.precision, total.recall, total.near_kept) == (1.0, 1.0, 1.0)
    assert total.near_pairs > 0
