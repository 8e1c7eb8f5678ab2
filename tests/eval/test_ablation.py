"""One variable at a time: refused combinations, order, cold caches, and the self-check of identical arms."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner
from factories_app import ACME_KEY, EchoBackend, make_app, make_settings, served
from factories_eval import make_case, make_chunk

from app.config_tree import merge, struct_of
from app.settings import Settings
from eval.ablation import AblationReport, AblationRun, Turn, draw_order, make_ablation_report
from eval.cli import eval_group
from eval.experiments import AGAIN, STAGES, VARIABLES, AblationArm, Experiment, Setting, parse_experiment
from eval.load import LoadRun, ServerSamples, run_load
from eval.load_records import RequestRecord
from eval.manifest import make_machine_manifest
from eval.recall import Silent
from eval.streaming_client import StreamingClient
from eval.workload import LoadRequest, RequestOptions, case_body

_TWO = Experiment("x", (AblationArm("a"), AblationArm("b", Setting("engine.model.dtype", "fp32"))))


def test_two_variables_are_refused() -> None:
    with pytest.raises(ValueError, match="exactly one variable at a time, got chunk-size and dtype"):
        parse_experiment(["chunk-size=128,512", "dtype"])


def test_the_command_refuses_two_variables() -> None:
    result = CliRunner().invoke(eval_group, ["ablation", "--vary", "dtype", "--vary", "stages", "--data", __file__])
    assert result.exit_code == 2
    assert "one variable at a time, got dtype and stages" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("colour", "no variable is called 'colour'; known: chunk-size"),
        ("dtype=fp32", "needs a baseline and another value, got 1"),
        ("dtype=fp32,bf16,fp32", "has the value 'fp32' twice"),
        ("dtype=", "names no value"),
        ("stages=tidy", "no stage is called 'tidy'"),
    ],
)
def test_experiments_that_prove_nothing_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_experiment([text])


def test_every_arm_differs_from_the_baseline_in_one_setting() -> None:
    by_values = parse_experiment(["engine.scheduler.max_num_batched_tokens=512,128"])
    assert [arm.setting and arm.setting.value for arm in by_values.arms] == [512, 128]
    stages = parse_experiment(["stages"])
    assert stages.baseline.setting is None
    paths = [arm.setting.path for arm in stages.arms[1:] if arm.setting is not None]
    assert len(set(paths)) == len(paths) == len(STAGES)


def _settings_of(*settings: Setting) -> Settings:
    tree: dict[str, Any] = {}
    for setting in settings:
        nested: Any = setting.value
        for segment in reversed(setting.path.split(".")):
            nested = {segment: nested}
        tree = merge(tree, nested)
    return struct_of(tree, Settings, "")


@pytest.mark.parametrize(
    "setting",
    [*STAGES.values(), *(Setting(item.path, value) for item in VARIABLES.values() for value in item.values)],
    ids=lambda setting: f"{setting.path}={setting.value}",
)
def test_ready_made_settings_exist_in_the_configuration(setting: Setting) -> None:
    _settings_of(setting)


def test_baselines_of_the_ready_made_are_the_defaults() -> None:
    for item in VARIABLES.values():
        assert _settings_of(Setting(item.path, item.values[0])) == Settings()


def test_arms_are_interleaved_in_an_order_drawn_for_every_round() -> None:
    whole = _TWO.with_twin()
    order = draw_order(whole, 40, seed=1)
    assert all(sorted(arm.name for arm in arms) == ["a", "b", AGAIN] for arms in order)
    firsts = Counter(arms[0].name for arms in order)
    assert all(6 <= firsts[arm.name] <= 22 for arm in whole.arms)
    assert order == draw_order(whole, 40, seed=1)


def _run(scale: float, noise: random.Random, num_requests: int = 30, **fields: Any) -> LoadRun:
    records = [
        RequestRecord(
            id=str(number),
            status="ok",
            arrival_s=0.0,
            prompt_tokens=100,
            output_tokens=5,
            ttft_ms=scale * (100.0 + number) * math.exp(noise.gauss(0.0, 0.2)),
            e2el_ms=scale * 2 * (200.0 + number) * math.exp(noise.gauss(0.0, 0.2)),
            **fields,
        )
        for number in range(num_requests)
    ]
    return LoadRun(records, ServerSamples(), 1.0)


def _report(scales: dict[str, float], seed: int = 0, **fields: Any) -> AblationReport:
    noise = random.Random(seed)
    whole = _TWO.with_twin()
    turns = []
    for number in range(3):
        slow_minutes = math.exp(noise.gauss(0.0, 0.3))
        for place, arm in enumerate(whole.arms):
            slow_turn = math.exp(noise.gauss(0.0, 0.02))
            run = _run(scales.get(arm.name, 1.0) * slow_minutes * slow_turn, noise, **fields)
            turns.append(Turn(number, place, arm.name, run))
    return make_ablation_report(whole, turns, make_machine_manifest(settings={}, seed=0), seed=0)


def test_identical_arms_tie_in_twenty_of_twenty_experiments() -> None:
    assert [_report({}, seed).is_believable for seed in range(20)] == [True] * 20


def test_a_true_difference_is_found_although_the_machine_varies_more() -> None:
    report = _report({"b": 1.3})
    ttft = next(ratio for ratio in report.arms[2].ratios if ratio.metric == "ttft_ms")
    assert report.is_believable
    assert 1.1 < ttft.low < 1.3 < ttft.high < 1.6
    assert ttft.num_pairs == 90


def test_identical_arms_that_differ_make_the_run_unbelievable() -> None:
    report = _report({AGAIN: 1.3})
    assert not report.is_believable
    assert any("ttft_ms is 1." in problem for problem in report.self_check)


def test_one_prompt_token_more_in_the_identical_arm_is_no_tie() -> None:
    whole = _TWO.with_twin()
    turns = [
        Turn(1, place, arm.name, LoadRun(
            [RequestRecord(id="r", status="ok", arrival_s=0.0, prompt_tokens=100 + (arm.name == AGAIN))],
            ServerSamples(), 1.0,
        ))
        for place, arm in enumerate(whole.arms)
    ]  # fmt: skip
    report = make_ablation_report(whole, turns, make_machine_manifest(settings={}, seed=0))
    assert report.self_check == ["prompt_tokens is 1.010 [1.010, 1.010] times the baseline's"]


def test_every_turn_has_a_salt_and_a_cold_cache_of_its_own() -> None:
    """Against real gateways: the second request of a turn hits what the first left, and no turn hits another's."""
    salts: list[str] = []
    case = make_case([make_chunk("a", "The heron is blue and stands in the water all day long.")], answers=["Hello"])
    body = case_body(case, RequestOptions(max_tokens=4, bypass=True))

    @contextmanager
    def start(arm: AblationArm, salt: str) -> Iterator[str]:
        salts.append(salt)
        with served(make_app(make_settings(), EchoBackend())) as url:
            yield url

    def send(url: str) -> LoadRun:
        async def one_after_the_other() -> LoadRun:
            client = StreamingClient(url, ACME_KEY)
            try:
                runs = [await run_load(client, [LoadRequest(str(number), 0.0, body, case)]) for number in range(2)]
            finally:
                await client.aclose()
            return LoadRun([record for run in runs for record in run.records], ServerSamples(), 1.0)

        return asyncio.run(one_after_the_other())

    whole = _TWO.with_twin()
    turns = AblationRun(whole, start, send, Silent(), num_rounds=2, seed=0).turns()
    assert len(set(salts)) == len(salts) == 6
    for turn in turns:
        cold, warm = turn.run.records
        assert cold.cached_tokens == 0
        assert warm.cached_tokens > 0
    report = make_ablation_report(whole, turns, make_machine_manifest(settings={}, seed=0))
    assert [len(arms) for arms in report.order] == [3, 3]
    assert report.num_failed == 0
