"""What the bench of deduplication counts, against hand-made cases."""

import pytest
from factories_eval import make_case, make_chunk

from eval.benches.bench_dedup import LostGold, gold_elsewhere, statement_pairs
from eval.samples import Case


def _case() -> Case:
    return make_case(
        [
            make_chunk("a", "The fee is 20 dollars.", gold=True),
            make_chunk("a~1", "The fee is 20 dollars", gold=True, dup_of="a"),
            make_chunk("b", "The fee is 20 dollars. It is due in May.", near_of="a"),
            make_chunk("c", "The fee is 30 dollars. It is due in May.", near_of="a"),
        ]
    )


@pytest.mark.parametrize(
    ("merged", "num_kept"),
    [
        ({}, 2),
        ({"a~1": "a"}, 2),
        ({"a": "c"}, 1),
        ({"b": "a"}, 1),
        ({"b": "a", "c": "a"}, 0),
        ({"a": "x", "b": "x", "c": "y"}, 1),
    ],
)
def test_statements_are_kept_where_two_sides_stand_in_two_passages(merged: dict[str, str], num_kept: int) -> None:
    assert statement_pairs(_case(), merged) == (num_kept, 2)


def test_gold_merged_elsewhere_is_looked_up_in_its_survivor() -> None:
    assert gold_elsewhere(_case(), {"a~1": "a"}) == []
    assert gold_elsewhere(_case(), {"a": "b", "a~1": "c"}) == [
        LostGold(case=_case().id, chunk="a", merged_into="b", is_in_survivor=True),
        LostGold(case=_case().id, chunk="a~1", merged_into="c", is_in_survivor=False),
    ]
