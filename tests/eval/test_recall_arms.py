"""Baselines, policies, cached generations, resumed runs and the judge, against the small gateway."""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from factories_eval import FakeGateway, make_case, make_chunk, rag_case, running, write_cases

from eval.answer_quality import citations, cited_labels, exact_match, f1
from eval.cli import eval_group
from eval.errors import DataError
from eval.gateway import Generation
from eval.generation_cache import GenerationCache
from eval.journal import Journal
from eval.judge import Judge, cohen_kappa, parse_verdict
from eval.lengths import length_bucket
from eval.records import CaseRecord, RecallReport
from eval.selectors import SelectorFactory


def _run(
    tmp_path: Path, gateway: FakeGateway, *arguments: str, cases: list[dict[str, Any]] | None = None, status: int = 0
) -> RecallReport:
    data = write_cases(
        tmp_path / "made.jsonl.gz", cases or [rag_case(f"q-{place}", gold_at=place) for place in range(4)]
    )
    output = tmp_path / "out.json"
    with running(gateway) as url:
        command = ["recall", "--data", str(data), "--url", url, "--output", str(output), *arguments]
        result = CliRunner().invoke(eval_group, command)
    assert result.exit_code == status, result.output
    return msgspec.json.decode(output.read_bytes(), type=RecallReport)


def _answer(report: RecallReport, arm: str) -> float:
    score = next(row.answer for row in report.arms if row.arm.name == arm)
    assert score is not None
    return score.mean


def test_head_and_tail_take_whole_passages_from_their_end(tmp_path: Path) -> None:
    gateway = FakeGateway(top_k=3)
    report = _run(tmp_path, gateway, "--baseline", "head", "--baseline", "tail", "--budget", "0.2")
    assert _answer(report, "head, budget 0.2") == 0.5  # gold at 0 to 3, two passages fit
    assert _answer(report, "tail, budget 0.2") == 0.0
    assert _answer(report, "head, no budget") == 0.75
    sent = [body for path, body, _ in gateway.requests if body.get("firsttoken", {}).get("bypass")]
    assert {len(body["documents"]) for body in sent} == {2, 3}
    kept = {row.arm.name: row.tokens_kept for row in report.arms}
    assert kept["head, budget 0.2"] == pytest.approx(0.2)


def test_bm25_finds_what_the_question_names(tmp_path: Path) -> None:
    cases = [rag_case(f"q-{place}", gold_at=place + 5, answer="that bird") for place in range(3)]
    report = _run(tmp_path, FakeGateway(), "--baseline", "bm25", "--budget", "0.1", cases=cases)
    assert _answer(report, "bm25, budget 0.1") == 1.0
    assert _answer(report, "budget 0.1") == 0.0
    comparison = next(item for item in report.comparisons if item.baseline == "bm25, budget 0.1")
    assert (comparison.only_baseline, comparison.difference) == (3, -1.0)


def test_an_embedding_baseline_ranks_by_similarity() -> None:
    case = make_case([make_chunk("far"), make_chunk("near")], question="near")
    factory = SelectorFactory(
        embed=lambda texts: np.array([[float("near" in text), 1.0] for text in texts], np.float32)
    )
    selector = factory.make(["embedding"]).ready[0]
    assert [item["id"] for item in selector.choose(case, {"far": 5, "near": 5}, 5)] == ["near"]


def test_packages_that_are_not_installed_are_skipped_with_the_reason(tmp_path: Path) -> None:
    report = _run(tmp_path, FakeGateway(), "--baseline", "longllmlingua", "--baseline", "headroom")
    reasons = {skipped.name: skipped.reason for skipped in report.skipped}
    assert set(reasons) <= {"longllmlingua", "headroom"}
    assert all("not installed" in reason or "--compressor-model" in reason for reason in reasons.values())


_FAKE_HEADROOM = """
import types
def compress(messages, model, protect_recent, target_ratio):
    text = messages[-1]["content"]
    if "explode" in text:
        raise RuntimeError("no luck")
    print("noise on standard output")
    kept = " ".join(text.split()[: round(len(text.split()) * target_ratio)])
    return types.SimpleNamespace(messages=[{"content": kept}])
"""


