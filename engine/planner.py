"""Says whether prefill and decode in separate engines pay, how many of each are needed, and what more devices bring.

Everything follows from measured times (``engine.cost_model`` for prefills, a line for decode steps), a sample of
lengths, an arrival rate and a bandwidth. Per engine, with arrival rate l, prefill time P, output length O, and a decode
step of b sequences that takes ``d0 + d1 * b``:

    waiting for a prefill     W = l * E[P^2] / (2 * (1 - l * E[P]))          Pollaczek-Khinchine, for M/G/1
    sequences that decode     b = l * E[O] * TPOT                            Little's law
    TPOT, decode alone        d0 / (1 - d1 * l * E[O])                       d0 + d1 * b, solved for TPOT
    TPOT, both in one engine  d0 / (1 - l * E[P] - d1 * l * E[O])            the share l * E[P] of the time prefills
    prefill beside decodes    P * (1 + (d0 + d1 * b) / chunk time)           each chunk shares its step with decodes
    gap of a stream           chunk time + d0 + d1 * b                       the longest, in one engine
    transfer                  latency + KV bytes / bandwidth, and its own W  the link of an engine is a queue, too

DistServe (Zhong et al., OSDI 2024) models the prefill queue so for prompts of one length, where it becomes M/D/1.

In one engine both phases share the time, so one figure for its throughput would say nothing about either; separate
engines take the gap away and pay with the transfer and with a part of the machines that may stand idle.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.cost_model import BYTES_PER_ELEMENT, CostCoefficients, kv_cache_bytes, num_attention_pairs
from engine.outputs import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What arrives."""

    prompt_tokens: Sequence[int]
    """A sample of prompt lengths, in tokens that have to be computed: what a prefix cache has does not count."""
    output_tokens: float
    """Mean length of an output."""
    request_rate: float
    """Requests per second over all engines, arriving independently of each other."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens or min(self.prompt_tokens) < 1:
            raise ValueError(f"prompt_tokens must hold positive lengths, got {list(self.prompt_tokens)[:5]}")
        for name in ("output_tokens", "request_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """Measured times of one engine."""

    prefill: CostCoefficients
    chunk_tokens: int
    """Tokens of a prefill chunk."""
    decode_step_s: float
    """d0: a decode step without sequences, that is, reading the weights."""
    decode_sequence_s: float
    """d1: what each sequence adds to it."""

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if self.decode_step_s < 0 or self.decode_sequence_s < 0 or self.decode_step_s + self.decode_sequence_s <= 0:
            raise ValueError(
                f"decode times must not be negative, nor both 0, got {self.decode_step_s} and {self.decode_sequence_s}"
            )

    def prefill_s(self, num_tokens: int) -> float:
        """Time to compute a prompt alone, in chunks."""
        num_steps = -(-num_tokens // self.chunk_tokens)
        return (
            self.prefill.step_s * num_steps
            + self.prefill.token_s * num_tokens
            + self.prefill.pair_s * num_attention_pairs(num_tokens, 0)
        )

    def chunk_s(self, num_tokens: float) -> float:
        """Mean time of one chunk of a prompt."""
        length = max(1, round(num_tokens))
        return self.prefill_s(length) / -(-length // self.chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What leaves a prefill engine."""

    bytes_per_s: float
    latency_s: float = 0.0005

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(
                f"a link needs a positive rate and no negative latency, got {self.bytes_per_s} B/s, {self.latency_s} s"
            )


class Objectives(NamedTuple):
    """Most, in seconds, of the mean TTFT, the mean TPOT, and the longest gap within a stream."""

    ttft_s: float
    tpot_s: float
    gap_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Engines and the times that follow; infinite where the load is more than they can serve."""

    num_prefill: int
    """0 where every engine computes both phases."""
    num_decode: int
    """Engines that decode."""
    ttft_s: float
    tpot_s: float
    gap_s: float
    transfer_s: float
    """Part of ``ttft_s``."""

    @property
    def num_engines(self) -> int:
        """All of them."""
        return self.num_prefill + self.num_decode

    def strain(self, objectives: Objectives) -> float:
        """The worst of the times relative to its objective: at most 1 where all are met."""
        return max(
            self.ttft_s / objectives.ttft_s,
            self.tpot_s / objectives.tpot_s,
            self.gap_s / objectives.gap_s if math.isfinite(objectives.gap_s) else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The verdict for a number of engines."""

    colocated: Layout
    disaggregated: Layout | None
    """The best split; ``None`` for a single engine."""
    pays: bool
    """The split strains the objectives less."""
    break_even_bytes_per_s: float
    """Below this rate of the link a decode engine computes a prompt sooner than it fetches its blocks."""
    load_ratio: float
    """Work of the prefills to work of the decodes: the ratio of engines that keeps both equally busy."""


