"""Public formats become cases; the inputs are made after the formats' documentation."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from eval.datasets import read_dataset
from eval.errors import DataError
from eval.readers import FORMATS, detect_format
from eval.samples import Case
from eval.scoring import has_scored_answer

_PARAGRAPHS = {
    "The heron is a bird. It stands 98 cm tall.": ("How tall is the heron?", "98 cm"),
    "The stork nests on roofs in Alsace.": ("Where does the stork nest?", "on roofs"),
    "The crane flies to Spain in October.": ("When does the crane fly?", "October"),
}


def _write(path: Path, content: Any) -> Path:
    text = "\n".join(json.dumps(row) for row in content) if path.suffix == ".jsonl" else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def _read(path: Path, **options: Any) -> list[Case]:
    return read_dataset(path, format="auto", **options).cases


def _gold(case: Case) -> list[str]:
    return [chunk.text for chunk in case.chunks if chunk.gold]


def _squad() -> dict[str, Any]:
    paragraphs = [
        {"context": text, "qas": [{"id": f"q{n}", "question": question, "answers": [{"text": answer}] * 2}]}
        for n, (text, (question, answer)) in enumerate(_PARAGRAPHS.items())
    ]
    unanswerable = {"id": "q9", "question": "Who is the heron's king?", "answers": [], "is_impossible": True}
    paragraphs[0]["qas"].append(unanswerable)  # type: ignore[attr-defined]
    return {"version": "v2.0", "data": [{"title": "Wading_birds", "paragraphs": paragraphs}]}


def test_squad_gives_the_articles_paragraphs_and_leaves_out_what_has_no_answer(tmp_path: Path) -> None:
    cases = _read(_write(tmp_path / "dev.json", _squad()))
    assert [case.id for case in cases] == ["q0", "q1", "q2"]
    assert [case.answers for case in cases] == [["98 cm"], ["on roofs"], ["October"]]
    assert [_gold(case) for case in cases] == [[text] for text in _PARAGRAPHS]
    assert all(len(case.chunks) == 3 and case.chunks[0].title == "Wading birds" for case in cases)
    assert all(has_scored_answer(case) for case in cases)


def test_squad_rows_and_document_give_the_same_cases(tmp_path: Path) -> None:
    rows = [
        {"id": f"q{n}", "title": "Wading_birds", "context": text, "question": asked, "answers": {"text": [answer]}}
        for n, (text, (asked, answer)) in enumerate(_PARAGRAPHS.items())
    ]
    flat = _read(_write(tmp_path / "rows.jsonl", rows))
    assert flat == _read(_write(tmp_path / "dev.json", _squad()))


def test_hotpotqa_wants_both_paragraphs_and_knows_the_sentences(tmp_path: Path) -> None:
    row = {
        "_id": "h1",
        "question": "Which river runs through the town where Ada was born?",
        "answer": "Lys",
        "supporting_facts": [["Ada", 0], ["Ghent", 1]],
        "context": [["Ada", ["Ada was born in Ghent.", " She sang."]], ["Ghent", ["A town.", " The Lys runs there."]],
                    ["Rome", ["A city."]]],
    }  # fmt: skip
    (case,) = _read(_write(tmp_path / "hotpot.json", [row]))
    assert (case.evidence, case.answer_in_gold) == ("all", True)
    assert [chunk.support for chunk in case.chunks] == [["Ada was born in Ghent."], ["The Lys runs there."], []]
    columns = row | {
        "context": {"title": ["Ada", "Ghent", "Rome"], "sentences": [s for _, s in row["context"]]},
        "supporting_facts": {"title": ["Ada", "Ghent"], "sent_id": [0, 1]},
    }
    assert _read(_write(tmp_path / "columns.json", [columns])) == [case]


def test_an_answer_that_no_gold_passage_states_is_not_scored(tmp_path: Path) -> None:
    row = {
        "_id": "h2",
        "question": "Are both birds?",
        "answer": "yes",
        "supporting_facts": [["Heron", 0]],
        "context": [["Heron", ["A bird."]], ["Answer", ["yes"]]],
    }
    (case,) = _read(_write(tmp_path / "hotpot.json", [row]))
    assert case.answer_in_gold is False
    assert not has_scored_answer(case)


def test_kilt_takes_texts_from_the_knowledge_source(tmp_path: Path) -> None:
    pages = [
        {"wikipedia_id": "12", "wikipedia_title": "Heron", "text": ["Heron\n", "Grey.\n", "It stands 98 cm tall.\n"]}
    ]
    corpus = _write(tmp_path / "pages.jsonl", pages)
    named = {"wikipedia_id": "12", "title": "Heron", "start_paragraph_id": 2, "end_paragraph_id": 2}
    row = {
        "id": "k1",
        "input": "How tall is it?",
        "output": [{"answer": "98 cm", "provenance": [named]}, {"answer": "98"}],
    }
    data = _write(tmp_path / "nq-dev-kilt.jsonl", [row])
    (case,) = _read(data, corpus=corpus)
    assert (_gold(case), case.answers, case.dataset) == (["It stands 98 cm tall."], ["98 cm", "98"], "kilt")
    with pytest.raises(DataError, match="knowledge source"):
        _read(data)


def test_nq_contexts_keep_the_retrievers_order(tmp_path: Path) -> None:
    contexts = [
        {"title": "Stork", "text": "A stork.", "score": 3.0, "isgold": False},
        {"title": "Heron", "text": "98 cm tall.", "score": 2.0, "isgold": True},
    ]
    row = {"question": "How tall?", "answers": ["98 cm"], "ctxs": contexts}
    (case,) = _read(_write(tmp_path / "nq.jsonl", [row]))
    assert [(chunk.title, chunk.gold, chunk.score) for chunk in case.chunks] == [
        ("Stork", False, 3.0),
        ("Heron", True, 2.0),
    ]


def test_beir_reads_its_folder_and_leaves_out_queries_without_relevant_passages(tmp_path: Path) -> None:
    folder = tmp_path / "birds"
    (folder / "qrels").mkdir(parents=True)
    _write(folder / "corpus.jsonl", [{"_id": f"d{n}", "title": "", "text": text} for n, text in enumerate(_PARAGRAPHS)])
    _write(folder / "queries.jsonl", [{"_id": "q1", "text": "stork nest roofs"}, {"_id": "q2", "text": "nothing"}])
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t0\n", encoding="utf-8")
    (case,) = _read(folder)
    assert (case.id, [chunk.id for chunk in case.chunks if chunk.gold], case.chunks[0].id) == ("q1", ["d1"], "d1")
    assert case.answers == []


def test_ragas_in_present_and_former_fields_is_the_same_case(tmp_path: Path) -> None:
    texts = list(_PARAGRAPHS)
    present = {
        "user_input": "How tall?",
        "retrieved_contexts": texts,
        "reference_contexts": texts[:1],
        "reference": "98 cm",
        "response": "two metres",
    }
    former = {"question": "How tall?", "contexts": texts, "ground_truth": "98 cm", "answer": "two metres"}
    (new,) = _read(_write(tmp_path / "new.jsonl", [present]))
    (old,) = _read(_write(tmp_path / "old.json", [former]))
    assert new == old
    assert (new.answers, _gold(new), [chunk.text for chunk in new.chunks]) == (["98 cm"], texts[:1], texts)


def test_a_long_reference_is_no_short_answer(tmp_path: Path) -> None:
    reference = "The heron stands on one leg because it loses less warmth that way, and it looks good too."
    row = {
        "user_input": "Why?",
        "retrieved_contexts": ["Herons."],
        "reference_contexts": ["Herons."],
        "reference": reference,
    }
    (case,) = _read(_write(tmp_path / "long.jsonl", [row]))
    assert (case.answers, case.reference, case.answer_in_gold) == ([], reference, None)


def test_llama_index_examples_get_distractors(tmp_path: Path) -> None:
    examples = [
        {"query": question, "reference_contexts": [text], "reference_answer": answer, "query_by": None}
        for text, (question, answer) in _PARAGRAPHS.items()
    ]
    cases = _read(_write(tmp_path / "rag_dataset.json", {"examples": examples}))
    assert [len(case.chunks) for case in cases] == [3, 3, 3]
    assert [_gold(case) for case in cases] == [[text] for text in _PARAGRAPHS]


def test_llama_index_retrieval_pairs_are_judged_by_evidence(tmp_path: Path) -> None:
    texts = list(_PARAGRAPHS)
    whole = {"queries": {"q": "stork nest"}, "corpus": {"a": texts[0], "b": texts[1]}, "relevant_docs": {"q": ["b"]}}
    (case,) = _read(_write(tmp_path / "pairs.json", whole))
    assert [(chunk.id, chunk.gold) for chunk in case.chunks] == [("b", True), ("a", False)]


def test_rows_of_one_question_in_a_table_are_its_passages(tmp_path: Path) -> None:
    path = tmp_path / "made.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["Question", "Answer", "Context"])
        writer.writerow(["How tall?", "98 cm", "A stork, of some size."])
        writer.writerow(["How tall?", "98 cm", "It stands\n98 cm tall."])
    (case,) = _read(path)
    assert (_gold(case), len(case.chunks), case.answer_in_gold) == (["It stands\n98 cm tall."], 2, True)


def test_our_own_format_is_recognised(tmp_path: Path) -> None:
    path = _write(tmp_path / "own.jsonl", [{"id": "a", "question": "Who?", "chunks": [], "answers": []}])
    assert detect_format(path) == "cases"


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_file_of_another_shape_is_a_named_error(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / "other.json", [{"unexpected": 1}])
    with pytest.raises(DataError, match=r"other\.json"):
        read_dataset(path, format=name)


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'xml' has no reader; known: cases, squad"):
        read_dataset(_write(tmp_path / "a.json", [{"a": 1}]), format="xml")
