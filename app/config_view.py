"""The configuration as it is in effect: each key with its value and where that comes from, secrets masked."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from app.config_changes import is_live
from app.config_file import ReadConfig

MASK = "***"
DIGEST_CHARS = 12
_USERINFO = re.compile(r"(?<=://)([^/@:\s]*):[^/@\s]*(?=@)")
_SECRET = re.compile(r"(^|_)(secret|password|passwd|credential)s?$")
_SAFE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class ConfigValue(msgspec.Struct, frozen=True, kw_only=True):
    """One key in effect."""

    key: str
    value: Any
    origin: str
    """``file``, ``default``, or the environment variable."""
    live: bool
    """Whether a reload applies a change of it."""


def config_values(config: ReadConfig) -> list[ConfigValue]:
    """All keys in the order of the Structs; entries of tables and arrays of tables have their own."""
    values = msgspec.to_builtins(config.settings)
    return [
        ConfigValue(
            key=_name(path),
            value=masked(str(path[-1]), value),
            origin=_origin(path, config),
            live=is_live(".".join(str(part) for part in path if isinstance(part, str))),
        )
        for path, value in _leaves(values, ())
    ]


def masked(name: str, value: Any) -> Any:
    """A value that may be shown: no secret, no password of a URL, of a digest only the beginning."""
    if isinstance(value, (list, tuple)):
        return [masked(name, entry) for entry in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET.search(name):
        return MASK
    if name.endswith("sha256"):
        return f"{value[:DIGEST_CHARS]}…"
    return _USERINFO.sub(lambda found: f"{found[1]}:{MASK}", value)


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Keys without keys below them. An empty table has none and is shown itself."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(below, (*path, key))
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        for index, below in enumerate(value):
            yield from _leaves(below, (*path, index))
    else:
        yield path, value


def _name(path: tuple[str | int, ...]) -> str:
    """A path as messages write it; a part that TOML would quote is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _SAFE_KEY.fullmatch(part) else f'"{part}"')
    return text


def _origin(path: tuple[str | int, ...], config: ReadConfig) -> str:
    names = tuple(part for part in path if isinstance(part, str))
    for end in range(len(names), 0, -1):
        if names[:end] in config.of_environment:
            return config.of_environment[names[:end]]
    found: Any = config.of_file
    for part in path:
        try:
            found = found[part]
        except (KeyError, IndexError, TypeError):
            return "default"
    return "file"
