"""Tool calls in generated text: every format, every cut, and what is none stays text."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar import check_schema
from engine.tool_parsers import ToolCall, ToolParser, ToolParserName, choose_tool_parser, tool_parser_class
from engine.tool_parsers.forced import NamedToolParser, RequiredToolParser, named_schema, required_schema

NAMES = ("weather", "clock")
ARGUMENTS = '{"city": "Łódź {]\\"", "days": [1, 2.50]}'
CALL = ToolCall("weather", ARGUMENTS)
CLOCK = ToolCall("clock", "{}")

HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HERMES_CLOCK = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
LLAMA = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
MISTRAL = f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "clock", "arguments": {{}}}}]'

CASES: list[tuple[ToolParserName, str, list[str | ToolCall]]] = [
    ("hermes", HERMES, [CALL]),
    ("hermes", f"Let me look.\n\n{HERMES}\n{HERMES_CLOCK}\n", ["Let me look.", CALL, CLOCK]),
    ("hermes", HERMES.removesuffix("</tool_call>"), [CALL]),
    ("hermes", HERMES.removesuffix("ool_call>"), [CALL]),
    ("hermes", f"{HERMES} Done.", [CALL, " Done."]),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', [CLOCK]),
    ("hermes", '<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>', [CLOCK]),
    ("hermes", "No call <tool here.  ", ["No call <tool here.  "]),
    ("llama3_json", LLAMA, [CALL]),
    ("llama3_json", f"<|python_tag|>{LLAMA}; " + '{"name": "clock", "parameters": {}}', [CALL, CLOCK]),
    ("llama3_json", f"[{LLAMA}]", [CALL]),
    ("llama3_json", f"{LLAMA} Done.", [CALL, " Done."]),
    ("mistral", MISTRAL, [CALL, CLOCK]),
    ("mistral", f"Wait.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]clock{{}}", ["Wait.", CALL, CLOCK]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc123DEF[ARGS]{ARGUMENTS}", [CALL]),
]

TEXTS: list[tuple[ToolParserName, str]] = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}</tool_call> rest'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>weather(city)</tool_call>"),
    ("hermes", '<tool_call>{"name": "weather", "argum'),
    ("hermes", "<tool_call>"),
    ("hermes", '{"name": "clock", "arguments": {}}'),
    ("llama3_json", '{"name": "clock"}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", 'The call is {"name": "clock", "parameters": {}}'),
    ("llama3_json", '{"name": "clock", "parameters": {'),
    ("llama3_json", "<|python_tag|>import os"),
    ("mistral", "[TOOL_CALLS] nothing of the kind"),
    ("mistral", '[TOOL_CALLS] [{"name": "clock"'),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]"),
]


def parse(parser: ToolParser, pieces: list[str]) -> list[str | ToolCall]:
    """All that comes out, neighbouring texts joined."""
    found: list[str | ToolCall] = []
    for piece in [*(parser.feed(text) for text in pieces), parser.finish()]:
        for part in piece:
            if isinstance(part, str) and found and isinstance(found[-1], str):
                found[-1] += part
            else:
                found.append(part)
    return found


def make_parser(name: ToolParserName) -> ToolParser:
    return tool_parser_class(name)(NAMES)


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_and_the_text_around_them(name: ToolParserName, text: str, expected: list[str | ToolCall]) -> None:
    assert parse(make_parser(name), [text]) == expected


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_one_character_at_a_time_gives_the_same(
    name: ToolParserName, text: str, expected: list[str | ToolCall]
) -> None:
    assert parse(make_parser(name), list(text)) == expected


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_what_is_no_call_stays_text(name: ToolParserName, text: str) -> None:
    assert parse(make_parser(name), [text]) == [text]
    assert parse(make_parser(name), list(text)) == [text]


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=8))
def test_the_cuts_between_pieces_change_nothing(
    case: tuple[ToolParserName, str, list[str | ToolCall]], cuts: list[int]
) -> None:
    name, text, expected = case
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert parse(make_parser(name), pieces) == expected


@given(st.sampled_from(["hermes", "llama3_json", "mistral"]), st.data())
def test_arbitrary_text_is_never_lost(name: ToolParserName, data: st.DataObject) -> None:
    parts = st.sampled_from(
        ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "{", "}", '"', "clock", "[", " ", ";"]
    )
    pieces = data.draw(st.lists(parts, max_size=12))
    found = parse(make_parser(name), pieces)
    if not any(isinstance(part, ToolCall) for part in found):
        assert "".join(str(part) for part in found).split() == "".join(pieces).split()


def test_text_is_handed_out_as_it_comes() -> None:
    parser = make_parser("hermes")
    assert parser.feed("Let me see") == ["Let me see"]
    assert parser.feed(" the <b>") == [" the <b>"]
    assert parser.feed("<tool") == []
    assert parser.feed("box>") == ["<toolbox>"]


def test_ids_are_unique_and_of_the_kind_the_template_takes() -> None:
    assert len({make_parser("hermes").make_call_id() for _ in range(100)}) == 100
    call_id = make_parser("mistral").make_call_id()
    assert (len(call_id), call_id.isalnum()) == (9, True)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", "hermes"),
        ("{% if tools %}<tools>{{ tools }}</tools> <tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ('{% if tools %}<|start_header_id|>{"name": x, "parameters": y}{% endif %}', "llama3_json"),
        ("{% if tools %}{{ tools }}{% endif %}", "hermes"),
    ],
)
def test_the_template_tells_the_format(template: str, name: ToolParserName) -> None:
    assert choose_tool_parser(template) == name


CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"type": "string"}}}
TREE = {"type": "object", "properties": {"next": {"$ref": "#"}, "$ref": {"const": "#"}}}


def test_required_calls_keep_the_references_of_each_tool() -> None:
    schema = required_schema([{"name": "weather", "parameters": CITY}, {"name": "clock", "parameters": TREE}])
    check_schema(schema)
    definitions: dict[str, Any] = json.loads(schema)["$defs"]
    assert definitions["tool_0"]["properties"]["city"] == {"$ref": "#/$defs/tool_0/$defs/city"}
    assert definitions["tool_1"]["properties"] == {"next": {"$ref": "#/$defs/tool_1"}, "$ref": {"const": "#"}}


def test_a_function_without_parameters_takes_any_object() -> None:
    assert json.loads(named_schema({"name": "clock"})) == {"type": "object"}
    check_schema(required_schema([{"name": "clock"}], max_calls=1))


def test_required_calls_come_one_by_one() -> None:
    parser = RequiredToolParser(NAMES)
    assert parser.feed(f' [ {{"name": "weather", "parameters": {ARGUMENTS}}}') == [CALL]
    assert parser.feed(', {"name": "clock", "parameters": {}}') == [CLOCK]
    assert parser.feed("]") == []
    assert parser.finish() == []


@pytest.mark.parametrize("text", ['[{"name": "weather", "para', "[]", "no"])
def test_required_calls_that_are_cut_off_stay_text(text: str) -> None:
    assert parse(RequiredToolParser(NAMES), list(text)) == [text]


def test_a_named_call_is_its_arguments() -> None:
    assert parse(NamedToolParser("clock"), ["{", "}", "\n"]) == [CLOCK]
    assert parse(NamedToolParser("clock"), ['{"zone": ']) == ['{"zone": ']