def queue_wait_s(arrival_rate: float, service_s: Sequence[float]) -> float:
    """Mean wait in an M/G/1 queue by Pollaczek-Khinchine; infinite where more arrives than can be served.

    Args:
        arrival_rate: per second.
        service_s: a sample of service times.
    """
    mean = sum(service_s) / len(service_s)
    square = sum(time * time for time in service_s) / len(service_s)
    utilisation = arrival_rate * mean
    return arrival_rate * square / (2 * (1 - utilisation)) if utilisation < 1 else math.inf


def tpot_s(speed: EngineSpeed, token_rate: float, prefill_share: float = 0.0) -> float:
    """Mean time per output token of one engine; infinite where it cannot keep up.

    Args:
        speed: of the engine.
        token_rate: output tokens per second that it has to give.
        prefill_share: share of its time, 0 to 1, that goes into prefills.
    """
    rest = 1 - prefill_share - speed.decode_sequence_s * token_rate
    if rest <= 0:
        return math.inf
    # A single sequence is the least there is while anything decodes.
    return max(speed.decode_step_s / rest, (speed.decode_step_s + speed.decode_sequence_s) / (1 - prefill_share))


def colocated(workload: Workload, speed: EngineSpeed, num_engines: int) -> Layout:
    """Every engine computes both phases, chunks of prefills beside decodes."""
    rate = workload.request_rate / num_engines
    alone_s = [speed.prefill_s(length) for length in workload.prompt_tokens]
    share = rate * sum(alone_s) / len(alone_s)
    per_token_s = tpot_s(speed, rate * workload.output_tokens, share) if share < 1 else math.inf
    if math.isinf(per_token_s):
        return Layout(
            num_prefill=0, num_decode=num_engines, ttft_s=math.inf, tpot_s=math.inf, gap_s=math.inf, transfer_s=0
        )
    batch = rate * workload.output_tokens * per_token_s
    decode_s = speed.decode_step_s + speed.decode_sequence_s * batch if batch > 0 else 0.0
    mean_tokens = sum(workload.prompt_tokens) / len(workload.prompt_tokens)
    chunk_s = speed.chunk_s(mean_tokens)
    # With less than one stream on average, a chunk meets one only so often.
    beside_s = [time * (1 + min(batch, 1.0) * decode_s / chunk_s) for time in alone_s]
    ttft_s = queue_wait_s(rate, beside_s) + sum(beside_s) / len(beside_s)
    longest_s = speed.chunk_s(max(workload.prompt_tokens))
    return Layout(
        num_prefill=0,
        num_decode=num_engines,
        ttft_s=ttft_s,
        tpot_s=per_token_s,
        gap_s=longest_s + decode_s,
        transfer_s=0,
    )


def disaggregated(
    workload: Workload, speed: EngineSpeed, link: Link, info: ModelInfo, num_prefill: int, num_decode: int
) -> Layout:
    """Prompts are computed by some engines, and decoded by others that fetch their KV blocks.

    The decode engine computes the last, partial block itself: one more step before the first token.
    """
    prefill_rate = workload.request_rate / num_prefill
    prefill_s = [speed.prefill_s(length) for length in workload.prompt_tokens]
    sent_s = [link.latency_s + kv_cache_bytes(info, length) / link.bytes_per_s for length in workload.prompt_tokens]
    transfer_s = queue_wait_s(prefill_rate, sent_s) + sum(sent_s) / len(sent_s)
    token_rate = workload.request_rate * workload.output_tokens / num_decode
    per_token_s = tpot_s(speed, token_rate)
    ttft_s = queue_wait_s(prefill_rate, prefill_s) + sum(prefill_s) / len(prefill_s) + transfer_s + per_token_s
    return Layout(
        num_prefill=num_prefill,
        num_decode=num_decode,
        ttft_s=ttft_s,
        tpot_s=per_token_s,
        gap_s=per_token_s,
        transfer_s=transfer_s,
    )


def break_even_bytes_per_s(workload: Workload, speed: EngineSpeed, info: ModelInfo) -> float:
    """Rate at which the KV of a mean prompt arrives just as fast as it could be computed."""
    seconds = sum(speed.prefill_s(length) for length in workload.prompt_tokens)
    return sum(kv_cache_bytes(info, length) for length in workload.prompt_tokens) / seconds


