"""Scores against hand-computed values, and over the real data where it is present."""

from pathlib import Path

import pytest
from factories_eval import DATA_FOLDER, make_case, make_chunk, make_history_case

from eval.datasets import read_dataset
from eval.samples import Probe
from eval.scoring import (
    SearchText,
    answer_score,
    evidence_score,
    gold_text_share,
    has_scored_answer,
    probe_score,
    squash,
    support_score,
    turns_score,
    words,
)


def test_words_end_at_punctuation_and_where_the_script_changes() -> None:
    assert words("The U.S. (1,998) in 1998年") == " the u s 1 998 in 1998 年 "


def test_words_keep_accents_and_fold_full_width_forms() -> None:
    assert words("Ｃafé №７") == " café no7 "


def test_squash_leaves_letters_and_digits() -> None:
    assert squash("iPhone 12 手机, 版本！") == "iphone12手机版本"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It was BC Jean.", "bc jean"),
        ("from 1990-1995", "1990"),
        ("（14．8％）", "14.8%"),
        ("共有48人", "48"),
        ("Wilhelm Conrad\nRöntgen, of Germany", "Wilhelm Conrad Röntgen"),
        ("москва-река", "Москва"),
        ("张 艺 谋 导演", "张艺谋"),
        ("Windows11系统", "Windows 11 系统"),
    ],
)
def test_text_states_the_answer(text: str, answer: str) -> None:
    assert SearchText(text).states(answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a carpet", "car"),
        ("in 11998", "1998"),
        ("costs 17.85", "7.8"),
        ("pi is 3.14159", "3.1"),
        ("张艺", "张艺谋"),
        ("anything", "?!"),
        ("", "car"),
    ],
)
def test_text_does_not_state_the_answer(text: str, answer: str) -> None:
    assert not SearchText(text).states(answer)


def test_any_accepted_answer_is_enough() -> None:
    case = make_case(answers=["Toby Gad", "BC Jean"])
    assert answer_score(case, SearchText("by BC Jean")) == 1.0
    assert answer_score(case, SearchText("by nobody")) == 0.0


def test_one_alternative_of_every_answer_group_is_needed() -> None:
    case = make_case(answers=["Paris", "Rome"], answer_groups=[["Paris", "City of Light"], ["Rome"]])
    assert answer_score(case, SearchText("the City of Light and Rome")) == 1.0
    assert answer_score(case, SearchText("Paris and the City of Light")) == 0.0


def test_answers_that_no_gold_chunk_states_are_not_scored() -> None:
    assert has_scored_answer(make_case([make_chunk("a", gold=True)], answer_in_gold=True))
    assert not has_scored_answer(make_case([make_chunk("a", gold=True)], answer_in_gold=False))
    assert not has_scored_answer(make_case([make_chunk("a", gold=True)], answers=[]))


def _keep(*ids: str) -> dict[str, list[tuple[int, int]]]:
    return {id: [(0, 5)] for id in ids}


def test_any_evidence_needs_one_gold_chunk() -> None:
    case = make_case([make_chunk("a", gold=True), make_chunk("b", gold=True), make_chunk("c")], evidence="any")
    assert evidence_score(case, _keep("b", "c")) == 1.0
    assert evidence_score(case, _keep("c")) == 0.0


def test_a_kept_gold_copy_stands_for_its_chunk() -> None:
    case = make_case([make_chunk("a", gold=True), make_chunk("a~1", gold=True, dup_of="a")], evidence="all")
    assert evidence_score(case, _keep("a~1")) == 1.0


def test_a_kept_copy_that_lost_the_evidence_does_not_count() -> None:
    case = make_case([make_chunk("a", gold=True), make_chunk("a~1", dup_of="a")], evidence="all")
    assert evidence_score(case, _keep("a~1")) == 0.0


def test_all_evidence_is_the_share_of_annotated_clusters() -> None:
    chunks = [
        make_chunk("a", gold=True),
        make_chunk("a~1", gold=True, dup_of="a"),
        make_chunk("b", gold=True),
        make_chunk("c", gold=True),
        make_chunk("d", gold=True, gold_kind="answer"),
    ]
    case = make_case(chunks, evidence="all")
    assert evidence_score(case, _keep("a~1", "c", "d")) == pytest.approx(2 / 3)


def test_groups_evidence_is_the_share_of_groups_with_a_kept_gold_chunk() -> None:
    chunks = [
        make_chunk("a", gold=True, group=0),
        make_chunk("b", gold=True, group=1),
        make_chunk("c", gold=True, group=1),
        make_chunk("d", group=2),
        make_chunk("e", gold=True, group=[2, 3]),
    ]
    case = make_case(chunks, evidence="groups")
    assert evidence_score(case, _keep("c", "d")) == 1 / 4
    assert evidence_score(case, _keep("a", "e")) == 3 / 4


