"""Turns a tree of TOML tables into Structs, with errors that open with the path of the key at fault."""

import difflib
import functools
import re
import types
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

from app.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)

_PLACE = re.compile(r" - at `\$(\S*)`$")


def struct_of(tree: Mapping[str, Any], kind: type[S], path: str = "") -> S:
    """Converts a TOML table to a Struct. Raises ``ConfigError`` that opens with the path of the key at fault."""
    fields = _fields(kind)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in fields:
            path, hint = _join(path, key), _hint(key, list(fields))
            raise ConfigError(f"unknown key {path!r}; {hint}", key=path, hint=hint)
        values[fields[key].name] = _value_of(value, fields[key].type, _join(path, key))
    if missing := [name for name, entry in fields.items() if entry.required and entry.name not in values]:
        path = _join(path, missing[0])
        raise ConfigError(f"{path} is missing", key=path)
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error), key=_key_of(str(error), path, fields)) from None


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields of a Struct by their names in TOML; found once, because ten thousand tenants ask for them."""
    return {entry.encode_name: entry for entry in msgspec.structs.fields(kind)}


def _key_of(text: str, path: str, fields: Collection[str]) -> str | None:
    """The key that a Struct complains about: its messages begin with the field, or with the path below it."""
    first = text.split()[0].rstrip(":,") if text.strip() else ""
    return _join(path, first) if first.partition(".")[0].partition("[")[0] in fields else path or None


def _value_of(value: Any, kind: Any, path: str) -> Any:
    """One value; tables and arrays of Structs are walked, so that the path of a mistake is known exactly."""
    inner = struct_in(kind)
    if inner is not None and isinstance(value, dict):
        if get_origin(kind) is dict:
            return {name: _value_of(entry, inner, f"{path}.{name}") for name, entry in value.items()}
        return struct_of(value, inner, path)
    if inner is not None and get_origin(kind) in (list, tuple) and isinstance(value, list):
        return tuple(_value_of(entry, inner, f"{path}[{index}]") for index, entry in enumerate(value))
    _refuse_nan(value, path)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # msgspec adds where inside the value: "Expected `int`, got `str` - at `$[1]`".
        inside = _PLACE.search(str(error))
        hint = f"write a list: [{value!r}]" if str(error).startswith("Expected `array`") and not inside else None
        text = f"{path}: {error}" + (f"; {hint}" if hint else "")
        raise ConfigError(text, key=path + (inside[1] if inside else ""), hint=hint) from None


def _refuse_nan(value: Any, path: str) -> None:
    """TOML knows NaN, and no comparison with a limit would stop it."""
    if isinstance(value, float) and value != value:
        raise ConfigError(f"{path}: NaN is no value of a setting", key=path)
    if isinstance(value, list):
        for index, entry in enumerate(value):
            _refuse_nan(entry, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, entry in value.items():
            _refuse_nan(entry, f"{path}.{name}")


def struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """The Struct that ``kind`` is or holds: ``S``, ``S | None``, ``dict[str, S]``, ``list[S]``, ``tuple[S, ...]``."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    if get_origin(kind) in (dict, list, tuple, Union, types.UnionType):
        found = [argument for argument in get_args(kind) if isinstance(argument, type)]
        structs = [argument for argument in found if issubclass(argument, msgspec.Struct)]
        return structs[0] if len(structs) == 1 else None
    return None


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _hint(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, table by table; neither is modified."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
