"""Reads the settings from the TOML file and the environment, with errors that name the key."""

import hashlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
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


class FileStamp(NamedTuple):
    """What tells that a file has changed. A link is followed, so one that is set to another file has changed."""

    modified_ns: int
    size: int
    inode: int


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """Everything that one reading of the configuration found."""

    settings: Settings
    source: str
    path: Path
    """The file, absolute; of the shipped example as well."""
    digest: str
    """SHA-256 of the file's bytes in hex."""
    stamp: FileStamp | None
    """Of the file before it was read."""
    of_file: dict[str, Any]
    """What the file says."""
    of_environment: dict[tuple[str, ...], str]
    """Which variable sets a key, by the key's path."""


def load_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> LoadedSettings:
    """Reads the settings.

    ``path`` goes before ``$FIRSTTOKEN_CONFIG``, which goes before ``./firsttoken.toml`` and the shipped example.
    Raises ``ConfigError`` naming the file and the key.
    """
    found = read_config(path, environ)
    return LoadedSettings(found.settings, found.source)


def read_config(path: Path | None = None, environ: Mapping[str, str] | None = None) -> ReadConfig:
    """The settings with where each comes from. Chooses the file and raises as ``load_settings``."""
    environ = os.environ if environ is None else environ
    chosen = path or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    if chosen is None and Path(DEFAULT_FILE).is_file():
        chosen = Path(DEFAULT_FILE)
    source, file = ("example configuration", EXAMPLE_FILE) if chosen is None else (str(chosen), chosen)
    stamp = stamp_of(file)
    try:
        content = file.read_bytes()
        tree = tomllib.loads(content.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    try:
        overrides, variables = _overrides(environ)
        settings = struct_of(merge(tree, overrides), Settings)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}", key=error.key, hint=error.hint) from None
    digest = hashlib.sha256(content).hexdigest()
    return ReadConfig(settings, source, file.absolute(), digest, stamp, tree, variables)


def stamp_of(path: Path) -> FileStamp | None:
    """What tells whether a file has changed; ``None`` where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return FileStamp(found.st_mtime_ns, found.st_size, found.st_ino)


def _overrides(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """What the environment sets, as a tree, and which variable sets which key."""
    tree: dict[str, Any] = {}
    variables: dict[tuple[str, ...], str] = {}
    for name in sorted(environ):
        if name in SHORT_NAMES:
            keys: tuple[str, ...] = SHORT_NAMES[name]
        elif name.startswith(PATH_PREFIX):
            keys = tuple(part.lower() for part in name.removeprefix(PATH_PREFIX).split("__"))
        else:
            continue
        if not environ[name].strip() or not all(keys):
            # The value of a misspelt name may be a secret.
            shown = "…" if environ[name].strip() else repr(environ[name])
            raise ConfigError(f"environment: {name}={shown} has an empty value or an empty path segment")
        variables[keys] = name
        value: Any = environ[name] if keys == ("server", "host") else _toml_value(environ[name])
        for key in reversed(keys):
            value = {key: value}
        tree = merge(tree, value)
    return tree, variables


def _toml_value(text: str) -> Any:
    """A number, boolean, array or quoted string as TOML reads it; anything else is the string itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
