"""The committed results: what is kept of a run, the table made of it, and the planted regressions' bench."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from factories_eval import REPOSITORY, FakeGateway, rag_case, running, write_cases

from eval.benches import bench_planted, planted_faults
from eval.benches.bench_committed import SETS, SKIPPED, main, run_recall, spread, write_part
from eval.benches.bench_planted import DROP_GATE, GATE, PlantedReport, parts_of, run_gate
from eval.cli import eval_group
from eval.datasets import read_dataset
from eval.errors import EvalError
from eval.manifest import MachineManifest
from eval.page_blocks import between, put_into
from eval.recall_table import MARKS, CommittedRecall, make_set, result_tables
from eval.records import RecallReport

RESULTS = REPOSITORY / "eval" / "results"


def _report(folder: Path, *arguments: str, num_cases: int = 6, gateway: FakeGateway | None = None) -> RecallReport:
    data = write_cases(folder / "made.jsonl.gz", [rag_case(f"q-{place}", gold_at=place) for place in range(num_cases)])
    with running(gateway or FakeGateway()) as url:
        command = ["recall", "--data", str(data), "--url", url, "--output", str(folder / "out.json"), *arguments]
        result = CliRunner().invoke(eval_group, command)
    assert result.exit_code == 0, result.output
    return msgspec.json.decode((folder / "out.json").read_bytes(), type=RecallReport)


def _result(folder: Path) -> CommittedRecall:
    report = _report(folder, "--budget", "0.3,0.5")
    answers = _report(folder, "--answers")
    made = make_set("made", "ab" * 32, 90, report, answers)
    manifest = msgspec.convert(msgspec.to_builtins(report.manifest), type=MachineManifest)
    return CommittedRecall(manifest=manifest, sets=[made])


def test_figures_are_kept_and_texts_are_not(tmp_path: Path) -> None:
    made = _result(tmp_path).sets[0]
    assert (made.metric, made.num_cases, made.num_cases_in_file, made.num_answer_cases) == ("answer", 6, 90, 6)
    assert [cell.budget for cell in made.cells] == [None, 0.3, 0.5]
    free = made.cells[0]
    assert free.answer is not None
    assert (free.answer.mean, free.num_errors, free.num_empty) == (0.5, 0, 0)  # the gold passage is one of the first 3
    assert free.versus_first is not None
    assert free.answer_first == free.answer.mean - free.versus_first.difference
    assert [cell.arm for cell in made.answers] == ["full prompt", "no budget"]
    assert made.answers[1].versus_full is not None
    assert "heron" not in msgspec.json.encode(made).decode()


def test_the_table_is_put_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    table = result_tables(_result(tmp_path))
    row = next(line for line in table.splitlines() if line.startswith("| made | 6 | answers |"))
    assert row.count("|") == table.splitlines()[0].count("|") == table.splitlines()[1].count("|")
    assert "| made | 6 of 6 |" in table
    text = f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n"
    assert put_into(text, MARKS, table) == f"before\n{between(MARKS, table)}\nafter\n"
    assert put_into(put_into(text, MARKS, table), MARKS, table) == put_into(text, MARKS, table)
    with pytest.raises(ValueError, match="not both there"):
        put_into("no marks", MARKS, table)


def test_cases_are_spread_over_the_whole_file(tmp_path: Path) -> None:
    cases = [rag_case(f"q-{place}") for place in range(20)]
    source = write_cases(tmp_path / "a.jsonl.gz", cases)
    dataset = read_dataset(source)
    assert spread(dataset, 5) == [0, 4, 8, 12, 16]
    assert spread(dataset, 30) == list(range(20))
    write_part(source, [0, 19], tmp_path / "b.jsonl.gz")
    assert [case.id for case in read_dataset(tmp_path / "b.jsonl.gz").cases] == ["q-0", "q-19"]


def test_a_run_is_taken_up_unless_something_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_cases(tmp_path / "a.jsonl.gz", [rag_case(f"q-{place}") for place in range(3)])
    output = tmp_path / "a.json"
    gateway = FakeGateway()
    with running(gateway) as url:
        first = run_recall(data, output, url, ("--budget", "0.5"), "none yet")
        num_asked = len(gateway.requests)
        commit = first.manifest.commit
        assert run_recall(data, output, url, ("--budget", "0.5"), commit) == first
        assert run_recall(data, output, url, ("--budget", "0.5"), None) == first  # of whatever commit
        assert len(gateway.requests) == num_asked
        assert run_recall(data, output, url, ("--budget", "0.5"), "another").manifest.commit == commit
        assert len(gateway.requests) > num_asked
        num_asked = len(gateway.requests)
        run_recall(data, output, url, ("--budget", "0.4"), commit)
        assert len(gateway.requests) > num_asked
    with pytest.raises(EvalError, match=r"a\.jsonl\.gz: exit status"):
        run_recall(data, output, url, ("--budget", "0.2"), commit)


def test_parts_of_a_set_hold_other_cases(tmp_path: Path) -> None:
    source = write_cases(tmp_path / "a.jsonl.gz", [rag_case(f"q-{place}") for place in range(25)])
    parts = parts_of(source, 3, tmp_path)
    ids = [[case.id for case in read_dataset(part).cases] for part in parts]
    assert ids[0] == [f"q-{place}" for place in range(10)]
    assert ids[2] == [*(f"q-{place}" for place in range(20, 25)), *(f"q-{place}" for place in range(5))]


def test_a_gate_run_says_what_stopped_it(tmp_path: Path) -> None:
    data = write_cases(tmp_path / "a.jsonl.gz", [rag_case(f"q-{place}", gold_at=place) for place in range(8)])
    with running(FakeGateway(top_k=1)) as url:
        command = ["eval", "recall", "--data", str(data), "--url", url, "--gate"]
        arguments: dict[str, Any] = {"seed": 3, "output": tmp_path / "out.json"}
        stopped = run_gate("top-1", "one passage", bench_planted.FIRSTTOKEN, [*command, DROP_GATE], **arguments)
        missed = run_gate("top-1", "one passage", bench_planted.FIRSTTOKEN, [*command, "answer>=0.1"], **arguments)
        sound = run_gate("sound", None, bench_planted.FIRSTTOKEN, [*command, "answer>=0.1"], **arguments)
    assert (stopped.exit_status, stopped.is_right, stopped.num_cases) == (1, True, 8)
    assert set(stopped.broken) == {"no budget: answer_drop<=0.02", "no budget: evidence_drop<=0.02"}
    assert stopped.arguments == ["eval", "recall", "--data", "a.jsonl.gz", "--gate", DROP_GATE]
    assert (missed.exit_status, missed.is_right, sound.is_right) == (0, False, True)


@pytest.mark.parametrize("fault", planted_faults.FAULTS)
def test_faults_are_planted_in_their_own_process_alone(fault: str) -> None:
    script = (
        "import sys; sys.argv[1:] = [sys.argv[1], '--version']\n"
        "from eval.benches.planted_faults import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "import reducer.dedup, reducer.facts, kernels.kv_quantization as right\n"
        "from kernels.attention import quantized\n"
        "print(vars(reducer.dedup)['contains'] is not reducer.facts.contains,"
        " vars(quantized)['dequantize_kv'] is not right.dequantize_kv)"
    )
    done = subprocess.run([sys.executable, "-c", script, fault], capture_output=True, text=True, check=True)
    expected = "True False" if fault == "fact-guard" else "False True"
    assert done.stdout.splitlines()[-1] == expected


def test_the_gate_of_the_bench_is_the_one_of_make() -> None:
    assert f"GATE ?= {GATE}\n" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")


def test_every_set_is_measured_or_said_to_be_skipped() -> None:
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the evaluation data is not there")
    names = {file.name.removesuffix(".jsonl.gz") for file in folder.glob("*.jsonl.gz")}
    assert {name for name in names if not name.startswith("trace-")} == {*SETS, *SKIPPED}


def test_the_command_measures_a_set_and_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cases(tmp_path / "nq.jsonl.gz", [rag_case(f"q-{place}", gold_at=place) for place in range(6)])
    page = tmp_path / "RESULTS.md"
    page.write_text(f"text\n{MARKS[0]}\n{MARKS[1]}\n", encoding="utf-8")
    output = tmp_path / "recall.json"
    with running(FakeGateway()) as url:
        monkeypatch.setattr("eval.benches.bench_committed.started_gateway", lambda **options: _given(url))
        arguments = [tmp_path, "--limit", 4, "--answers", 2, "--sets", "nq", "--work", tmp_path / "work"]
        arguments += ["--output", output, "--page", page]
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    written = msgspec.json.decode(output.read_bytes(), type=CommittedRecall)
    assert [(item.name, item.num_cases, item.num_answer_cases) for item in written.sets] == [("nq", 4, 2)]
    assert page.read_text(encoding="utf-8") == f"text\n{between(MARKS, result_tables(written))}\n"
    assert str(tmp_path) not in output.read_text(encoding="utf-8")


class _given:
    """A gateway that somebody else runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> str:
        return self.url

    def __exit__(self, *error: object) -> None:
        pass


def test_the_results_page_holds_the_table_of_the_committed_result() -> None:
    file = RESULTS / "recall.json"
    if not file.is_file():
        pytest.skip("no recall over all sets is committed yet")
    committed = msgspec.json.decode(file.read_bytes(), type=CommittedRecall)
    assert [item.name for item in committed.sets] == list(SETS)
    assert between(MARKS, result_tables(committed)) in (REPOSITORY / "RESULTS.md").read_text(encoding="utf-8")


def test_the_committed_gates_stopped_every_fault_and_nothing_else() -> None:
    file = RESULTS / "planted.json"
    if not file.is_file():
        pytest.skip("no run of the planted regressions is committed yet")
    report = msgspec.json.decode(file.read_bytes(), type=PlantedReport)
    assert report.is_right
    assert (report.num_twin_passed, report.num_twin_runs) == (20, 20)
    assert sum(run.planted is not None for run in report.runs) == 4
