"""Which tools a request lets the model call, and which it demands."""

import json
from typing import Any

import msgspec
import pytest
from factories_app import make_body, make_tool

from app.completion_request import CompletionRequest, read_completion
from app.errors import InvalidRequestError

TOOLS = [make_tool("weather"), make_tool("clock")]
WEATHER = {"type": "function", "function": {"name": "weather"}}


def read(**fields: Any) -> CompletionRequest:
    return read_completion(msgspec.json.encode(make_body(**{"tools": TOOLS, **fields})))


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", ("weather", "clock")),
        ("auto", "auto", ("weather", "clock")),
        ("none", "none", ("weather", "clock")),
        ("required", "required", ("weather", "clock")),
        (WEATHER, "named", ("weather",)),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}, "auto", ("weather",)),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}},
            "required",
            ("weather",),
        ),
    ],
)
def test_the_choice_and_its_functions(choice: Any, mode: str, names: tuple[str, ...]) -> None:
    found = read(tool_choice=choice)
    assert (found.tool_choice.mode, found.tool_choice.names) == (mode, names)
    assert found.ignored == ()


def test_without_tools_nothing_is_parsed() -> None:
    for choice in (None, "auto", "none"):
        found = read(tools=None, tool_choice=choice).tool_choice
        assert (found.mode, found.make_parser("hermes")) == ("none", None)


def test_a_demanded_call_is_a_schema_for_the_whole_output() -> None:
    assert read().sampling(64).json_schema is None
    assert (
        json.loads(read(tool_choice=WEATHER).sampling(64).json_schema or "")
        == make_tool("weather")["function"]["parameters"]
    )
    schema = json.loads(read(tool_choice="required", parallel_tool_calls=False).sampling(64).json_schema or "")
    assert (schema["minItems"], schema["maxItems"], len(schema["items"]["anyOf"])) == (1, 1, 2)


def test_markers_are_visible_only_where_they_are_looked_for() -> None:
    assert read().tool_choice.visible_tokens("mistral") == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    assert read(tool_choice="required").tool_choice.visible_tokens("mistral") == ()
    assert read(tool_choice="none").tool_choice.visible_tokens("mistral") == ()


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"tool_choice": "any"}, "tool_choice", "must be one of none, auto, required or name a function, got 'any'"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "must be function or allowed_tools, got 'custom'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name", "must be a string"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "maps"}}},
            "tool_choice",
            "'maps' is not among the tools of the request: weather, clock",
        ),
        ({"tool_choice": "required", "tools": None}, "tool_choice", "'required' needs 'tools'"),
        (
            {"tool_choice": WEATHER, "tools": None},
            "tool_choice",
            "'weather' is not among the tools of the request: none",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "an object with the array 'tools'"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
            "tool_choice.allowed_tools.tools",
            "at least one function",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{}]}}},
            "tool_choice.allowed_tools.tools[0].function.name",
            "must be a string",
        ),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "cannot be combined with tool_choice"),
        (
            {"tool_choice": "required", "tools": [make_tool("weather", {"type": "object", "properties": 7})]},
            "tools",
            "schema",
        ),
    ],
)
def test_a_choice_that_cannot_be_kept_names_the_field(fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text) as caught:
        read(**fields)
    assert caught.value.param == param
