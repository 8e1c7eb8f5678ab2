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
    attention: float
    other: float
    kernels: dict[str, float]


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench."""

    manifest: MachineManifest
    isa: str
    clock: Clock
    """``processor`` on one thread, else ``wall``."""
    load_average: float
    """Processes that wanted a core, over the minute before the start."""
    openvino_version: str | None
    attention: list[AttentionResult]
    prefill: list[Comparison]
    decode: list[Comparison]
    shares: list[Share]
    prefill_over_best_peer: float | None
    """Geometric mean over the lengths of ours over the faster of the peers."""