def test_a_compressor_in_an_environment_of_its_own_is_asked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headroom.py").write_text(_FAKE_HEADROOM, encoding="utf-8")
    (tmp_path / "headroom_ai-9.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: headroom-ai\nVersion: 9.9\n"
    (tmp_path / "headroom_ai-9.9.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = ("--baseline", "headroom", "--baseline-python", f"headroom={sys.executable}", "--budget", "0.5")
    cases = [rag_case("q-1"), rag_case("q-2", answer="explode here")]
    report = _run(tmp_path, FakeGateway(), *asked, cases=cases, status=1)
    row = next(row for row in report.arms if row.arm.name == "headroom, budget 0.5")
    assert report.skipped == []
    assert (row.num_cases, row.num_errors) == (2, 1)  # the case that it fails on counts as one
    assert _answer(report, "headroom, budget 0.5") == 0.5
    assert any("no luck" in error for error in report.first_errors)


def test_a_compressor_whose_environment_does_not_start_is_skipped(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    python.chmod(0o755)
    skipped = SelectorFactory(pythons={"headroom": python}).make(["headroom"]).skipped
    assert [item.reason for item in skipped] == [
        "its environment does not start: the compressor ended with code 3 before it answered"
    ]


@pytest.mark.parametrize("text", ["headroom", "bm25=/bin/sh", "headroom=/no/such/file"])
def test_a_python_for_a_baseline_is_checked(tmp_path: Path, text: str) -> None:
    data = write_cases(tmp_path / "a.jsonl.gz", [rag_case()])
    result = CliRunner().invoke(eval_group, ["recall", "--data", str(data), "--baseline-python", text])
    assert result.exit_code == 2
    assert "is not one of" in " ".join(result.output.split())


def test_policies_have_arms_of_their_own_and_are_compared_with_the_first(tmp_path: Path) -> None:
    gateway = FakeGateway()
    report = _run(tmp_path, gateway, "--policy", "wide", "--policy", "tight", "--budget", "0.3")
    names = [row.arm.name for row in report.arms if row.arm.kind == "reduced"]
    assert names == ["wide, no budget", "wide, budget 0.3", "tight, no budget", "tight, budget 0.3"]
    assert {body["firsttoken"]["policy"] for path, body, _ in gateway.requests[1:] if "firsttoken" in body} == {
        "wide",
        "tight",
    }
    pairs = {(item.arm, item.baseline) for item in report.comparisons}
    assert ("tight, budget 0.3", "wide, budget 0.3") in pairs


def test_scores_by_language_and_by_length_add_up_to_all_cases(tmp_path: Path) -> None:
    cases = [rag_case("q-1"), rag_case("q-2") | {"lang": "de"}, rag_case("q-3", num_passages=60, gold_at=50)]
    report = _run(tmp_path, FakeGateway(), cases=cases)
    groups = next(row for row in report.arms if row.arm.name == "no budget").groups
    found = {group.name: (group.num_cases, group.answer.mean if group.answer else None) for group in groups}
    assert found == {"en": (2, 0.5), "de": (1, 1.0), "short": (2, 1.0), "medium": (1, 0.0)}


def test_an_empty_context_counts_as_a_failure(tmp_path: Path) -> None:
    gateway = FakeGateway(choose=lambda documents: [])
    report = _run(tmp_path, gateway, "--gate", "failures<=0", status=1)
    row = next(row for row in report.arms if row.arm.name == "no budget")
    assert (row.num_empty, row.num_errors) == (4, 0)
    assert _answer(report, "no budget") == 0.0
    assert report.gate[0].value == 4.0


def test_cached_generations_are_not_made_again_and_carry_no_times(tmp_path: Path) -> None:
    arguments = ("--answers", "--cache", str(tmp_path / "generations.jsonl"))
    first = FakeGateway()
    before = _run(tmp_path, first, *arguments)
    second = FakeGateway(reply=lambda prompt: "another answer")
    after = _run(tmp_path, second, *arguments)
    assert [row.contains for row in after.answers] == [row.contains for row in before.answers]
    assert [row.num_from_cache for row in after.answers] == [4, 4]
    assert all(row.ttft_ms_median is None for row in after.answers)
    made = [path for path, body, _ in second.requests if body.get("stream")]
    assert made == []


def test_another_model_or_other_messages_miss_the_cache(tmp_path: Path) -> None:
    generation = Generation("a", 1, 0, 1, 1.0, 2.0, "stop")
    cache = GenerationCache(tmp_path / "cache", {"model": "a"})
    messages = [{"role": "user", "content": "x"}]
    cache.put(cache.key(messages, 8), generation)
    with (tmp_path / "cache").open("ab") as file:
        file.write(b'{"key": "cut')
    again = GenerationCache(tmp_path / "cache", {"model": "a"})
    assert again.get(again.key(messages, 8)) == generation
    assert again.get(again.key(messages, 9)) is None
    other = GenerationCache(tmp_path / "cache", {"model": "b"})
    assert other.get(other.key(messages, 8)) is None


def test_a_run_that_was_ended_goes_on_where_it_stopped(tmp_path: Path) -> None:
    journal = tmp_path / "out.json.partial.jsonl"
    whole = _run(tmp_path, FakeGateway())
    assert not journal.exists()

    class Ended(Exception):
        """Somebody pressed Ctrl-C."""

    def end(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if documents and documents[0]["id"].startswith("q-2"):
            raise OverflowError("the window")
        return documents[:3]

    data = tmp_path / "made.jsonl.gz"
    gateway = FakeGateway()
    with running(gateway) as url:
        original = Journal.add
        added: list[str] = []

        def add(self: Journal, record: CaseRecord) -> None:
            original(self, record)
            added.append(record.id)
            if len(added) == 2:
                raise Ended

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "add", add)
            command = ["recall", "--data", str(data), "--url", url, "--output", str(tmp_path / "out.json")]
            result = CliRunner().invoke(eval_group, command)
        assert isinstance(result.exception, Ended)
        assert journal.exists()
        num_before = len(gateway.requests)
        result = CliRunner().invoke(eval_group, command)
    assert result.exit_code == 0, result.output
    assert "2 cases are done" in result.output
    assert len(gateway.requests) - num_before == 1 + 2 * 2  # warm-up, then two requests for each of two cases
    report = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=RecallReport)
    assert [row.answer for row in report.arms] == [row.answer for row in whole.arms]


def test_cases_of_another_run_are_not_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path, {"seed": 1}).add(CaseRecord(id="a", lang="en"))
    assert list(Journal(path, {"seed": 1}).done) == ["a"]
    with pytest.raises(DataError, match="another run \\(other seed\\)"):
        Journal(path, {"seed": 2})
    assert Journal(path, {"seed": 2}, fresh=True).done == {}


def test_a_line_that_was_cut_off_is_left_out_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path, {}).add(CaseRecord(id="a", lang="en"))
    with path.open("ab") as file:
        file.write(b'{"id": "b", "la')
    journal = Journal(path, {})
    journal.add(CaseRecord(id="c", lang="en"))
    assert list(Journal(path, {}).done) == ["a", "c"]


