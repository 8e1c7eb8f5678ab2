"""What the kernel bench writes down."""

import msgspec

from eval.benches.prefill_engines import Clock
from eval.manifest import MachineManifest


class AttentionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one prompt, medians in GFLOP/s."""

    num_tokens: int
    native: float
    sdpa: float
    tiled: float
    gemm: float
    """The bf16 product by oneDNN."""
    gemm_native: float
    """The same by our kernel."""
    share_of_gemm: float
    """Median of native over oneDNN's product, round by round."""
    native_over_sdpa: float


class EngineRate(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in one comparison."""

    name: str
    tokens_per_s: float
    """Of the median round."""
    ours_over_it: float
    """Median of the rounds' ratios; above 1 is better for ours."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All engines on one load."""

    num_tokens: int
    batch_size: int
    num_rounds: int
    engines: list[EngineRate]


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one prefill goes, in parts of 1."""

    num_tokens: int
    products: float
    """With the gates of the MLP, which are computed where the products are."""
    attention: float
    other: float
    norms: float
    rotary: float
    """Head norms, rotation, store into the cache."""
    rest: float
    """Outside the layers, and between the kernels."""


class StartResult(msgspec.Struct, frozen=True, kw_only=True):
    """`firsttoken serve` with built kernels and the default model."""

    seconds_to_ready: float
    """From the start of the process to the first answer of /ready that says so; median."""
    num_starts: int
    num_prompt_tokens: int
    engine_peak_bytes: int
    """Of the engine's process, after one long prompt."""
    total_peak_bytes: int
    """Sum of the peaks of all processes; what they share, libraries above all, counts in each."""
    weight_bytes: int
    kv_bytes: int
    is_within_memory: bool
    """The engine needs at most weights, KV cache and a gigabyte."""


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench."""

    manifest: MachineManifest
    isa: str
    clock: Clock
    """``processor`` on one thread, else ``wall``."""
    load_average: float
    """Processes that wanted a core, over the minute before the start."""
    peers: dict[str, str]
    """Name and version."""
    peer_settings: dict[str, str]
    """What was chosen for those that were given a choice."""
    attention: list[AttentionResult]
    prefill: list[Comparison]
    decode: list[Comparison]
    shares: list[Share]
    prefill_over_best_peer: float | None
    """Geometric mean over the lengths of ours, bf16, over the fastest of the peers."""
    int8_over_best_peer: float | None
    """The same of our int8 weights and inputs."""
    start: StartResult | None
