"""Anonymised logs keep structure and lose text."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from factories_eval import DATA_FOLDER

from eval.cli import eval_group
from eval.errors import DataError
from eval.traces import Anonymiser, read_trace, write_trace

_SYSTEM = "You answer questions about the secret project Nightingale in a friendly way. " * 8


def _entry(time: Any, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
    return {"timestamp": time, "messages": messages, "usage": {"prompt_tokens": 160, "completion_tokens": 12}, **fields}


def _log(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return _log(
        tmp_path / "log.jsonl",
        [
            _entry("2026-03-01T12:00:05Z", "Who leads it? " * 20, user="bob@example.com"),
            _entry("2026-03-01T12:00:00Z", "When does it end? " * 20, user="ann@example.com"),
            _entry("2026-03-01T12:00:09.500Z", "Who leads it? " * 20, user="bob@example.com"),
        ],
    )


def test_lengths_times_and_common_beginnings_stay(log: Path) -> None:
    lines = Anonymiser(b"salt", block_tokens=16).lines(log)
    assert [line.t for line in lines] == [0.0, 5.0, 9.5]
    assert [(line.input_tokens, line.output_tokens) for line in lines] == [(160, 12)] * 3
    blocks = [line.prefix_blocks or [] for line in lines]
    assert blocks[1] == blocks[2]
    shared = [a == b for a, b in zip(blocks[0], blocks[1], strict=False)]
    num_shared = len(("<system>" + _SYSTEM + "<user>Wh").encode()) // 64
    assert shared == [True] * num_shared + [False] * (len(shared) - num_shared)
    assert [line.session for line in lines] == [1, 0, 0]


def test_nothing_of_the_text_and_of_the_users_is_left(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.jsonl"
    result = CliRunner().invoke(eval_group, ["anonymise", str(log), str(output)])
    assert result.exit_code == 0, result.output
    written = output.read_text(encoding="utf-8")
    for word in ("Nightingale", "friendly", "leads", "bob", "ann", "example", "system"):
        assert word not in written
    assert [line.t for line in read_trace(output).lines] == [0.0, 5.0, 9.5]


def test_ids_depend_on_the_salt_alone(log: Path) -> None:
    one, same, other = (Anonymiser(salt, block_tokens=16).lines(log) for salt in (b"a", b"a", b"b"))
    assert one == same
    assert set(one[0].prefix_blocks or []).isdisjoint(other[0].prefix_blocks or [])


def test_two_commands_draw_different_salts(log: Path, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.gz"):
        CliRunner().invoke(eval_group, ["anonymise", str(log), str(tmp_path / name)])
    first, second = (read_trace(tmp_path / name).lines[0].prefix_blocks for name in ("a.jsonl", "b.jsonl.gz"))
    assert first != second


def test_a_block_counts_only_with_all_before_it() -> None:
    anonymiser = Anonymiser(b"salt", block_tokens=1, encode=lambda text: [int(char) for char in text])
    ids = [list(anonymiser._chain(anonymiser._units(text))) for text in ("123", "193")]
    assert ids[0][0] == ids[1][0]
    assert set(ids[0][1:]).isdisjoint(ids[1][1:])
    assert all(id < 2**52 for id in ids[0])


def test_requests_nested_in_an_entry_and_counts_that_are_missing(tmp_path: Path) -> None:
    entry = {
        "t": 1700000000000,
        "request": {"prompt": "x" * 400},
        "response": {"choices": [{"message": {"content": "y" * 40}}]},
    }
    (line,) = Anonymiser(b"salt").lines(_log(tmp_path / "log.jsonl", [entry]))
    assert (line.t, line.input_tokens, line.output_tokens) == (0.0, 100, 11)  # "<>" and forty bytes
    assert line.prefix_blocks is not None
    assert len(line.prefix_blocks) == 2


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"prompt": "a"}, "none of the fields t, timestamp"),
        ({"t": 1}, "neither a prompt"),
        ({"t": "soon", "prompt": "a"}, "no time"),
    ],
)
def test_entries_that_cannot_be_used_are_named(tmp_path: Path, entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=f"entry 1: .*{problem}"):
        Anonymiser(b"salt").lines(_log(tmp_path / "log.jsonl", [entry]))


def test_a_trace_is_read_as_it_was_written(log: Path, tmp_path: Path) -> None:
    lines = Anonymiser(b"salt").lines(log)
    write_trace(tmp_path / "trace.jsonl.gz", lines)
    assert read_trace(tmp_path / "trace.jsonl.gz").lines == lines
    assert len(read_trace(tmp_path / "trace.jsonl.gz", limit=2).lines) == 2


def test_a_broken_trace_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"t": 0, "input_tokens": 1, "output_tokens": 1}\n{"t": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"trace\.jsonl, line 2"):
        read_trace(path)


@pytest.mark.skipif(not DATA_FOLDER.is_dir(), reason="the evaluation data is not on this machine")
@pytest.mark.parametrize("name", ["trace-agent-magagent", "trace-azure-code"])
def test_public_traces_are_read(name: str) -> None:
    trace = read_trace(DATA_FOLDER / f"{name}.jsonl.gz", limit=50)
    assert len(trace.lines) == 50
    assert all(line.input_tokens > 0 for line in trace.lines)
