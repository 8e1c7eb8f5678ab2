"""Canonical tools: one order of bytes, the same meaning."""

import copy
import itertools
import json
from typing import Any

from factories_reducer import make_parts, make_passages, reduce_parts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reducer.canonical import canonical_json, canonical_tools
from reducer.config import ReducerConfig, TemplateConfig


def make_tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": {"type": "object", **parameters}},
    }


SCHEMA: dict[str, Any] = {
    "properties": {
        "title": {"type": "string", "default": "x"},
        "description": {"type": "string", "title": "What"},
        "default": {"enum": ["b", "a"], "default": {"z": 1, "a": 2}},
        "properties": {"type": "object", "properties": {"required": {"type": "array", "items": {"type": "number"}}}},
        "big": {"const": 12345678901234567890, "default": 1e-7},
        "ünï": {"type": "string", "default": "\u2028 \ud83d\ude00"},
    },
    "required": ["title", "default", "big"],
}


def shuffle_keys(value: Any, seed: int) -> Any:
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: hash((key, seed)))
        return {key: shuffle_keys(value[key], seed) for key in keys}
    if isinstance(value, list):
        return [shuffle_keys(item, seed) for item in value]
    return value


def test_six_tools_in_any_order_give_one_prefix() -> None:
    tools = [make_tool(name, **SCHEMA) for name in ("search", "add", "list", "zip", "delete", "move")]
    rendered = {
        json.dumps(canonical_tools(order)) for order in itertools.islice(itertools.permutations(tools), 0, 720, 37)
    }
    assert len(rendered) == 1
    assert [tool["function"]["name"] for tool in canonical_tools(tools)] == [
        "add",
        "delete",
        "list",
        "move",
        "search",
        "zip",
    ]


def test_key_order_does_not_matter_and_values_do_not_change() -> None:
    tool = make_tool("f", **SCHEMA)
    rendered = {json.dumps(canonical_tools([shuffle_keys(tool, seed)])) for seed in range(20)}
    # The value of ``default`` is data, whose order is the client's; all else is one.
    assert {json.dumps(json.loads(text), sort_keys=True) for text in rendered} == {json.dumps([tool], sort_keys=True)}
    (canonical,) = canonical_tools([tool])
    assert canonical == tool
    assert canonical["function"]["parameters"]["required"] == ["title", "default", "big"]
    assert canonical["function"]["parameters"]["properties"]["default"]["enum"] == ["b", "a"]


def test_property_names_are_never_taken_for_keywords() -> None:
    (canonical,) = canonical_tools([make_tool("f", **SCHEMA)])
    assert list(canonical["function"]["parameters"]["properties"]) == sorted(SCHEMA["properties"])
    assert set(canonical["function"]["parameters"]["properties"]["description"]) == {"type", "title"}


def test_usual_order_of_keys_stays_as_people_write_it() -> None:
    tool = make_tool("f", properties={"a": {"type": "string", "description": "A"}}, required=["a"])
    assert json.dumps(canonical_tools([tool])[0]) == json.dumps(tool)


def test_the_tools_given_are_not_touched() -> None:
    tools = [make_tool("b", **SCHEMA), make_tool("a")]
    before = copy.deepcopy(tools)
    canonical_tools(tools)
    assert json.dumps(tools) == json.dumps(before)


def test_odd_tools_pass() -> None:
    odd: list[Any] = [{}, {"function": None}, {"name": 7}, {"type": "web_search"}, {"name": "b"}]
    assert sorted(map(canonical_json, canonical_tools(odd))) == sorted(map(canonical_json, odd))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["properties", "default", "title", "type", "a", "items", "$defs"]), inner, max_size=4
        )
    ),
    max_leaves=15,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(st.sampled_from(["function", "name", "type", "x"]), JSON, max_size=3), max_size=4))
def test_every_tool_stays_equal_and_canonical_again_is_the_same(tools: list[dict[str, Any]]) -> None:
    canonical = canonical_tools(tools)
    assert sorted(map(canonical_json, canonical)) == sorted(map(canonical_json, tools))
    assert json.dumps(canonical_tools(canonical)) == json.dumps(canonical)


def test_result_carries_canonical_tools_unless_switched_off() -> None:
    tools = [make_tool("b", **SCHEMA), make_tool("a")]
    parts = make_parts(passages=make_passages("The part failed."), tools=tools)
    assert [tool["function"]["name"] for tool in reduce_parts(parts).tools] == ["a", "b"]
    off = ReducerConfig(min_prompt_tokens=0, template=TemplateConfig(canonical_tools=False))
    assert json.dumps(reduce_parts(parts, config=off).tools) == json.dumps(tools)
    assert json.dumps(reduce_parts(parts, bypass=True).tools) == json.dumps(tools)
