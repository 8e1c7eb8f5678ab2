"""What the scheduling bench reports: one Struct per question."""

import msgspec

from eval.manifest import Manifest


class LongPrefill(msgspec.Struct, frozen=True, kw_only=True):
    """Streams beside one long prompt, with chunks and without, alternating."""

    prompt_tokens: int
    num_streams: int
    chunk_tokens: int
    rounds: int
    largest_gap_ms_chunked: list[float]
    largest_gap_ms_whole: list[float]
    ttft_ms_chunked: list[float]
    ttft_ms_whole: list[float]
    gap_ratio: float
    """With chunks over without, median over the rounds; at most 0.2 is wanted."""
    ttft_ratio: float
    """Of the long prompt, the same way; at most 1.25 is wanted."""
    cpu_gap_ratio: float
    cpu_ttft_ratio: float
    """The same ratios in processor time of this process, which neighbours on a busy machine disturb less."""


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """One policy over the mixed trace, in simulated time."""

    policy: str
    num_requests: int
    num_short: int
    ttft_s_p50_short: float
    ttft_s_p95_short: float
    ttft_s_p50_all: float
    ttft_s_p95_all: float
    ttft_s_p95_long: float | None
    decode_gap_s_p99: float
    """Time of steps in which a stream decodes, weighted by streams."""
    decode_gap_s_max: float
    max_step_tokens: int
    """Most tokens computed in one step: the activations grow with it."""
    num_preemptions: int
    num_out_of_memory: int
    """Steps whose activations the memory limit does not hold."""


class MixedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The three policies under one load."""

    trace: str
    sha256: str
    num_requests: int
    step_s: float
    token_s: float
    pair_s: float
    """Coefficients fitted to this machine's real steps in the same run."""
    time_scale: float
    """Arrival times are those of the trace times this, so that the machine is busy but not overrun."""
    utilisation: float
    """Time of all requests, computed one by one, over the time of all arrivals; the trace comes in bursts."""
    activation_bytes_per_token: int
    activation_limit_bytes: int
    policies: list[PolicyResult]


class PrefixTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix reuse on one trace."""

    trace: str
    sha256: str
    num_requests: int
    num_distinct_blocks: int
    unlimited: float
    full_size: float
    full_size_gap_points: float
    """Unlimited minus full size, in points; at most 2 is wanted."""
    tenth: float
    plain_lru_tenth: float
    """Plain LRU with the same blocks in the same memory."""
    ideal_prompt_lru_tenth: float
    """Plain LRU that need not hold what is running or was generated."""


class ControlPlane(msgspec.Struct, frozen=True, kw_only=True):
    """Time of scheduling and block work per decode step."""

    num_sequences: list[int]
    ms_per_step: list[float]
    us_per_sequence: list[float]
    linearity: float
    """Time per sequence with the most sequences over that with 100; linear is about 1."""
    model_step_ms_64: float
    """A real step of 64 streams on this machine."""
    share_64: float
    """Control plane over the whole step at 64 sequences; at most 0.05 is wanted."""


class RandomCancels(msgspec.Struct, frozen=True, kw_only=True):
    """A thousand requests of which many are cancelled, at every stage."""

    num_requests: int
    num_completed: int
    num_cancelled: int
    cancelled_by_stage: dict[str, int]
    num_errors: int
    num_blocks_in_use_at_end: int
    num_unanswered: int
    memory_kib_after_quarter: float
    memory_kib_at_end: float
    """Python objects of the engine, by tracemalloc, with nothing unfinished."""
    all_in_order: bool
    """Every request was answered or cancelled, every block is free, and memory did not grow by more than a tenth."""


class SchedulingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench; ``None`` where a part was left out."""

    manifest: Manifest
    long_prefill: LongPrefill | None
    mixed_trace: MixedTrace | None
    prefix_traces: list[PrefixTrace]
    control_plane: ControlPlane | None
    random_cancels: RandomCancels | None