def load_ratio(workload: Workload, speed: EngineSpeed, tpot_limit_s: float) -> float:
    """Work of prefills to work of decodes, with batches as large as the objective for TPOT allows.

    A batch of b gives ``b / (d0 + d1 * b)`` tokens a second; the largest with ``d0 + d1 * b`` within the objective is
    the most efficient one. Infinite where not even one sequence decodes that fast.
    """
    prefill_s = sum(speed.prefill_s(length) for length in workload.prompt_tokens) / len(workload.prompt_tokens)
    if speed.decode_sequence_s > 0:
        batch = (tpot_limit_s - speed.decode_step_s) / speed.decode_sequence_s
    else:
        batch = math.inf if tpot_limit_s >= speed.decode_step_s else 0.0
    if batch < 1:
        return math.inf
    token_s = speed.decode_sequence_s + speed.decode_step_s / batch
    return prefill_s / (workload.output_tokens * token_s) if token_s > 0 else math.inf


def plan(
    workload: Workload, speed: EngineSpeed, link: Link, info: ModelInfo, objectives: Objectives, num_engines: int
) -> Plan:
    """Compare one layout with the best split of the same number of engines.

    Raises:
        ValueError: there is no engine.
    """
    if num_engines < 1:
        raise ValueError(f"num_engines must be at least 1, got {num_engines}")
    together = colocated(workload, speed, num_engines)
    splits = [
        disaggregated(workload, speed, link, info, num_prefill, num_engines - num_prefill)
        for num_prefill in range(1, num_engines)
    ]
    best = min(splits, key=lambda layout: layout.strain(objectives), default=None)
    return Plan(
        colocated=together,
        disaggregated=best,
        pays=best is not None and best.strain(objectives) < together.strain(objectives),
        break_even_bytes_per_s=break_even_bytes_per_s(workload, speed, info),
        load_ratio=load_ratio(workload, speed, objectives.tpot_s),
    )


def fewest_engines(
    workload: Workload,
    speed: EngineSpeed,
    link: Link,
    info: ModelInfo,
    objectives: Objectives,
    *,
    max_num_engines: int = 64,
) -> Plan | None:
    """The plan with the fewest engines that meets all objectives, in either layout; ``None`` if none does."""
    for num_engines in range(1, max_num_engines + 1):
        found = plan(workload, speed, link, info, objectives, num_engines)
        layouts = [found.colocated, *([found.disaggregated] if found.disaggregated is not None else [])]
        if any(layout.strain(objectives) <= 1 for layout in layouts):
            return found
    return None


def tensor_parallel_prefill_s(
    speed: EngineSpeed, info: ModelInfo, num_tokens: int, num_devices: int, link: Link
) -> float:
    """Prefill of one prompt over devices that split every layer.

    Two all-reduces of the hidden states per layer (Megatron-LM, Shoeybi et al. 2019), each in a ring that moves
    ``2 * (n - 1) / n`` of them in ``2 * (n - 1)`` steps (Patarasuk and Yuan 2009); the arithmetic divides by n.
    """
    hidden_bytes = num_tokens * info.hidden_size * BYTES_PER_ELEMENT[info.dtype]
    moved = 2 * (num_devices - 1) / num_devices * hidden_bytes
    num_chunks = -(-num_tokens // speed.chunk_tokens)
    latency_s = 2 * (num_devices - 1) * link.latency_s * num_chunks if num_devices > 1 else 0.0
    return speed.prefill_s(num_tokens) / num_devices + 2 * info.num_layers * (moved / link.bytes_per_s + latency_s)


def pipeline_parallel_prefill_s(
    speed: EngineSpeed, info: ModelInfo, num_tokens: int, num_devices: int, link: Link
) -> float:
    """Prefill of one prompt over devices that hold consecutive layers; its chunks are the micro-batches.

    ``m`` chunks take ``(m + n - 1) / (m * n)`` of the time of one device: the pipeline fills and drains (GPipe, Huang
    et al. 2019). Each stage hands the hidden states of a chunk on. A prompt of one chunk gains nothing.
    """
    num_chunks = -(-num_tokens // speed.chunk_tokens)
    num_slots = num_chunks + num_devices - 1
    hidden_bytes = num_tokens / num_chunks * info.hidden_size * BYTES_PER_ELEMENT[info.dtype]
    hand_over_s = link.latency_s + hidden_bytes / link.bytes_per_s if num_devices > 1 else 0.0
    return speed.prefill_s(num_tokens) * num_slots / (num_chunks * num_devices) + hand_over_s * num_slots
