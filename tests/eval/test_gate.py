"""Gates: thresholds by hand, and planted regressions through the real gateway with the lexical ranking."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from factories_app import ACME_KEY, EchoBackend, make_app, make_settings, served
from factories_eval import write_cases

import reducer.dedup
from app.backends.base import BackendRequest
from app.settings import PolicySettings
from engine.outputs import RequestOutput
from eval.cli import eval_group
from eval.gate import Reference, has_failed, judge_arm, parse_threshold
from eval.intervals import compare
from eval.records import CaseRecord, CaseScore, GateVerdict, RecallReport

_BIRDS = ("heron", "stork", "crane", "ibis", "egret", "bittern", "spoonbill", "flamingo")


def _records(**arms: list[float]) -> list[CaseRecord]:
    """One record a case, with an answer recall for every arm."""
    num_cases = len(next(iter(arms.values())))
    return [
        CaseRecord(
            id=str(place),
            lang="en",
            scores=[
                CaseScore(arm=arm, answer=values[place], evidence=None, support=None, gold_text=None, tokens_kept=0.5)
                for arm, values in arms.items()
            ],
        )
        for place in range(num_cases)
    ]


def _verdict(text: str, records: list[CaseRecord], against: str = "full") -> GateVerdict:
    return judge_arm(parse_threshold(text), "arm", records, Reference(records, against), summary=None, seed=0)


def test_fixed_thresholds_look_at_the_mean() -> None:
    records = _records(arm=[1.0, 1.0, 0.0, 1.0])
    assert _verdict("answer>=0.75", records).outcome == "pass"
    assert _verdict("answer>=0.76", records).outcome == "fail"
    assert _verdict("tokens_kept<=0.5", records).outcome == "pass"


def test_a_metric_without_values_fails() -> None:
    verdict = _verdict("f1>=0.0", _records(arm=[1.0]))
    assert (verdict.outcome, verdict.reason) == ("fail", "nothing to judge by")


def test_a_score_that_is_no_number_counts_as_a_failure_and_as_nought() -> None:
    records = _records(arm=[1.0, float("nan"), 1.0, 1.0])
    assert _verdict("answer>=0.75", records).value == 0.75
    assert _verdict("failures<=0", records).value == 1.0


@pytest.mark.parametrize(
    ("num_cases", "num_lost", "outcome"), [(300, 15, "fail"), (30, 2, "undecided"), (300, 3, "pass"), (30, 0, "pass")]
)
def test_a_drop_fails_when_chance_does_not_explain_it(num_cases: int, num_lost: int, outcome: str) -> None:
    arm = [0.0] * num_lost + [1.0] * (num_cases - num_lost)
    verdict = _verdict("answer_drop<=0.02", _records(arm=arm, full=[1.0] * num_cases))
    assert verdict.outcome == outcome
    assert ("pairs would decide" in verdict.reason) == (outcome == "undecided")
    assert has_failed([verdict]) == (outcome == "fail")
    assert has_failed([verdict], strict=True) == (outcome != "pass")


def test_no_difference_at_thirty_cases_hides_more_than_at_three_hundred() -> None:
    few, many = compare([1.0] * 30, [1.0] * 30, seed=0), compare([1.0] * 300, [1.0] * 300, seed=0)
    assert few.detectable == pytest.approx(0.095, abs=0.001)
    assert many.detectable == pytest.approx(0.00994, abs=0.0001)
    assert few.num_needed is None


def test_the_needed_number_finds_the_difference_and_a_quarter_of_it_does_not() -> None:
    lost = [1.0] * 2 + [0.0] * 38
    needed = compare([1.0] * 40, [1.0 - value for value in lost], seed=0).num_needed
    assert needed is not None
    assert needed == pytest.approx(150, abs=5)
    repeated = [1.0 - lost[place % 40] for place in range(needed)]
    assert compare([1.0] * needed, repeated, seed=0).interval.low > 0.0


@pytest.mark.parametrize(
    "text", ["answer", "answer=>1", "colour>=1", "answer_drop>=0.1", "answer>=one", "tokens_kept_drop<=0.1"]
)
def test_malformed_thresholds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"threshold|metric|drop"):
        parse_threshold(text)


def _bird_case(number: int) -> dict[str, Any]:
    """Two passages are needed; eight others are about other things."""
    first, second = _BIRDS[number % 8], _BIRDS[(number + 3) % 8]
    gold = {first: f"{number + 11} kilograms", second: f"{number + 57} kilograms"}
    chunks: list[dict[str, Any]] = [
        {"id": f"n{place}", "text": f"The ticket office number {place} opens at noon and sells maps of the {what}."}
        for place, what in enumerate(("park", "harbour", "tower", "museum", "garden", "station", "bridge", "mill"))
    ]
    chunks += [
        {"id": bird, "text": f"The {bird} has a weight of {weight}, say its keepers.", "gold": True,
         "gold_kind": "annotated"}
        for bird, weight in gold.items()
    ]  # fmt: skip
    return {
        "id": f"bird-{number}",
        "lang": "en",
        "question": f"What is the weight of the {first} and what is the weight of the {second}?",
        "answers": list(gold.values()),
        "answer_groups": [[weight] for weight in gold.values()],
        "chunks": chunks,
        "evidence": "all",
        "answer_in_gold": True,
    }


def _near_case(number: int) -> dict[str, Any]:
    """Two statements that differ in one figure; both must stay."""
    text = "The yearly plan {0} for the museum costs {1} euros and includes all special exhibitions and the garden."
    price = 240 + number
    return {
        "id": f"near-{number}",
        "lang": "en",
        "question": "What does the yearly plan for the museum cost?",
        "answers": [str(price)],
        "chunks": [
            {"id": "a", "text": text.format(number, price), "gold": True, "gold_kind": "annotated"},
            {"id": "b", "text": text.format(number, price * 2), "near_of": "a"},
            *(
                {"id": f"n{place}", "text": f"Bus line {place} stops at the old mill twice an hour."}
                for place in range(4)
            ),
        ],
        "evidence": "any",
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    cases = [_near_case(0), *(_bird_case(number) for number in range(10)), *(_near_case(n) for n in range(1, 6))]
    return write_cases(tmp_path / "birds.jsonl.gz", cases)


def _recall(url: str, data: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        eval_group, ["recall", "--data", str(data), "--url", url, "--api-key", ACME_KEY, *arguments]
    )
    return result.exit_code, result.output


_GATE = ("--gate", "answer_drop<=0.02,evidence_drop<=0.02,near_kept>=0.99,failures<=0")


def _served_with(**policies: dict[str, Any]) -> Any:
    changed = {name: PolicySettings(reducer=changes) for name, changes in policies.items()}
    return served(make_app(make_settings(policies=changed)))


def test_a_sound_policy_passes_the_gate(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    with _served_with() as url:
        status, output = _recall(url, data, *_GATE)
    assert status == 0, output
    assert output.count("pass") >= 4


def test_a_policy_that_keeps_one_passage_fails_the_gate(data: Path) -> None:
    with _served_with(top1={"selection": {"top_k": 1}}) as url:
        status, _ = _recall(url, data, *_GATE, "--policy", "default", "--policy", "top1", "--gate-against", "default")
    assert status == 1


@dataclass
class ReadingBackend(EchoBackend):
    """Answers with the weights of the birds asked for, as far as the prompt states them."""

    is_garbled: bool = False
    """As a model whose weights were scaled wrongly: some answers come out as noise."""
    num_asked: int = 0

    async def generate(self, request: BackendRequest) -> AsyncIterator[RequestOutput]:
        prompt = "\n".join(str(message["content"]) for message in request.messages)
        asked = re.findall(r"what is the weight of the (\w+)", prompt.splitlines()[-1], re.IGNORECASE)
        stated = dict(re.findall(r"The (\w+) has a weight of (\d+ kilograms)", prompt))
        self.num_asked += 1
        is_noise = self.is_garbled and self.num_asked % 2 == 0
        self.reply = "zq zq" if is_noise else " and ".join(stated.get(bird, "unknown") for bird in asked) or "unknown"
        async for output in super().generate(request):
            yield output


def _answered(folder: Path, name: str, backend: ReadingBackend, *arguments: str) -> tuple[int, Path]:
    """The whole way: documents in, reduced, answered, scored."""
    data = write_cases(folder / "birds.jsonl.gz", [_bird_case(number) for number in range(16)])
    policies = {"top1": PolicySettings(reducer={"selection": {"top_k": 1}})}
    with served(make_app(make_settings(policies=policies), backend)) as url:
        status, _ = _recall(url, data, "--answers", "--output", str(folder / name), *arguments)
    return status, folder / name


def test_a_question_set_through_the_whole_gateway_passes_with_answers_and_fails_without(tmp_path: Path) -> None:
    gate = ("--gate", "contains>=0.95,contains_drop<=0.02,failures<=0")
    assert _answered(tmp_path, "a.json", ReadingBackend(), *gate)[0] == 0
    assert _answered(tmp_path, "b.json", ReadingBackend(), *gate, "--policy", "top1")[0] == 1


def test_a_model_that_answers_worse_fails_against_the_run_before(tmp_path: Path) -> None:
    _, before = _answered(tmp_path, "a.json", ReadingBackend())
    _, after = _answered(tmp_path, "b.json", ReadingBackend(is_garbled=True))

    def status(*files: Path) -> int:
        command = ["compare", *map(str, files), "--gate", "answer_drop<=0.02,contains_drop<=0.02"]
        return CliRunner().invoke(eval_group, command).exit_code

    assert status(before, before) == 0
    assert status(before, after) == 1  # the prompts are the same, the answers are not


def test_a_fact_guard_that_is_off_fails_the_gate(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer.dedup, "contains", lambda outer, inner: True)
    output = tmp_path / "out.json"
    with _served_with() as url:
        status, _ = _recall(url, data, *_GATE, "--output", str(output))
    report = msgspec.json.decode(output.read_bytes(), type=RecallReport)
    assert status == 1
    assert {verdict.threshold for verdict in report.gate if verdict.outcome == "fail"} >= {"near_kept>=0.99"}


def test_identical_policies_pass_twenty_of_twenty_runs(data: Path) -> None:
    with _served_with(twin={}) as url:
        outcomes = [
            _recall(
                url, data, *_GATE, "--policy", "default", "--policy", "twin", "--gate-against", "default",
                "--seed", str(seed), "--limit", "4",
            )[0]
            for seed in range(20)
        ]  # fmt: skip
    assert outcomes == [0] * 20


def test_gate_against_needs_a_policy_of_the_run(data: Path) -> None:
    status, output = _recall("http://127.0.0.1:9", data, "--gate-against", "default")
    assert status == 2
    assert "no --policy of this run" in output.replace("\n", " ")
