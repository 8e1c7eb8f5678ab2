"""What the comparison with other servers writes down."""

from typing import Any, Literal

import msgspec

from eval.load_records import BucketSummary
from eval.manifest import DataFile, Manifest


class PeerArm(msgspec.Struct, frozen=True, kw_only=True):
    """One server under the common load."""

    name: str
    version: str
    settings: dict[str, Any]
    missing: str | None = None
    """Why it was not measured; then nothing below is known."""
    start_s: float | None = None
    """Until it was ready, median of its starts."""
    peak_memory_mib: float | None = None
    """Of all its processes, shared pages once."""
    low: BucketSummary | None = None
    """One request at a time, about other passages."""
    passes: list[BucketSummary] = []
    """Under load, each on a fresh server."""
    both: BucketSummary | None = None
    """All passes together."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """The peer's percentile over ours, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"


class PeerComparison(msgspec.Struct, frozen=True, kw_only=True):
    """firsttoken against one peer, request by request."""

    peer: str
    num_requests: int
    """Answered by both."""
    ttft_p50: Ratio
    ttft_p95: Ratio
    low_ttft_p50: float | None
    """The same without load."""
    num_questions: int
    contains_ours: float
    contains_peer: float
    contains_difference: float
    """Ours minus the peer's, over the different questions."""
    contains_low: float
    contains_high: float
    only_ours: int
    only_peer: int
    mcnemar_p: float


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the comparison has to show."""

    text: str
    value: float
    is_met: bool


class PeersReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench."""

    kind: Literal["peers"] = "peers"
    manifest: Manifest
    data_files: list[DataFile]
    trace_sha256: str
    workload: dict[str, float]
    rate: float
    """Requests a second, the same for all."""
    utilisation: float
    """Of the slowest server: rate times its mean time for one request alone."""
    order: list[list[str]]
    """Servers of each pass."""
    definitions: dict[str, str]
    arms: list[PeerArm]
    comparisons: list[PeerComparison]
    requirements: list[Requirement]
