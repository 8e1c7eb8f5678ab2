"""The gateway's settings: one frozen tree of Structs, read once from TOML and the environment.

Where a value comes from, the later winning: the default of the field, the TOML file, the environment.
The file is ``$FIRSTTOKEN_CONFIG``, else ``./firsttoken.toml``, else the example shipped with the package.
``FIRSTTOKEN_HOST`` and ``FIRSTTOKEN_PORT`` set the address; every other key can be set with its path in capitals,
segments separated by two underscores, value in TOML syntax or a bare string::

    FIRSTTOKEN__ENGINE__MODEL__DTYPE=fp32
    FIRSTTOKEN__ENGINE__SCHEDULER__MAX_NUM_BATCHED_TOKENS=512

A key that does not exist is refused with its path.
"""

import hashlib
import ipaddress
import math
import re
from typing import Any, Literal

import msgspec

from app.backend_settings import BackendSettings
from app.config_tree import merge, struct_of
from app.operator_settings import (
    SHA256_HEX,
    AdminSettings,
    BudgetSettings,
    CounterSettings,
    StorageSettings,
)
from app.tracing_settings import TracingSettings
from engine.config import EngineConfig
from reducer.config import ReducerConfig

DEMO_KEYS = ("sk-acme-demo", "sk-globex-demo")
"""Keys of the example configuration; public, so they are only accepted on loopback."""

DEFAULT_POLICY = "default"
TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_INTERVAL_S = 86_400.0


def _require_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, got {value}")


