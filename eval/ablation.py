"""Runs an experiment: every round takes all arms in an order drawn anew, each on a server and a cache of its own.

    round 1   B   A   A'  C        a turn is: start the arm's server (cold cache, salt of its own), send the workload,
    round 2   A   C   B   A'       end the server. The workload, arrivals included, is the same in every turn.
    round 3   A'  B   C   A

A slow minute of the machine so hits other arms in other rounds. Requests are compared in pairs: the same request, in
the same round. ``A'`` is identical with the baseline ``A``; if the two do not tie, the experiment is not believed.
"""

import math
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from eval.experiments import AGAIN, AblationArm, Experiment
from eval.intervals import compare, two_way_bootstrap
from eval.load import LoadRun
from eval.load_records import BucketSummary, Distribution, RequestRecord
from eval.load_summary import distribution, summarise_bucket
from eval.manifest import DataFile, MachineManifest
from eval.recall import Progress

TIE_MARGIN = 0.05
"""Identical arms tie when their times differ by less than this share, or by no more than chance explains,"""
TIE_WIDTH = 1.5
"""which is so many times the half of the 95 % interval: several figures are looked at, and each could stray alone."""
TIMES = ("ttft_ms", "tpot_ms", "e2el_ms", "prompt_tokens")

StartServer = Callable[[AblationArm, str], AbstractContextManager[str]]
"""Arm and salt to the URL of a server that has seen no request."""
SendWorkload = Callable[[str], LoadRun]


class Turn(NamedTuple):
    """One arm in one round."""

    round: int
    position: int
    arm: str
    run: LoadRun


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Arm / baseline of one figure, over the same requests."""

    metric: str
    ratio: float
    """Geometric mean."""
    low: float
    high: float
    num_pairs: int


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """One arm over all its turns."""

    name: str
    setting: str | None
    value: str | None
    overall: BucketSummary
    kv_usage_max: float | None
    ttft_ms_by_round: list[float | None]
    """Median of each round: how much the machine itself varies."""
    ratios: list[Ratio] = []
    contains_difference: float | None = None
    contains_low: float | None = None
    contains_high: float | None = None
    contains_mcnemar_p: float | None = None
    output_tokens_per_s: float = 0.0
    """Median over the rounds."""


class AblationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one experiment."""

    kind: Literal["ablation"] = "ablation"
    variable: str
    baseline: str
    manifest: MachineManifest
    data: DataFile | None
    num_rounds: int
    order: list[list[str]]
    """Arms of each round as they were run."""
    arms: list[ArmResult]
    is_believable: bool
    """Identical arms tied."""
    self_check: list[str]
    """Where they did not."""

    @property
    def num_failed(self) -> int:
        """Requests without an answer."""
        return sum(arm.overall.num_requests - arm.overall.completed for arm in self.arms)


def draw_order(experiment: Experiment, num_rounds: int, seed: int) -> list[list[AblationArm]]:
    """All arms in every round, each round in an order of its own."""
    rng = random.Random(seed)
    return [rng.sample(experiment.arms, len(experiment.arms)) for _ in range(num_rounds)]


@dataclass(slots=True)
class AblationRun:
    """Runs the turns."""

    experiment: Experiment
    start: StartServer
    send: SendWorkload
    progress: Progress
    num_rounds: int = 3
    seed: int = 0

    def turns(self) -> list[Turn]:
        """All turns, in the order in which they ran. A salt is used once."""
        found: list[Turn] = []
        for number, arms in enumerate(draw_order(self.experiment, self.num_rounds, self.seed), start=1):
            for position, arm in enumerate(arms):
                self.progress.step(f"round {number}: {arm.name}")
                with self.start(arm, secrets.token_hex(16)) as url:
                    found.append(Turn(number, position, arm.name, self.send(url)))
                self.progress.case_done()
        return found


def make_ablation_report(
    experiment: Experiment,
    turns: Sequence[Turn],
    manifest: MachineManifest,
    *,
    data: DataFile | None = None,
    seed: int = 0,
) -> AblationReport:
    """Every arm against the baseline, and the self-check of the identical arm."""
    arms = [_arm_result(arm, experiment, turns, seed) for arm in experiment.arms]
    problems = [problem for arm in arms if arm.name == AGAIN for problem in _differences(arm)]
    rounds = sorted({turn.round for turn in turns})
    return AblationReport(
        variable=experiment.variable,
        baseline=experiment.baseline.name,
        manifest=manifest,
        data=data,
        num_rounds=len(rounds),
        order=[[turn.arm for turn in turns if turn.round == number] for number in rounds],
        arms=arms,
        is_believable=not problems,
        self_check=problems,
    )


