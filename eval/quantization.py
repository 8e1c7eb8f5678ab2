"""The regression gate of quantized formats: what is kept of a run, how it is summarised, and which limits it must keep.

A format is compared with the unquantized model, value by value, in one run: each position of real texts, each needle,
each question is asked of both. ``eval.benches.bench_quantization`` measures; here is what follows from it.

Two kinds of figures are judged in two ways:

- per position of a text (perplexity, divergence, agreement): there are thousands, so the format has to *show* that it
  keeps the limit: the end of the 95 % interval that speaks against it counts. The unit is a run of positions, because
  neighbours share their context.
- per needle or question: there are tens, and a few of them turn around by chance. Only a loss above the limit that
  chance does not explain fails: the end of the interval that speaks for the format counts.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from eval.intervals import bootstrap, compare
from eval.manifest import DataFile, MachineManifest

BUCKET_EDGES = (0, 128, 512, 1024, 2048, 4096, 8192)
"""Lengths of prompts, in tokens, between which figures are reported apart."""
RUN_LENGTH = 64
"""Positions of one unit of the intervals."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a format may lose."""

    max_perplexity_increase: float = 0.03
    """Share, in any bucket. Formats of 8 bits that suit a model stay below 1 %; 3 % is about what 4 bits cost."""
    max_kl: float = 0.05
    """Mean divergence from the unquantized next-token distribution, nats, in any bucket. Perplexity alone can hide that
    probability moves between tokens that the text does not hold."""
    min_top1_agreement: float = 0.9
    """Share of positions with the same most likely token, in any bucket. Where two tokens are about equally likely any
    rounding turns them around, that of bf16 included, so it cannot be 1."""
    max_needle_loss: float = 0.05
    """Needles that are no longer found, net, as a share."""
    max_needle_nll_increase: float = 0.25
    """Nats per token of the needles' answers, at any length: a model that found them no longer does, before the first
    digit turns around."""
    max_recall_loss: float = 0.05
    """Questions whose answer no longer holds the accepted one, net, as a share."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A mean with its 95 % interval; of paired values where two models are compared."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


class BucketResult(msgspec.Struct, frozen=True, kw_only=True):
    """Real text, at the positions of one bucket: the next token after a prompt of so many tokens."""

    bucket: str
    """First and last length of the prompt, tokens."""
    num_positions: int
    num_runs: int
    perplexity_reference: float
    perplexity_quantized: float
    nll_increase: Difference
    """Nats per token."""
    kl: Difference
    """Nats, from the unquantized distribution."""
    top1_agreement: Difference
    mean_max_deviation: float
    """Mean over the positions of the largest difference of a logit, what all logits share left out."""
    max_deviation: float


class NeedleResult(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence hidden in a text, and the question for it."""

    length: int
    """Of the whole prompt, tokens."""
    depth: float
    """Where the sentence stands, 0 to 1."""
    found_reference: bool
    """Every token of the answer is the most likely one."""
    found_quantized: bool
    nll_reference: float
    """Nats per token of the answer."""
    nll_quantized: float


class NeedleCell(msgspec.Struct, frozen=True, kw_only=True):
    """Needles of one length and depth."""

    length: int
    depth: float
    num_needles: int
    found_reference: int
    found_quantized: int


class RecallResult(msgspec.Struct, frozen=True, kw_only=True):
    """One question over its passages, answered greedily by both models."""

    case: str
    num_prompt_tokens: int
    contained_reference: bool
    """The answer holds an accepted one."""
    contained_quantized: bool
    is_same_text: bool


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One value that is held against its limit."""

    name: str
    value: float
    limit: float
    bound: Literal["at most", "at least"]
    detail: str
    is_met: bool


class QuantizationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run."""

    manifest: MachineManifest
    model: str
    weights_digest: str
    quantization: str
    """Of weights and KV cache, as the record names it."""
    dtype: str
    attention_backend: str
    code_version: str
    text: str
    """Where the real text is from."""
    text_sha256: str
    data: DataFile | None
    limits: Limits
    max_length: int
    passed: bool
    figures: list[Figure]
    num_non_finite: int
    """Positions at which the quantized logits are not finite; they are in no other figure."""
    buckets: list[BucketResult]
    needles: list[NeedleCell]
    needles_found: Difference | None
    """Quantized minus unquantized, as a share."""
    recall: Difference | None
    recall_reference: float | None
    recall_quantized: float | None
    recall_same_text: float | None
    """Share of questions with the same answer word for word."""
    notes: list[str] = []
    """What the run cannot say."""


@dataclass(frozen=True, slots=True)
class PositionValues:
    """One text, position by position: entry ``i`` is about the token after the first ``i + 1``."""

    nll_reference: NDArray[np.float64]
    nll_quantized: NDArray[np.float64]
    kl: NDArray[np.float64]
    max_deviation: NDArray[np.float64]
    is_same_top1: NDArray[np.bool_]
    is_finite: NDArray[np.bool_]


def bucket_name(low: int, high: int) -> str:
    """``128-511``."""
    return f"{low}-{high - 1}"


def summarise_positions(texts: Sequence[PositionValues], *, seed: int) -> list[BucketResult]:
    """The buckets that the texts reach and in which something is finite."""
    results = []
    for low, high in itertools.pairwise(BUCKET_EDGES):
        runs = [run for text in texts for run in _runs(text, low, high)]
        if runs:
            results.append(_bucket(bucket_name(low, high), runs, seed))
    return results