def _require_share(name: str, value: float | None) -> None:
    if value is not None and not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gateway listens and how much it takes in."""

    host: str = "127.0.0.1"
    """Address to listen on; ``FIRSTTOKEN_HOST`` overrides it."""
    port: int = 8080
    """Port to listen on, 0 for a free one; ``FIRSTTOKEN_PORT`` overrides it."""
    served_model_name: str = "default"
    """Model name that clients send; the model's own name is accepted as well."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Largest request body; a larger one is answered with 413."""
    num_processes: int = 1
    """Processes that serve the address together, with backends of kind ``openai``; ``--workers`` overrides it."""
    num_workers: int = 2
    """Threads of each process for JSON of large bodies, tokenizing and reduction."""
    max_pending_jobs: int = 128
    """Jobs waiting for or running in a worker thread; a further one is answered with 503."""
    shutdown_grace_s: float = 10.0
    """How long running requests may go on after SIGTERM."""
    salt_secret: str = ""
    """Key of the tenants' cache salts; set it where others could guess tenant names. Several gateways share it."""

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ValueError("host must not be empty")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        if not self.served_model_name.strip():
            raise ValueError("served_model_name must not be empty")
        _require_positive("max_body_bytes", self.max_body_bytes)
        _require_positive("num_processes", self.num_processes)
        _require_positive("num_workers", self.num_workers)
        _require_positive("max_pending_jobs", self.max_pending_jobs)
        if self.shutdown_grace_s < 0:
            raise ValueError(f"shutdown_grace_s must not be negative, got {self.shutdown_grace_s}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the window is shared between prompt and output."""

    output_reserve_tokens: int = 256
    """Window tokens kept free for the output where the request names no ``max_tokens``."""
    max_output_reserve_ratio: float = 0.25
    """Most of the window, 0 to 1, that a request's ``max_tokens`` may keep free for the output. Above it ``max_tokens``
    is not a demand: the output gets the room that the prompt leaves."""
    default_max_tokens: int | None = None
    """Output tokens where the request names no ``max_tokens``; ``None`` is the room left in the window."""

    def __post_init__(self) -> None:
        _require_positive("output_reserve_tokens", self.output_reserve_tokens)
        _require_positive("default_max_tokens", self.default_max_tokens)
        if not 0.0 < self.max_output_reserve_ratio < 1.0:
            raise ValueError(f"max_output_reserve_ratio must be between 0 and 1, got {self.max_output_reserve_ratio}")


class EncoderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedding model of the rank stage."""

    enabled: bool = True
    """Off: passages are ranked by words and the retriever's score alone."""
    model: str = "all-minilm-l6-v2"
    """A name of the catalogue, a local sentence-transformers folder or a Hugging Face id."""
    required: bool = True
    """Fail closed: the gateway does not start without it. ``false`` starts without, and every result says so."""


class RerankerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cross-encoder of the rank stage; off unless a model is named."""

    model: str | None = None
    """A local folder or a Hugging Face id of a sentence-transformers cross-encoder with one output."""
    required: bool = True
    """Fail closed: the gateway does not start without it. ``false`` starts without."""


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named way to reduce, picked by ``firsttoken.policy`` or by the tenant."""

    max_input_tokens: int | None = None
    """Most prompt tokens under this policy."""
    ttft_slo_ms: float | None = None
    """Objective for the time to the first token, in ms; the input budget follows it."""
    measured_recall: float | None = None
    """Answer recall, 0 to 1, that an evaluation of this policy gave; ``None`` is not known."""
    reducer: dict[str, Any] = {}
    """Keys of ``[reducer]`` that differ under this policy."""

    def __post_init__(self) -> None:
        _require_positive("max_input_tokens", self.max_input_tokens)
        _require_positive("ttft_slo_ms", self.ttft_slo_ms)
        _require_share("measured_recall", self.measured_recall)


class KeySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key of a tenant. Only its digest is kept."""

    sha256: str
    """SHA-256 of the key in hex: ``printf %s "$KEY" | sha256sum``."""
    name: str = ""
    """What people call the key; it appears in logs."""
    groups: tuple[str, ...] = ()
    """Groups whose documents the key's holder may read."""

    def __post_init__(self) -> None:
        if not SHA256_HEX.fullmatch(self.sha256):
            raise ValueError(f"sha256 must be 64 lower-case hex digits, got {len(self.sha256)} characters")
        if any(not group.strip() for group in self.groups):
            raise ValueError("groups must not hold an empty name")


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant: its keys and its limits. ``None`` is no limit."""

    keys: tuple[KeySettings, ...] = ()
    policy: str = DEFAULT_POLICY
    """Policy of requests that name none."""
    deny_unlabelled: bool = False
    """Documents without ``acl`` are denied instead of readable."""
    max_input_tokens: int | None = None
    """Most prompt tokens of one request."""
    ttft_slo_ms: float | None = None
    """Objective for the time to the first token, in ms."""
    tokens_per_day: int | None = None
    """Prompt and output tokens together per UTC day."""
    requests_per_minute: int | None = None
    """Requests in any 60 seconds."""
    max_parallel_requests: int | None = None
    """Requests that run at the same time."""
    budgets: tuple[BudgetSettings, ...] = ()
    """Requests and tokens by period, one entry each."""
    recall_floor: float | None = None
    """Least ``measured_recall``, 0 to 1, of the policies that the tenant's requests may use."""

    def __post_init__(self) -> None:
        limits = ("max_input_tokens", "ttft_slo_ms", "tokens_per_day", "requests_per_minute", "max_parallel_requests")
        for name in limits:
            _require_positive(name, getattr(self, name))
        _require_share("recall_floor", self.recall_floor)
        periods = [budget.period for budget in self.budgets]
        for period in periods:
            if periods.count(period) > 1:
                raise ValueError(f"budgets must hold one entry a period, got {periods.count(period)} of {period}")
        if self.tokens_per_day is not None and any(b.period == "day" and b.tokens is not None for b in self.budgets):
            raise ValueError("tokens_per_day and tokens of the budget per day say the same; leave one of them out")


class ReceiptSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many reduction records are kept, in the database or without one in memory, and for how long."""

    max_entries_per_tenant: int = 1000
    max_bytes_per_tenant: int = 32 * 1024 * 1024
    max_bytes: int = 256 * 1024 * 1024
    """Of all tenants together; the oldest go first."""
    retention_s: float = 86400.0
    include_originals: bool = True
    """Keep the messages and readable documents as received, so that every decision can be undone."""

    def __post_init__(self) -> None:
        for name in ("max_entries_per_tenant", "max_bytes_per_tenant", "max_bytes", "retention_s"):
            _require_positive(name, getattr(self, name))


class LoggingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs go to standard error and hold no prompt text."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"
    exception_text: bool = False
    """Log messages of unexpected exceptions too; these may quote a prompt, so only where logs may hold some."""


class DisaggregationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill and decode in engine processes of their own; ``firsttoken plan`` says whether that pays.

    Each takes the settings of ``engine``: its threads and its share of the free memory as well.
    """

    num_prefill_engines: int = 0
    """Engines that compute prompts; 0 of both is one engine for everything."""
    num_decode_engines: int = 0
    """Engines that fetch the KV blocks of prompts and compute outputs."""

    def __post_init__(self) -> None:
        counts = (self.num_prefill_engines, self.num_decode_engines)
        if min(counts) < 0 or (max(counts) > 0 and min(counts) == 0):
            raise ValueError(
                "num_prefill_engines and num_decode_engines must both be 0 or both be at least 1, "
                f"got {counts[0]} and {counts[1]}"
            )

    @property
    def is_on(self) -> bool:
        """There are engines of both roles."""
        return self.num_prefill_engines > 0


class ReloadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the configuration is read anew while the gateway runs; SIGHUP always does."""

    watch: bool = True
    """Read the file anew once it has changed and is the same in two looks in a row."""
    interval_s: float = 2.0
    """Between two looks at the file."""

    def __post_init__(self) -> None:
        _require_positive("interval_s", self.interval_s)
        if self.interval_s > MAX_INTERVAL_S:
            raise ValueError(f"interval_s must be at most {MAX_INTERVAL_S}, got {self.interval_s}")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the gateway is started with."""

    server: ServerSettings = ServerSettings()
    backend: BackendSettings = BackendSettings()
    engine: EngineConfig = EngineConfig()
    disaggregation: DisaggregationSettings = DisaggregationSettings()
    encoder: EncoderSettings = EncoderSettings()
    reranker: RerankerSettings = RerankerSettings()
    reducer: ReducerConfig = ReducerConfig()
    limits: LimitSettings = LimitSettings()
    policies: dict[str, PolicySettings] = {}
    tenants: dict[str, TenantSettings] = {}
    receipts: ReceiptSettings = ReceiptSettings()
    storage: StorageSettings = StorageSettings()
    counters: CounterSettings = CounterSettings()
    admin: AdminSettings = AdminSettings()
    logging: LoggingSettings = LoggingSettings()
    tracing: TracingSettings = TracingSettings()
    reload: ReloadSettings = ReloadSettings()

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        for tenant_id, tenant in self.tenants.items():
            if not TENANT_ID.fullmatch(tenant_id):
                raise ValueError(
                    f"tenant id must be 1 to 64 letters, digits, dots, dashes or underscores, got {tenant_id!r}"
                )
            if tenant.policy not in self.policy_names:
                known = ", ".join(self.policy_names)
                raise ValueError(f"tenants.{tenant_id}.policy is {tenant.policy!r}, known policies: {known}")
            for key in tenant.keys:
                owner = owners.setdefault(key.sha256, tenant_id)
                if owner != tenant_id:
                    raise ValueError(f"tenants {owner!r} and {tenant_id!r} have the same key {key.sha256[:12]}…")
        for name in self.policies:
            self.reducer_config(name)
        self._check_demo_keys(owners)

    def _check_demo_keys(self, owners: dict[str, str]) -> None:
        if self.server.is_loopback:
            return
        for demo_key in DEMO_KEYS:
            if (owner := owners.get(hashlib.sha256(demo_key.encode()).hexdigest())) is not None:
                raise ValueError(
                    f"tenant {owner!r} has the public demo key {demo_key}, which is only accepted on loopback; "
                    f"server.host is {self.server.host!r}: configure keys of your own"
                )

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names that ``firsttoken.policy`` may take."""
        return tuple(sorted({DEFAULT_POLICY, *self.policies}))

    def policy(self, name: str) -> PolicySettings | None:
        """The policy called ``name``, or ``None`` where there is none."""
        if name in self.policies:
            return self.policies[name]
        return PolicySettings() if name == DEFAULT_POLICY else None

    def reducer_config(self, policy: str) -> ReducerConfig:
        """``[reducer]`` with the changes of a policy. Raises ``ConfigError`` naming the key that does not fit."""
        changes = self.policies[policy].reducer if policy in self.policies else {}
        if not changes:
            return self.reducer
        return struct_of(merge(msgspec.to_builtins(self.reducer), changes), ReducerConfig, f"policies.{policy}.reducer")
