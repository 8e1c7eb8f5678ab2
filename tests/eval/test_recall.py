"""A whole run against a small gateway over a real socket, with figures computed by hand."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from factories_eval import FakeGateway, rag_case, running, write_cases

from eval.cli import eval_group
from eval.datasets import read_dataset
from eval.gateway import GatewayClient
from eval.manifest import make_manifest
from eval.prompts import SYSTEM_PROMPT
from eval.recall import FULL, RecallOptions, RecallRun, baseline_of, reduced_arms
from eval.records import ArmSummary, CaseRecord, RecallReport
from eval.summary import make_report

FIXED = len(SYSTEM_PROMPT.split()) + 4  # "Which bird is it?"


def _run(
    tmp_path: Path, gateway: FakeGateway, cases: list[dict[str, Any]], **options: Any
) -> tuple[RecallReport, list[CaseRecord]]:
    dataset = read_dataset(write_cases(tmp_path / "made.jsonl.gz", cases))
    chosen = RecallOptions(**options)
    with (
        running(gateway) as url,
        GatewayClient(url=url, api_key="a") as client,
        GatewayClient(url=url, api_key="b") as full_client,
    ):
        records = list(RecallRun(client, full_client, dataset, chosen).cases())
    manifest = make_manifest(
        dataset=dataset, settings={}, seed=chosen.seed, model="default", max_model_len=None, started_gateway=False
    )
    return make_report(manifest, dataset, records, chosen), records


def _row(report: RecallReport, name: str) -> ArmSummary:
    return next(row for row in report.arms if row.arm.name == name)


def test_budgets_limit_the_tokens_of_the_passages(tmp_path: Path) -> None:
    gateway = FakeGateway()
    _, records = _run(tmp_path, gateway, [rag_case()], budgets=(0.25, 0.5))
    limits = [body.get("firsttoken", {}).get("max_input_tokens") for _, body, _ in gateway.requests]
    assert limits == [None, None, FIXED + 25, FIXED + 50]  # ten passages of ten words
    assert [item.prompt_tokens - item.fixed_tokens for item in records[0].compactions] == [30, 20, 50]
    assert [item.full_tokens for item in records[0].compactions] == [100, 100, 100]


def test_recall_and_tokens_kept_are_reported_per_arm(tmp_path: Path) -> None:
    cases = [rag_case(f"q-{place}", gold_at=place) for place in range(4)]
    report, _ = _run(tmp_path, FakeGateway(top_k=3), cases, budgets=(0.1,))
    no_budget, tight = _row(report, "no budget"), _row(report, "budget 0.1")
    assert no_budget.answer is not None
    assert no_budget.evidence is not None
    assert tight.answer is not None
    assert (no_budget.answer.mean, no_budget.evidence.mean, no_budget.tokens_kept) == (0.75, 0.75, 0.3)
    assert (tight.answer.mean, tight.tokens_kept, tight.answer.method) == (0.25, 0.1, "wilson")
    assert tight.answer.low < 0.25 < tight.answer.high


def test_first_passages_are_compared_at_the_tokens_that_the_arm_kept(tmp_path: Path) -> None:
    gateway = FakeGateway(choose=lambda documents: documents[3:5])
    cases = [rag_case("q-1", gold_at=4), rag_case("q-2", gold_at=3), rag_case("q-3", gold_at=1)]
    report, _ = _run(tmp_path, gateway, cases)
    baseline = _row(report, baseline_of(reduced_arms(())[0]).name)
    assert baseline.answer is not None
    assert baseline.answer.mean == pytest.approx(1 / 3)
    assert baseline.tokens_kept == pytest.approx(0.2)
    comparison = next(item for item in report.comparisons if item.metric == "answer recall")
    assert (comparison.only_arm, comparison.only_baseline, comparison.num_pairs) == (2, 1, 3)
    assert comparison.difference == pytest.approx(1 / 3)


def test_an_empty_context_scores_zero(tmp_path: Path) -> None:
    report, records = _run(tmp_path, FakeGateway(choose=lambda documents: []), [rag_case()])
    assert (records[0].scores[0].answer, records[0].scores[0].evidence) == (0.0, 0.0)
    assert report.num_errors == 0


def test_claims_without_the_text_score_zero(tmp_path: Path) -> None:
    gateway = FakeGateway(text_of=lambda document: "")
    report, records = _run(tmp_path, gateway, [rag_case()])
    assert (records[0].scores[0].answer, records[0].scores[0].evidence) == (0.0, 0.0)
    assert records[0].compactions[0].unproven == ["q-1-p0", "q-1-p1", "q-1-p2"]
    assert _row(report, "no budget").num_unproven == 3


def test_an_answer_in_the_question_alone_does_not_count(tmp_path: Path) -> None:
    case = rag_case(gold_at=9) | {"question": "Is the blue heron it?"}
    _, records = _run(tmp_path, FakeGateway(), [case])
    assert records[0].scores[0].answer == 0.0


def test_a_failing_gateway_counts_as_zero_and_as_an_error(tmp_path: Path) -> None:
    report, _ = _run(tmp_path, FakeGateway(status=500), [rag_case()], budgets=(0.5,))
    row = _row(report, "budget 0.5")
    assert row.answer is not None
    assert (row.answer.mean, row.num_errors, row.reduce_ms_median) == (0.0, 1, None)
    assert report.num_errors == 2
    assert "HTTP 500: engine is gone" in report.first_errors[0]


def test_copies_are_judged_by_what_was_merged(tmp_path: Path) -> None:
    case = rag_case()
    case["chunks"][1]["dup_of"] = "q-1-p0"
    case["chunks"][2]["near_of"] = "q-1-p0"
    report, _ = _run(tmp_path, FakeGateway(merged={"q-1-p1": "q-1-p0", "q-1-p5": "q-1-p6"}), [case])
    found = _row(report, "no budget").redundancy
    assert found is not None
    assert (found.precision, found.recall, found.near_kept) == (0.5, 1.0, 1.0)


def test_history_cases_are_scored_by_probes_and_have_no_passage_baseline(tmp_path: Path) -> None:
    probes = [
        {"question": "City?", "answers": ["San Jose"], "turns": [0], "verbatim": True},
        {"question": "Day?", "answers": ["March 4th"], "turns": [1], "verbatim": True},
    ]
    history = [{"role": "user", "content": "To San Jose."}, {"role": "assistant", "content": "On March 4th."}]
    case = rag_case() | {"chunks": [], "history": history, "probes": probes, "evidence": "history"}
    report, records = _run(tmp_path, FakeGateway(), [case], budgets=(0.5,))
    assert [row.arm.name for row in report.arms] == [FULL.name, "no budget", "budget 0.5"]
    assert (records[0].scores[0].answer, records[0].scores[0].evidence) == (1.0, 1.0)
    assert records[0].compactions[1].max_input_tokens == records[0].compactions[1].fixed_tokens + 3  # half of six words


def test_answers_are_paired_and_full_prompts_use_the_other_tenant(tmp_path: Path) -> None:
    cases = [rag_case(f"q-{place}", gold_at=place) for place in range(4)]
    gateway = FakeGateway(top_k=3)
    report, records = _run(tmp_path, gateway, cases, answers=True)
    full, reduced = report.answers
    assert (full.contains.mean, reduced.contains.mean) == (1.0, 0.75)
    comparison = next(item for item in report.comparisons if item.metric == "answer containment")
    assert (comparison.only_arm, comparison.only_baseline, comparison.difference) == (0, 1, -0.25)
    assert {key for path, body, key in gateway.requests if body.get("firsttoken", {}).get("bypass")} == {"b"}
    assert all(answer.ttft_ms is not None for record in records for answer in record.answers)
    assert report.num_count_mismatches == 0
    assert {body["max_tokens"] for _, body, _ in gateway.requests} == {32}


def test_a_full_prompt_over_the_window_is_counted_and_left_out_of_the_pairs(tmp_path: Path) -> None:
    cases = [rag_case("q-1", answer="heron"), rag_case("q-2", answer="heron", num_passages=30)]
    gateway = FakeGateway(window=200, reply=lambda prompt: "heron" if "heron" in prompt else "no")
    report, records = _run(tmp_path, gateway, cases, answers=True)
    full, reduced = report.answers
    assert (full.num_does_not_fit, full.num_cases, full.num_errors) == (1, 2, 0)
    assert (full.contains.mean, reduced.contains.mean) == (0.5, 1.0)
    assert full.contains_where_full_fits is not None
    assert full.contains_where_full_fits.mean == 1.0
    comparison = next(item for item in report.comparisons if item.metric == "answer containment")
    assert (comparison.num_pairs, comparison.difference) == (1, 0.0)
    assert {answer.arm for answer in records[1].answers if answer.does_not_fit} == {FULL.name}


def test_the_same_run_twice_gives_the_same_figures(tmp_path: Path) -> None:
    def figures() -> list[Any]:
        cases = [rag_case(f"q-{place}", gold_at=place) for place in range(6)]
        report, _ = _run(tmp_path, FakeGateway(), cases, budgets=(0.2, 0.4), answers=True, seed=5)
        timeless = [msgspec.structs.replace(row, reduce_ms_median=None, reduce_ms_p90=None) for row in report.arms]
        return [*timeless, *report.comparisons]

    assert figures() == figures()


@pytest.mark.parametrize("budgets", [(0.0,), (1.5,), (0.1, 0.1)])
def test_budgets_outside_their_range_are_refused(budgets: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="budget"):
        RecallOptions(budgets=budgets)


def test_a_case_without_tokens_to_reduce_is_an_error_and_no_division(tmp_path: Path) -> None:
    case = rag_case() | {"chunks": [], "evidence": "any"}
    report, _ = _run(tmp_path, FakeGateway(), [case])
    assert report.num_errors == 1
    assert "nothing to reduce" in report.first_errors[0]


@pytest.fixture
def invoke(tmp_path: Path) -> Callable[..., Result]:
    data = write_cases(tmp_path / "made.jsonl.gz", [rag_case("q-1"), rag_case("q-2")])

    def call(gateway: FakeGateway, *arguments: str) -> Result:
        with running(gateway) as url:
            return CliRunner().invoke(eval_group, ["recall", "--data", str(data), "--url", url, *arguments])

    return call


def test_command_prints_the_table_and_writes_result_and_cases(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = tmp_path / "out.json"
    result = invoke(FakeGateway(), "--budget", "0.1,0.25", "--output", str(output), "--answers")
    assert result.exit_code == 0, result.output
    assert "budget 0.25" in result.output
    written = json.loads(output.read_bytes())
    assert written["manifest"]["data"]["name"] == "made.jsonl.gz"
    assert written["manifest"]["settings"]["budgets"] == [0.1, 0.25]
    assert str(tmp_path) not in output.read_text(encoding="utf-8")
    lines = gzip.decompress((tmp_path / written["cases_file"]).read_bytes()).splitlines()
    records = [msgspec.json.decode(line, type=CaseRecord) for line in lines]
    assert [record.id for record in records] == ["q-1", "q-2"]
    assert "one two three" not in lines[0].decode()  # no texts of the data


def test_command_fails_when_a_request_failed(invoke: Callable[..., Result]) -> None:
    def refuse_long_lists(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if len(documents) > 5:
            raise OverflowError("too many")
        return documents

    result = invoke(FakeGateway(choose=refuse_long_lists))
    assert result.exit_code == 1
    assert "2 requests failed" in result.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--budget", "0.1,2"), "at most 1, got 2.0"),
        (("--budget", "ten"), "could not convert"),
        (("--output", "missing/out.json"), "does not exist"),
        (("--limit", "0"), "--limit"),
    ],
)
def test_wrong_usage_is_named(invoke: Callable[..., Result], arguments: tuple[str, ...], problem: str) -> None:
    result = invoke(FakeGateway(), *arguments)
    assert result.exit_code == 2
    assert problem in result.output


def test_answers_need_short_accepted_answers(tmp_path: Path) -> None:
    data = write_cases(tmp_path / "made.jsonl.gz", [rag_case() | {"answers": []}])
    result = CliRunner().invoke(eval_group, ["recall", "--data", str(data), "--url", "http://127.0.0.1:9", "--answers"])
    assert result.exit_code == 2
    assert "has none for case 'q-1'" in result.output


def test_malformed_data_ends_with_the_line(tmp_path: Path) -> None:
    data = tmp_path / "broken.jsonl"
    data.write_text('{"id": 5}\n', encoding="utf-8")
    result = CliRunner().invoke(eval_group, ["recall", "--data", str(data), "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "broken.jsonl, line 1" in result.output.replace("\n", " ")


def test_an_unreachable_gateway_is_one_line(tmp_path: Path) -> None:
    data = write_cases(tmp_path / "made.jsonl.gz", [rag_case()])
    result = CliRunner().invoke(eval_group, ["recall", "--data", str(data), "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "ConnectError" in result.output
    assert "Traceback" not in result.output
