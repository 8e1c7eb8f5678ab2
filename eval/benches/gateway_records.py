"""What the gateway's bench reports: one Struct per question."""

import msgspec

from eval.manifest import MachineManifest


class RequestCost(msgspec.Struct, frozen=True, kw_only=True):
    """Processor time of the gateway per request that does not stream: slope over the number of requests."""

    reason: str
    """Why nothing is reduced."""
    rounds_ms: list[float]
    median_ms: float
    """At most 2 is wanted."""


class TokenCost(msgspec.Struct, frozen=True, kw_only=True):
    """Processor time per streamed token: slope between short and long answers."""

    tokens_per_write: int
    """Tokens that the upstream sends together."""
    rounds_us: list[float]
    median_us: float
    """Of the gateway; at most 50 is wanted."""
    upstream_us: float
    """Of the trivial upstream itself, which only writes: what sockets and timers cost here."""


class AddedTtft(msgspec.Struct, frozen=True, kw_only=True):
    """Time to the first text at half of saturation, against the same upstream called directly, alternating."""

    saturation_per_s: float
    """Streams that the gateway answers in a second where the client waits for nothing but answers."""
    rate_per_s: float
    mean_concurrent_streams: float
    tokens_per_stream: int
    direct_ms_p50: list[float]
    gateway_ms_p50: list[float]
    direct_ms_p95: list[float]
    gateway_ms_p95: list[float]
    added_ms_p50: float
    """Median over the rounds; at most 5 is wanted."""
    added_ms_p95: float


class BesideLarge(msgspec.Struct, frozen=True, kw_only=True):
    """Small requests, twenty at a time, alone and beside large ones."""

    large_bytes: int
    num_small: int
    num_large: int
    """Large requests that were answered meanwhile."""
    large_s: float
    """Time of one of them, median."""
    alone_ms_p50: float
    alone_ms_p99: float
    beside_ms_p50: float
    beside_ms_p99: float
    beside_ms_max: float


class ManyProcesses(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that do not stream, as many as go, with one process of the gateway and with two."""

    num_cores: int
    one_per_s: list[float]
    two_per_s: list[float]
    ratio: float
    """Two over one, median over the rounds. Client and upstream need a part of the cores as well."""
    one_cpu_ms: float
    two_cpu_ms: float
    """Processor time per request."""


class StartTime(msgspec.Struct, frozen=True, kw_only=True):
    """From the start of the command to its readiness."""

    rounds_s: list[float]
    median_s: float
    cpu_s: float


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench; a list is empty and a part ``None`` where it was left out."""

    manifest: MachineManifest
    request_cost: list[RequestCost]
    token_cost: list[TokenCost]
    added_ttft: AddedTtft | None
    beside_large: BesideLarge | None
    many_processes: ManyProcesses | None
    start: StartTime | None
