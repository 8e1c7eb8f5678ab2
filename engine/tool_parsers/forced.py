"""Calls that the request demands: a schema that the output has to follow, and the parser that reads it.

One named function: the output is its arguments, an object. At least one call of any function: the output is an array of
``{"name": ..., "parameters": {...}}``. As in vLLM, the model's own format plays no part then.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.tool_parsers.base import JsonScanner, ToolCall, ToolParser

MAX_NUM_FORCED_CALLS = 16
"""Longest array: small models repeat a call for ever where nothing stops them."""

_LITERALS = ("const", "enum", "default", "examples")


def named_schema(function: Mapping[str, Any]) -> str:
    """The schema, as JSON, of the arguments of one function."""
    return json.dumps(_parameters(function))


def required_schema(functions: Sequence[Mapping[str, Any]], *, max_calls: int = MAX_NUM_FORCED_CALLS) -> str:
    """The schema, as JSON, of one to ``max_calls`` calls of these functions."""
    calls, definitions = [], {}
    for index, function in enumerate(functions):
        place = f"tool_{index}"
        definitions[place] = _moved(_parameters(function), f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "parameters": {"$ref": f"#/$defs/{place}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = {"anyOf": calls} if len(calls) > 1 else calls[0]
    return json.dumps({"type": "array", "minItems": 1, "maxItems": max_calls, "items": items, "$defs": definitions})


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(function.get("parameters") or {})
    parameters.setdefault("type", "object")
    return parameters


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references to itself as they are where its root has moved to."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: value if name in _LITERALS else _moved(value, root) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


class NamedToolParser(ToolParser):
    """The whole output is the arguments of one function."""

    def __init__(self, name: str) -> None:
        super().__init__([name])
        self._name = name

    def _parse(self) -> Iterable[str | ToolCall]:
        if self._is_at_end:
            text, self._buffer = self._buffer, ""
            yield self._call(self._name, text) or text


class RequiredToolParser(ToolParser):
    """The whole output is an array of calls; each is handed out when it is complete."""

    def __init__(self, tool_names: Iterable[str]) -> None:
        super().__init__(tool_names)
        self._scanner = JsonScanner()

    def _parse(self) -> Iterable[str | ToolCall]:
        while True:
            rest = self._buffer.lstrip()
            if rest[:1] == (",", "[")[self.num_calls == 0]:
                rest = rest[1:].lstrip()
            start = len(self._buffer) - len(rest)
            end = self._scanner.end_of_value(rest) if rest.startswith("{") else None
            calls = None if end is None else self._calls_in(rest[:end], needs_arguments=True)
            if end is None or calls is None:
                break
            yield from calls
            self._buffer = self._buffer[start + end :]
            self._scanner = JsonScanner()
        if self._is_at_end:
            text, self._buffer = self._buffer, ""
            if not self.num_calls or text.strip() != "]":
                yield text
