"""What operators see of the configuration: for ``/admin/v1/config`` and for Prometheus."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Trigger = Literal["start", "sighup", "file"]
ReloadOutcome = Literal["applied", "partial", "unchanged", "failed"]
"""``partial``: some keys were applied, or none, and others need a restart."""
OUTCOMES: tuple[ReloadOutcome, ...] = ("applied", "partial", "unchanged", "failed")
State = Literal["current", "restart_needed", "failed"]


class FailedReload(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that left the configuration before in force."""

    at: float
    """Unix time in seconds."""
    trigger: Trigger
    message: str
    key: str | None
    """Path of the key at fault, where one is known."""
    hint: str | None
    """What may have been meant."""


class ConfigStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /admin/v1/config``. No values: some are secrets."""

    state: State
    """``current``, ``restart_needed`` where keys wait for one, ``failed`` where the last attempt was refused."""
    source: str
    """The file."""
    digest: str | None = None
    """SHA-256 of the file that is in force, as ``sha256sum`` prints it; ``None`` where there is no file."""
    loaded_at: float
    """When what is in force was read: Unix time in seconds."""
    checked_at: float
    """When the configuration was last read, whatever came of it."""
    trigger: Trigger
    """What the last attempt was asked for by."""
    generation: int
    """1 at the start, one more with each snapshot that was put in force."""
    needs_restart: list[str] = []
    """Keys of the file that only a restart applies."""
    last_failure: FailedReload | None = None
    """The last attempt that was refused, also when a later one went well."""
    watch: bool = False
    """Whether changes of the file are noticed without SIGHUP."""
    watch_interval_s: float | None = None


class ReloadRecord:
    """The status and how many attempts ended how. Written from the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        now = clock()
        self.status = ConfigStatus(
            state="current", source="the program", loaded_at=now, checked_at=now, trigger="start", generation=1
        )
        self.num_reloads: Counter[ReloadOutcome] = Counter()


class ConfigCollector(Collector):
    """How reloads went, read when it is scraped."""

    def __init__(self, record: Callable[[], ReloadRecord]) -> None:
        self._record = record

    def collect(self) -> Iterator[Metric]:
        """One family each."""
        record = self._record()
        status = record.status
        reloads = CounterMetricFamily(
            "firsttoken_config_reloads", "Attempts to read the configuration anew by outcome", labels=["outcome"]
        )
        for outcome in OUTCOMES:
            reloads.add_metric([outcome], record.num_reloads[outcome])
        yield reloads
        yield GaugeMetricFamily(
            "firsttoken_config_last_reload_successful",
            "0 while the last attempt was refused and an older configuration is in force",
            value=float(status.state != "failed"),
        )
        yield GaugeMetricFamily(
            "firsttoken_config_last_reload_success_timestamp_seconds",
            "When the configuration in force was read",
            value=status.loaded_at,
        )
        yield GaugeMetricFamily(
            "firsttoken_config_keys_need_restart", "Keys that only a restart applies", value=len(status.needs_restart)
        )
