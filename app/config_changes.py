"""What a change of the configuration touches: keys that hold from the next request on, and keys that need a restart.

A reload applies the live keys and leaves the others as they are; what it left is named in the log and in
``/admin/v1/config`` until a restart applies it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from app.config_tree import struct_of
from app.errors import ConfigError
from app.settings import Settings

LIVE_KEYS = (
    "server.max_body_bytes",
    "server.max_pending_jobs",
    "server.shutdown_grace_s",
    "server.salt_secret",
    "backend.replicas",
    "backend.routing",
    "backend.cache_salt_field",
    "backend.cache_salt_header",
    "backend.first_token_timeout_s",
    "backend.idle_timeout_s",
    "backend.max_attempts",
    "backend.health_interval_s",
    "backend.health_path",
    "backend.failure_threshold",
    "backend.open_s",
    "backend.max_open_s",
    "reducer",
    "limits",
    "policies",
    "tenants",
    "receipts",
    "storage.key_cache_s",
    "storage.max_cached_keys",
    "storage.flush_interval_s",
    "admin",
    "logging.level",
    "reload",
)
"""Everything else needs a restart: it is what sockets, processes, models, connections and tables are made with."""
RESTART_KEYS = ("reducer.encoder",)
"""Below a live key: the encoder is loaded with them."""


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """The way from the settings in force to those that were read."""

    settings: Settings
    """What can be put in force now: the live keys as read, the others as they are in force."""
    applied: tuple[str, ...]
    """Paths of live keys that differ, in order."""
    needs_restart: tuple[str, ...]
    """Paths of the other keys that differ."""


def is_live(path: str) -> bool:
    """Whether the key at ``path`` holds from the next request on."""
    return _is_below(path, LIVE_KEYS) and not _is_below(path, RESTART_KEYS)


def changes_between(current: Settings, wanted: Settings) -> ConfigChanges:
    """Compares settings. Raises ``ConfigError`` where the live keys of one do not go with the other keys in force."""
    before, after = msgspec.to_builtins(current), msgspec.to_builtins(wanted)
    differing = list(_differing(before, after, ()))
    applied = [path for path in differing if is_live(".".join(path))]
    needs_restart = [path for path in differing if not is_live(".".join(path))]
    settings = wanted
    if needs_restart:
        for path in needs_restart:
            _copy(path, before, after)
        try:
            settings = struct_of(after, Settings)
        except ConfigError as error:
            kept = ", ".join(".".join(path) for path in needs_restart)
            raise ConfigError(f"{error} (as long as no restart applies {kept})", key=error.key) from None
    return ConfigChanges(settings, tuple(map(".".join, applied)), tuple(map(".".join, needs_restart)))


def _is_below(path: str, keys: tuple[str, ...]) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in keys)


def _differing(before: Any, after: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths at which two trees differ; lists are compared as wholes."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        if before != after:
            yield path
        return
    for key in [*before, *(key for key in after if key not in before)]:
        if key in before and key in after:
            yield from _differing(before[key], after[key], (*path, key))
        else:
            yield (*path, key)


def _copy(path: tuple[str, ...], source: dict[str, Any], target: dict[str, Any]) -> None:
    """Sets one key of ``target`` as it is in ``source``; only Structs' keys come here, which both have."""
    *tables, key = path
    for table in tables:
        source, target = source[table], target[table]
    target[key] = source[key]
