"""Settings of what an operator keeps: the database, the counters, the admin keys, and budgets by period."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from app.counters.periods import Period

SHA256_HEX = re.compile(r"[0-9a-f]{64}")
DATA_VARIABLE = "FIRSTTOKEN_DATA"
DATABASE_FILE = "firsttoken.db"
DATABASE_SCHEMES = ("sqlite+aiosqlite", "postgresql+asyncpg")
COUNTER_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")


def require_positive(name: str, value: float | None) -> None:
    """Raises ``ValueError`` for a limit that is not positive; ``None`` is no limit."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, got {value}")


class BudgetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may use in each window of a period in UTC. ``None`` is no limit."""

    period: Period
    """``minute``, ``hour``, ``day`` or ``month``."""
    requests: int | None = None
    input_tokens: int | None = None
    """Tokens of compacted prompts."""
    output_tokens: int | None = None
    tokens: int | None = None
    """Input and output together."""

    def __post_init__(self) -> None:
        names = ("requests", "input_tokens", "output_tokens", "tokens")
        for name in names:
            require_positive(name, getattr(self, name))
        if all(getattr(self, name) is None for name in names):
            raise ValueError(f"a budget per {self.period} needs one of {', '.join(names)}")


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where tenants, keys, budgets, policies, usage and receipts are kept."""

    enabled: bool = True
    """Off: only the tenants of this file exist, receipts are kept in memory and no usage is written down."""
    url: str = ""
    """``postgresql://user:password@host/name`` or ``sqlite:///path``; empty is SQLite in ``data_folder``."""
    data_folder: str = ""
    """Folder of the SQLite file; empty is ``$FIRSTTOKEN_DATA``, else ``$XDG_DATA_HOME/firsttoken``, else
    ``~/.local/share/firsttoken``."""
    migrate_at_start: bool = True
    """Bring the tables up to date when the gateway starts; ``false`` leaves it to ``firsttoken db upgrade``."""
    pool_size: int = 5
    """Connections to PostgreSQL."""
    key_cache_s: float = 10.0
    """How long a key, a tenant or a policy may be used as it was last read: a revoked key stops working within it."""
    max_cached_keys: int = 20_000
    """Keys that are remembered, known and unknown ones together."""
    flush_interval_s: float = 1.0
    """How often usage and receipts are written; what a crash loses is younger than this."""

    def __post_init__(self) -> None:
        if self.url:
            self._check_url()
        for name in ("pool_size", "max_cached_keys", "flush_interval_s"):
            require_positive(name, getattr(self, name))
        if not self.key_cache_s >= 0:
            raise ValueError(f"key_cache_s must not be negative, got {self.key_cache_s}")

    def _check_url(self) -> None:
        scheme, separator, _ = self.url.partition("://")
        known = {"sqlite", "postgresql", "postgres", *DATABASE_SCHEMES}
        if not separator or scheme not in known:
            # The rest of the address may hold a password.
            raise ValueError(f"url must begin with one of {', '.join(sorted(known))} and ://, got {scheme[:32]!r}")

    def database_url(self, environ: Mapping[str, str] | None = None) -> str:
        """The address with its driver."""
        if not self.url:
            return f"sqlite+aiosqlite:///{self.folder(environ) / DATABASE_FILE}"
        scheme, _, rest = self.url.partition("://")
        if scheme in ("postgresql", "postgres"):
            return f"postgresql+asyncpg://{rest}"
        return f"sqlite+aiosqlite://{rest}" if scheme == "sqlite" else self.url

    def folder(self, environ: Mapping[str, str] | None = None) -> Path:
        """The data folder."""
        environ = os.environ if environ is None else environ
        if self.data_folder:
            return Path(self.data_folder).expanduser()
        if environ.get(DATA_VARIABLE):
            return Path(environ[DATA_VARIABLE]).expanduser()
        base = environ.get("XDG_DATA_HOME")
        return (Path(base) if base else Path.home() / ".local" / "share") / "firsttoken"


class CounterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rate limits and token budgets are counted."""

    url: str = ""
    """``redis://host:6379/0`` or ``valkey://…`` of a Valkey or Redis that several gateways share; empty is memory."""
    key_prefix: str = "firsttoken"
    """First part of the keys in the shared store."""
    lease_ttl_s: float = 60.0
    """A gateway that dies gives back what its requests had reserved after this time."""
    timeout_s: float = 1.0
    """How long the shared store may take to answer."""
    fail_open: bool = False
    """While the shared store does not answer, count in this process alone; ``false`` refuses with 503."""

    def __post_init__(self) -> None:
        scheme, separator, _ = self.url.partition("://")
        if self.url and (not separator or scheme not in COUNTER_SCHEMES):
            raise ValueError(f"url must begin with one of {', '.join(COUNTER_SCHEMES)} and ://, got {scheme[:32]!r}")
        if not self.key_prefix.strip():
            raise ValueError("key_prefix must not be empty")
        for name in ("lease_ttl_s", "timeout_s"):
            require_positive(name, getattr(self, name))


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may use ``/admin/v1``; nobody without a key here."""

    key_sha256: tuple[str, ...] = ()
    """SHA-256 of the admin keys in hex: ``printf %s "$KEY" | sha256sum``. Two, while one replaces the other."""

    def __post_init__(self) -> None:
        for digest in self.key_sha256:
            if not SHA256_HEX.fullmatch(digest):
                raise ValueError(f"key_sha256 must be 64 lower-case hex digits, got {len(digest)} characters")
