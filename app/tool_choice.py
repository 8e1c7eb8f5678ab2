"""What a request says of the tools that the model may call, must call, or must not.

``none``      calls are not looked for: what looks like one is text
``auto``      the model calls tools in its own format, or does not
``required``  it calls at least one; a schema leaves it no other choice
a function    it calls that one; the schema is that of its arguments
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.errors import InvalidRequestError
from engine.errors import GrammarError
from engine.grammar import check_schema
from engine.tool_parsers import ToolParser, ToolParserName, tool_parser_class
from engine.tool_parsers.forced import (
    MAX_NUM_FORCED_CALLS,
    NamedToolParser,
    RequiredToolParser,
    named_schema,
    required_schema,
)

MODES = ("none", "auto", "required")
Function = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools of one request, and how it wants them used."""

    mode: str = "none"
    """One of ``MODES``, or ``named``."""
    names: tuple[str, ...] = ()
    """Functions that may be called."""
    max_calls: int | None = None
    """Calls in one answer; ``None`` is any number."""
    json_schema: str | None = field(default=None, repr=False)
    """What the whole output has to follow, where calls are demanded."""

    def make_parser(self, name: ToolParserName) -> ToolParser | None:
        """A parser for one answer of a model that writes calls in the format ``name``; ``None``: all of it is text."""
        if self.mode == "none":
            return None
        if self.mode == "named":
            return NamedToolParser(self.names[0])
        if self.mode == "required":
            return RequiredToolParser(self.names)
        return tool_parser_class(name)(self.names)

    def visible_tokens(self, name: ToolParserName) -> tuple[str, ...]:
        """Control tokens that the parser has to see in the text."""
        return tool_parser_class(name).markers if self.mode == "auto" else ()


NO_TOOLS = ToolChoice()


def read_tool_choice(tools: Sequence[Mapping[str, Any]], choice: Any, *, is_parallel: bool) -> ToolChoice:
    """The choice of a request with these tools. Raises ``InvalidRequestError`` that names the field.

    ``is_parallel``: one answer may hold several calls.
    """
    functions: list[Function] = [tool["function"] for tool in tools]
    mode, names = _mode_of(choice, bool(functions))
    if names is not None:
        functions = [_find(functions, name) for name in names]
    if not functions:
        if mode in ("required", "named"):
            raise _invalid("tool_choice", f"{_told(choice)} needs 'tools', and the request has none")
        return NO_TOOLS
    max_calls = None if is_parallel else 1
    schema = None
    if mode == "named":
        schema = named_schema(functions[0])
    elif mode == "required":
        schema = required_schema(functions, max_calls=max_calls or MAX_NUM_FORCED_CALLS)
    if schema is not None:
        try:
            check_schema(schema)
        except GrammarError as error:
            raise _invalid("tools", str(error), code="unsupported_value") from None
    return ToolChoice(
        mode=mode,
        names=tuple(dict.fromkeys(function["name"] for function in functions)),
        max_calls=max_calls,
        json_schema=schema,
    )


def _mode_of(choice: Any, has_tools: bool) -> tuple[str, tuple[str, ...] | None]:
    """The mode, and the functions that it is limited to."""
    if choice is None:
        return ("auto" if has_tools else "none"), None
    if isinstance(choice, str):
        if choice not in MODES:
            raise _invalid("tool_choice", f"it must be one of {', '.join(MODES)} or name a function, got {choice!r}")
        return choice, None
    kind = choice.get("type")
    if kind == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise _invalid("tool_choice.function.name", "it must be a string", code="invalid_type")
        return "named", (name,)
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools"))
    raise _invalid("tool_choice.type", f"it must be function or allowed_tools, got {kind!r}")


def _allowed(allowed: Any) -> tuple[str, tuple[str, ...]]:
    where = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        raise _invalid(where, "it must be an object with the array 'tools'", code="invalid_type")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise _invalid(f"{where}.mode", f"it must be auto or required, got {mode!r}")
    if not allowed["tools"]:
        raise _invalid(f"{where}.tools", "it must name at least one function; use tool_choice none for no calls")
    names: list[str] = []
    for index, tool in enumerate(allowed["tools"]):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _invalid(f"{where}.tools[{index}].function.name", "it must be a string", code="invalid_type")
        names.append(function["name"])
    return mode, tuple(names)


def _find(functions: Sequence[Function], name: str) -> Function:
    for function in functions:
        if function["name"] == name:
            return function
    known = ", ".join(function["name"] for function in functions) or "none"
    raise _invalid("tool_choice", f"the function {name!r} is not among the tools of the request: {known}")


def _told(choice: Any) -> str:
    return repr(choice) if isinstance(choice, str) else "a function"


def _invalid(where: str, why: str, *, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{where}': {why}.", param=where, code=code)