def test_coverage_is_the_share_of_gold_characters_in_kept_windows() -> None:
    chunks = [
        make_chunk("w1", "x" * 100, gold=True, source="doc", span=(0, 100)),
        make_chunk("w2", "x" * 100, gold=True, source="doc", span=(50, 150)),
        make_chunk("other", "x" * 200, source="elsewhere", span=(0, 200)),
    ]
    case = make_case(chunks, evidence="coverage", gold_spans=[[80, 120]])
    assert evidence_score(case, {"w1": [(0, 100)]}) == 0.5
    assert evidence_score(case, {"w1": [(0, 100)], "w2": [(0, 100)]}) == 1.0
    assert evidence_score(case, {"other": [(0, 200)]}) == 0.0
    assert evidence_score(case, {}) == 0.0


def test_coverage_counts_only_the_kept_part_of_a_trimmed_window() -> None:
    case = make_case(
        [make_chunk("w", "x" * 100, gold=True, source="doc", span=(1000, 1100))],
        evidence="coverage",
        gold_spans=[{"source": "doc", "start": 1010, "end": 1030}],
    )
    assert evidence_score(case, {"w": [(0, 15), (25, 100)]}) == 0.5


def test_empty_context_scores_zero_when_there_is_gold() -> None:
    for evidence in ("any", "all", "groups"):
        case = make_case([make_chunk("a", gold=True, group=0)], evidence=evidence)
        assert evidence_score(case, {}) == 0.0
    assert answer_score(make_case(), SearchText("")) == 0.0


def test_without_gold_there_is_nothing_to_score() -> None:
    assert evidence_score(make_case([make_chunk("a")]), _keep("a")) is None


def test_support_is_the_share_of_sentences_in_the_text() -> None:
    chunk = make_chunk("a", "One is here. Two is there.", gold=True, support=["One is here.", "Two is there."])
    assert support_score(make_case([chunk]), SearchText("… two, is there!")) == 0.5
    assert support_score(make_case([make_chunk("a", gold=True)]), SearchText("x")) is None


def test_gold_text_share_is_of_the_most_complete_copy_per_cluster() -> None:
    chunks = [
        make_chunk("a", "x" * 10, gold=True),
        make_chunk("a~1", "x" * 10, gold=True, dup_of="a"),
        make_chunk("b", "x" * 10, gold=True),
        make_chunk("c", "x" * 10, gold=True),
    ]
    kept = {"a": [(0, 2)], "a~1": [(0, 4), (6, 8)], "b": [(0, 10)]}
    assert gold_text_share(make_case(chunks), kept) == pytest.approx((0.6 + 1.0) / 2)
    assert gold_text_share(make_case(chunks), {}) is None


def test_probes_are_scored_on_the_compacted_history() -> None:
    probes = [
        Probe(question="City?", answers=["San Jose"], turns=[0, 1], verbatim=True),
        Probe(question="Day?", answers=["March 4th"], turns=[1], verbatim=True),
        Probe(question="Mood?", answers=["inferred"], turns=[0, 2], verbatim=False),
    ]
    turns = ["To San Jose please.", "San Jose on March 4th.", "Fine."]
    case = make_history_case(turns, probes)
    text = SearchText("To San Jose, please. Summary: booked for the 4th.")
    assert probe_score(case, text) == 1 / 2
    assert turns_score(case, text) == pytest.approx(1 / 3)
    assert turns_score(case, SearchText("\n".join(turns))) == 1.0
    assert probe_score(case, SearchText("")) == 0.0


def test_history_without_verbatim_probes_has_no_answer_score() -> None:
    assert probe_score(make_history_case(["Hi."], []), SearchText("Hi.")) is None


_FILES = sorted(DATA_FOLDER.glob("[!t]*.jsonl.gz")) if DATA_FOLDER.is_dir() else []


@pytest.mark.skipif(not _FILES, reason="no evaluation data: set FIRSTTOKEN_EVAL_DATA to its folder")
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_everything_kept_scores_one_in_every_real_file(path: Path) -> None:
    for case in read_dataset(path, limit=60).cases:
        if case.is_history:
            text = SearchText("\n".join(turn.content for turn in case.history))
            assert probe_score(case, text) in (None, 1.0), case.id
            assert turns_score(case, text) in (None, 1.0), case.id
            continue
        kept = {chunk.id: [(0, len(chunk.text))] for chunk in case.chunks}
        assert evidence_score(case, kept) == 1.0, case.id
        assert evidence_score(case, {}) == 0.0, case.id
        assert gold_text_share(case, kept) == 1.0, case.id
        text = SearchText("\n".join(f"{chunk.title or ''}\n{chunk.text}" for chunk in case.chunks))
        assert support_score(case, text) in (None, 1.0), case.id
        if has_scored_answer(case) and not case.id.startswith("locomo"):  # its answers are not word for word
            assert answer_score(case, text) == 1.0, case.id