def test_citations_are_checked_against_the_labels_of_the_prompt() -> None:
    case = make_case(
        [make_chunk("a", "Blue heron.", gold=True), make_chunk("b", "Grey crane.")], answers=["blue heron"]
    )
    found = citations(case, "A heron [1], a crane [2] and a stork [7].", {"[1]": ["a"], "[2]": ["b"]})
    assert found == (3, 2, 1)
    assert found.validity == pytest.approx(2 / 3)
    assert citations(case, "No source.", {}).validity is None
    assert cited_labels("[1][2, 3] [x] [1]") == ["[1]", "[2]", "[3]"]


def test_citation_validity_is_reported_per_arm(tmp_path: Path) -> None:
    gateway = FakeGateway(reply=lambda prompt: "a blue heron [1] [99]")
    report = _run(tmp_path, gateway, "--answers", "--citations")
    full = report.answers[0]
    assert (full.num_cited, full.citation_validity) == (8, 0.5)
    assert "like [2]" in gateway.requests[2][1]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("answer", "exact", "shared"),
    [("The Blue heron.", 1.0, 1.0), ("a blue crane", 0.0, 0.5), ("", 0.0, 0.0), ("no", 0.0, 0.0)],
)
def test_exact_match_and_f1_follow_squad(answer: str, exact: float, shared: float) -> None:
    case = make_case(answers=["blue heron"])
    assert (exact_match(case, answer), f1(case, answer)) == (exact, shared)


def test_f1_of_chinese_counts_characters() -> None:
    assert f1(make_case(answers=["蓝色的鹭"]), "蓝鹭") == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("first", "second", "kappa"),
    [([1, 1, 0, 0], [1, 1, 0, 0], 1.0), ([1, 0, 1, 0], [1, 1, 0, 0], 0.0), ([1, 1], [1, 1], None)],
)
def test_kappa_is_agreement_beyond_chance(first: list[float], second: list[float], kappa: float | None) -> None:
    assert cohen_kappa(first, second) == kappa


def test_a_verdict_that_is_no_verdict_is_a_failure() -> None:
    assert parse_verdict("**Yes**").score == 1.0
    assert parse_verdict("nan") == (0.0, "neither YES nor NO: 'nan'")


def test_a_judge_is_reported_with_its_agreement_and_its_failures(tmp_path: Path) -> None:
    def reply(prompt: str) -> str:
        if "Given answer:" not in prompt:
            return "a blue heron" if "blue heron" in prompt else "no idea"
        return "perhaps" if "no idea" in prompt else "YES"

    with running(FakeGateway(reply=reply)) as judge_url:
        report = _run(tmp_path, FakeGateway(), "--answers", "--judge-url", judge_url, "--judge-model", "default")
    reduced = next(row for row in report.answers if row.arm.name == "no budget")
    assert reduced.judge is not None
    assert (reduced.judge.mean, reduced.judge_kappa, reduced.num_judge_failures) == (0.75, 1.0, 1)


def test_a_judge_that_cannot_be_reached_fails_every_verdict() -> None:
    with Judge("http://127.0.0.1:9", "m") as judge:
        verdict = judge.verdict(make_case(), "an answer")
    assert verdict.score == 0.0
    assert verdict.error is not None
    assert httpx.ConnectError.__name__ in verdict.error


def test_buckets_follow_their_limits() -> None:
    assert [length_bucket(tokens) for tokens in (0, 511, 512, 2047, 2048, 8191, 8192)] == [
        "short", "short", "medium", "medium", "long", "long", "very long",
    ]  # fmt: skip


def test_the_same_run_twice_gives_the_same_scores(tmp_path: Path) -> None:
    def figures() -> str:
        report = _run(tmp_path, FakeGateway(), "--budget", "0.2", "--answers", "--baseline", "bm25", "--seed", "3")
        rows = [(row.arm.name, row.answer, row.evidence, row.tokens_kept) for row in report.arms]
        return json.dumps(msgspec.to_builtins([rows, report.comparisons]))

    assert figures() == figures()