def summarise_needles(needles: Sequence[NeedleResult]) -> list[NeedleCell]:
    """Counts by length and depth."""
    cells = sorted({(needle.length, needle.depth) for needle in needles})
    members = {cell: [needle for needle in needles if (needle.length, needle.depth) == cell] for cell in cells}
    return [
        NeedleCell(
            length=length,
            depth=depth,
            num_needles=len(found),
            found_reference=sum(needle.found_reference for needle in found),
            found_quantized=sum(needle.found_quantized for needle in found),
        )
        for (length, depth), found in members.items()
    ]


def paired(quantized: Sequence[float], reference: Sequence[float], *, seed: int) -> Difference:
    """Quantized minus unquantized."""
    found = compare(quantized, reference, seed=seed)
    return Difference(mean=found.difference, low=found.interval.low, high=found.interval.high)


def judge(
    *,
    limits: Limits,
    num_non_finite: int,
    buckets: Sequence[BucketResult],
    needles: Sequence[NeedleResult],
    recall: Sequence[RecallResult],
    seed: int,
) -> list[Figure]:
    """Hold everything that was measured against its limit."""
    figures = [_at_most("positions with logits that are not finite", num_non_finite, 0, str(num_non_finite))]
    for bucket in buckets:
        where = f"prompts of {bucket.bucket} tokens"
        increase = [math.expm1(min(nats, 50.0)) for nats in _ends(bucket.nll_increase)]
        detail = f"{increase[0]:.4g} [{increase[1]:.4g}, {increase[2]:.4g}]"
        figures += [
            _at_most(f"perplexity increase, {where}", increase[2], limits.max_perplexity_increase, detail),
            _at_most(f"KL divergence, {where}", bucket.kl.high, limits.max_kl, str(bucket.kl)),
            _at_least(
                f"top-1 agreement, {where}",
                bucket.top1_agreement.low,
                limits.min_top1_agreement,
                str(bucket.top1_agreement),
            ),
        ]
    figures += _judge_needles(limits, needles, seed)
    if recall:
        change = paired(
            [float(case.contained_quantized) for case in recall],
            [float(case.contained_reference) for case in recall],
            seed=seed,
        )
        figures.append(_at_most("task recall lost", -change.high, limits.max_recall_loss, f"change {change}"))
    return figures


def _judge_needles(limits: Limits, needles: Sequence[NeedleResult], seed: int) -> list[Figure]:
    if not needles:
        return []
    change = paired(
        [float(needle.found_quantized) for needle in needles],
        [float(needle.found_reference) for needle in needles],
        seed=seed,
    )
    figures = [_at_most("needles lost", -change.high, limits.max_needle_loss, f"change {change}")]
    for length in sorted({needle.length for needle in needles}):
        members = [needle for needle in needles if needle.length == length]
        change = paired(
            [needle.nll_quantized for needle in members], [needle.nll_reference for needle in members], seed=seed
        )
        name = f"nats per token of needles in {length} tokens"
        figures.append(_at_most(name, change.low, limits.max_needle_nll_increase, f"change {change}"))
    return figures


def _ends(difference: Difference) -> tuple[float, float, float]:
    return difference.mean, difference.low, difference.high


def _at_most(name: str, value: float, limit: float, detail: str) -> Figure:
    return Figure(name=name, value=value, limit=limit, bound="at most", detail=detail, is_met=value <= limit)


def _at_least(name: str, value: float, limit: float, detail: str) -> Figure:
    return Figure(name=name, value=value, limit=limit, bound="at least", detail=detail, is_met=value >= limit)


@dataclass(frozen=True, slots=True)
class _Run:
    """Means over up to ``RUN_LENGTH`` neighbouring positions."""

    num_positions: int
    nll_reference: float
    nll_quantized: float
    kl: float
    same_top1: float
    mean_max_deviation: float
    max_deviation: float


def _runs(text: PositionValues, low: int, high: int) -> list[_Run]:
    """The runs of one text whose prompts have ``low`` to ``high - 1`` tokens."""
    runs = []
    # entry i belongs to a prompt of i + 1 tokens
    for start in range(max(low - 1, 0), min(high - 1, len(text.kl)), RUN_LENGTH):
        part: Any = slice(start, min(start + RUN_LENGTH, high - 1, len(text.kl)))
        kept = text.is_finite[part]
        if not kept.any():
            continue
        deviations = text.max_deviation[part][kept]
        runs.append(
            _Run(
                num_positions=int(kept.sum()),
                nll_reference=float(text.nll_reference[part][kept].mean()),
                nll_quantized=float(text.nll_quantized[part][kept].mean()),
                kl=float(text.kl[part][kept].mean()),
                same_top1=float(text.is_same_top1[part][kept].mean()),
                mean_max_deviation=float(deviations.mean()),
                max_deviation=float(deviations.max()),
            )
        )
    return runs


def _bucket(name: str, runs: Sequence[_Run], seed: int) -> BucketResult:
    reference, quantized = [run.nll_reference for run in runs], [run.nll_quantized for run in runs]
    return BucketResult(
        bucket=name,
        num_positions=sum(run.num_positions for run in runs),
        num_runs=len(runs),
        perplexity_reference=_perplexity(reference),
        perplexity_quantized=_perplexity(quantized),
        nll_increase=paired(quantized, reference, seed=seed),
        kl=_mean([run.kl for run in runs], seed),
        top1_agreement=_mean([run.same_top1 for run in runs], seed),
        mean_max_deviation=float(np.mean([run.mean_max_deviation for run in runs])),
        max_deviation=max(run.max_deviation for run in runs),
    )


def _perplexity(nll: Sequence[float]) -> float:
    return math.exp(min(float(np.mean(nll)), 700.0))


def _mean(values: Sequence[float], seed: int) -> Difference:
    interval = bootstrap(values, seed=seed)
    return Difference(mean=float(np.mean(values)), low=interval.low, high=interval.high)
