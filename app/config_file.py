"""Reads the settings from the TOML file and the environment, with errors that name the key."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.config_tree import merge, struct_of
from app.errors import ConfigError
from app.settings import Settings

CONFIG_VARIABLE = "FIRSTTOKEN_CONFIG"
DEFAULT_FILE = "firsttoken.toml"
EXAMPLE_FILE = Path(__file__).with_name("example.toml")
PATH_PREFIX = "FIRSTTOKEN__"
SHORT_NAMES = {"FIRSTTOKEN_HOST": ("server", "host"), "FIRSTTOKEN_PORT": ("server", "port")}


class LoadedSettings(NamedTuple):
    """Settings and where they came from."""

    settings: Settings
    source: str
    """The file, or a note that the shipped example is in use."""


def load_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> LoadedSettings:
    """Reads the settings.

    ``path`` goes before ``$FIRSTTOKEN_CONFIG``, which goes before ``./firsttoken.toml`` and the shipped example.
    Raises ``ConfigError`` naming the file and the key.
    """
    environ = os.environ if environ is None else environ
    text, source = _read(path, environ)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    try:
        return LoadedSettings(struct_of(merge(tree, _overrides(environ)), Settings), source)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _read(path: Path | None, environ: Mapping[str, str]) -> tuple[str, str]:
    named = path or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    chosen = named or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None)
    if chosen is None:
        return EXAMPLE_FILE.read_text(encoding="utf-8"), "example configuration"
    try:
        return chosen.read_text(encoding="utf-8"), str(chosen)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{chosen}: cannot be read: {error}") from None


def _overrides(environ: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name in sorted(environ):
        if name in SHORT_NAMES:
            keys: tuple[str, ...] = SHORT_NAMES[name]
        elif name.startswith(PATH_PREFIX):
            keys = tuple(part.lower() for part in name.removeprefix(PATH_PREFIX).split("__"))
        else:
            continue
        if not environ[name].strip() or not all(keys):
            raise ConfigError(f"environment: {name}={environ[name]!r} has an empty value or an empty path segment")
        value: Any = environ[name] if keys == ("server", "host") else _toml_value(environ[name])
        for key in reversed(keys):
            value = {key: value}
        tree = merge(tree, value)
    return tree


def _toml_value(text: str) -> Any:
    """A number, boolean, array or quoted string as TOML reads it; anything else is the string itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