def _arm_result(arm: AblationArm, experiment: Experiment, turns: Sequence[Turn], seed: int) -> ArmResult:
    own = [turn for turn in turns if turn.arm == arm.name]
    records = [record for turn in own for record in turn.run.records]
    rates = distribution(
        sum(record.output_tokens for record in turn.run.records if record.status == "ok") / turn.run.duration_s
        for turn in own
    )
    usage = [turn.run.samples.kv_usage_max for turn in own if turn.run.samples.kv_usage_max is not None]
    result = ArmResult(
        name=arm.name,
        setting=None if arm.setting is None else arm.setting.path,
        value=None if arm.setting is None else str(arm.setting.value),
        overall=summarise_bucket("all", records),
        kv_usage_max=max(usage, default=None),
        ttft_ms_by_round=[_median(distribution(record.ttft_ms for record in turn.run.records)) for turn in own],
        output_tokens_per_s=0.0 if rates is None else rates.p50,
    )
    if arm == experiment.baseline:
        return result
    ours, theirs = _paired(turns, arm.name), _paired(turns, experiment.baseline.name)
    both = [key for key in theirs if key in ours]
    ratios = [ratio for metric in TIMES if (ratio := _ratio(metric, both, ours, theirs, seed)) is not None]
    result = msgspec.structs.replace(result, ratios=ratios)
    scored = [
        (a, b) for key in both if (a := ours[key].contains) is not None and (b := theirs[key].contains) is not None
    ]
    if not scored:
        return result
    paired = compare([a for a, _ in scored], [b for _, b in scored], seed=seed)
    return msgspec.structs.replace(
        result,
        contains_difference=paired.difference,
        contains_low=paired.interval.low,
        contains_high=paired.interval.high,
        contains_mcnemar_p=paired.mcnemar_p,
    )


def _median(found: Distribution | None) -> float | None:
    return None if found is None else found.p50


def _paired(turns: Sequence[Turn], arm: str) -> Mapping[tuple[int, str], RequestRecord]:
    return {
        (turn.round, record.id): record
        for turn in turns
        if turn.arm == arm
        for record in turn.run.records
        if record.status == "ok"
    }


def _ratio(
    metric: str,
    keys: Sequence[tuple[int, str]],
    ours: Mapping[tuple[int, str], RequestRecord],
    theirs: Mapping[tuple[int, str], RequestRecord],
    seed: int,
) -> Ratio | None:
    """Geometric mean over rounds and requests, and an interval that takes both as drawn by chance."""
    rounds = sorted({number for number, _ in keys})
    requests = list(dict.fromkeys(id for _, id in keys))
    table = np.full((len(rounds), len(requests)), np.nan)
    for key in keys:
        a, b = getattr(ours[key], metric), getattr(theirs[key], metric)
        if a and b and a > 0 and b > 0:
            table[rounds.index(key[0]), requests.index(key[1])] = math.log(a / b)
    if not keys or np.isnan(table).all():
        return None
    low, high = two_way_bootstrap(table, seed=seed)
    return Ratio(
        metric=metric,
        ratio=float(np.exp(np.nanmean(table))),
        low=math.exp(low),
        high=math.exp(high),
        num_pairs=int((~np.isnan(table)).sum()),
    )


def _differences(arm: ArmResult) -> list[str]:
    """Where two identical arms differ by more than chance."""
    found = []
    for ratio in arm.ratios:
        half = TIE_WIDTH * math.log(ratio.high / ratio.low) / 2
        is_chance = abs(math.log(ratio.ratio)) <= half
        margin = 0.0 if ratio.metric == "prompt_tokens" else TIE_MARGIN
        if not is_chance and abs(ratio.ratio - 1.0) > margin:
            found.append(
                f"{ratio.metric} is {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] times the baseline's"
            )
    if arm.contains_mcnemar_p is not None and arm.contains_mcnemar_p < 0.05:
        found.append(f"answers differ by {arm.contains_difference:+.3f} (McNemar p {arm.contains_mcnemar_p:.3g})")
    return found
