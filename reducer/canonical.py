"""Canonical tools: the same tools give the same bytes, whatever order the client sent them or their keys in.

Only order changes: tools by name, the keys of a tool and of its JSON schema in the order people write them, names of
properties alphabetically. Nothing is added, dropped or rewritten, whatever it is called; lists keep their order,
because ``required``, ``enum`` and ``prefixItems`` are read in it.

    {"parameters": {...}, "name": "b"}, {"name": "a"}   ->   {"name": "a"}, {"name": "b", "parameters": {...}}
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_KEY_ORDER = (
    "type", "function", "name", "strict", "$schema", "$id", "$ref", "title", "description", "parameters", "enum",
    "const", "format", "properties", "required", "items", "additionalProperties", "anyOf", "oneOf", "allOf", "default",
    "examples", "$defs", "definitions",
)  # fmt: skip
"""Keys of tools and schemas in writing order; all others follow alphabetically."""
_PLACES = {key: place for place, key in enumerate(_KEY_ORDER)}
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Their keys are names that somebody chose, so no name is taken for a keyword."""


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The tools in canonical order; equal to the ones given but for the order of tools and keys."""
    ordered: list[dict[str, Any]] = [_canonical(tool, names=False) for tool in tools]
    return tuple(sorted(ordered, key=lambda tool: (_tool_name(tool), canonical_json(tool))))


def canonical_json(value: object) -> str:
    """One line of JSON with sorted keys; equal values give equal text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


def _canonical(value: Any, *, names: bool, depth: int = 0) -> Any:
    if depth > 100:
        return value  # deeper than any schema; order there is the client's
    if isinstance(value, Mapping):
        keys = sorted(value, key=str) if names else sorted(value, key=_place)
        return {
            # A property that is called "properties" is a name, and what it holds is a schema again.
            key: _canonical(value[key], names=not names and key in _NAMED_SCHEMAS, depth=depth + 1)
            if key not in ("default", "const", "examples", "enum") or names
            else value[key]
            for key in keys
        }
    if isinstance(value, list | tuple):
        return [_canonical(item, names=False, depth=depth + 1) for item in value]
    return value


def _place(key: object) -> tuple[int, str]:
    return (_PLACES.get(str(key), len(_PLACES)), str(key))


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
    return name if isinstance(name, str) else ""
