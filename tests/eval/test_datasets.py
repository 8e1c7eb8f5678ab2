"""Reading data files: what is tolerated, and what the error says where it is not."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from factories_eval import rag_case, write_cases

from eval.datasets import read_dataset
from eval.errors import DataError


def test_cases_and_digest_are_read_from_gzip(tmp_path: Path) -> None:
    path = write_cases(tmp_path / "made.jsonl.gz", [rag_case("q-1"), rag_case("q-2"), rag_case("q-3")])
    dataset = read_dataset(path, limit=2)
    assert [case.id for case in dataset.cases] == ["q-1", "q-2"]
    assert (dataset.name, dataset.num_cases_in_file) == ("made.jsonl.gz", 3)
    assert dataset.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_plain_json_lines_and_blank_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    path.write_text(json.dumps(rag_case("q-1")) + "\n\n" + json.dumps(rag_case("q-2")), encoding="utf-8")
    assert len(read_dataset(path).cases) == 2


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    case = rag_case() | {"hops": 2, "something": {"new": True}}
    assert read_dataset(write_cases(tmp_path / "a.gz", [case])).cases[0].chunks[0].gold


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{not json", "malformed|expected"),
        ('{"question": "q"}', "missing required field `id`"),
        ('{"id": "a", "question": 5}', r"Expected `str`.*\$\.question"),
        ('{"id": "a", "question": "q", "evidence": "some"}', r"\$\.evidence"),
        ('{"id": "a", "question": "q", "chunks": [{"id": "c"}]}', r"missing required field `text`.*chunks"),
        (
            '{"id": "a", "question": "q", "chunks": [{"id": "c", "text": ""}, {"id": "c", "text": ""}]}',
            "1 different ids",
        ),
        (
            '{"id": "a", "question": "q", "probes": [{"question": "p", "answers": [], "turns": [3]}]}',
            "0 turns of history",
        ),
        ('{"id": "a", "question": "q", "gold_spans": ["x"]}', "unknown shape: 'x'"),
        ('{"id": "q-1", "question": "q"}', "is on line 1 already"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "made.jsonl"
    path.write_text(json.dumps(rag_case("q-1")) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"made\.jsonl, line 2: .*({problem})"):
        read_dataset(path)


def test_invalid_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    path.write_bytes(b'{"id": "a", "question": "\xff"}\n')
    with pytest.raises(DataError, match=r"made\.jsonl, line 1"):
        read_dataset(path)


def test_a_cut_gzip_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(json.dumps(rag_case()).encode())[:-20])
    with pytest.raises(DataError, match=r"cut\.gz: not a readable gzip file"):
        read_dataset(path)


def test_a_missing_file_and_an_empty_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read: No such file"):
        read_dataset(tmp_path / "gone.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="holds no case"):
        read_dataset(tmp_path / "empty.jsonl")


def test_gold_spans_are_read_in_three_shapes(tmp_path: Path) -> None:
    spans = [[1, 2], ["doc", 3, 4], {"start": 5, "end": 6, "source": "doc"}]
    case = read_dataset(write_cases(tmp_path / "a.gz", [rag_case() | {"gold_spans": spans}])).cases[0]
    assert [(item.source, item.start, item.end) for item in case.gold_ranges()] == [
        (None, 1, 2),
        ("doc", 3, 4),
        ("doc", 5, 6),
    ]
