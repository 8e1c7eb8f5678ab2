"""Calls of tools in the embedded engine's answers, in every shape, through the official clients."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest
from factories_app import ACME_KEY, EchoBackend, make_app, make_model_info, make_tool, served
from openai.types.chat import ChatCompletionMessageParam

from engine.tool_parsers import ToolParserName

TOOLS: Any = [make_tool("weather"), make_tool("clock")]
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is the weather in Łódź?"}]
ARGUMENTS = '{"city": "Łódź \\u00e9"}'
TWO_CALLS = (
    f'Let me look. <tool_call> {{"name": "weather", "arguments": {ARGUMENTS}}} </tool_call> '
    '<tool_call> {"name": "clock", "arguments": {}} </tool_call>'
)
EXPECTED = [("weather", ARGUMENTS), ("clock", "{}")]


@contextmanager
def gateway(reply: str, parser: ToolParserName = "hermes") -> Iterator[tuple[str, EchoBackend]]:
    backend = EchoBackend(reply=reply, info=make_model_info(tool_call_parser=parser))
    with served(make_app(backend=backend)) as url:
        yield url, backend


def ask(url: str, **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=ACME_KEY, max_retries=0, timeout=20) as client:
        fields = {"model": "default", "messages": QUESTION, "tools": TOOLS, **fields}
        answer = client.chat.completions.create(**fields)
        return list(answer) if fields.get("stream") else answer


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def test_parallel_calls_behind_text() -> None:
    with gateway(TWO_CALLS) as (url, _):
        choice = ask(url).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    assert calls_of(choice.message) == EXPECTED
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("call_") for call_id in ids)


def test_an_answer_of_nothing_but_calls_has_null_content() -> None:
    with gateway(TWO_CALLS.removeprefix("Let me look. ")) as (url, _):
        message = ask(url).choices[0].message
    assert message.content is None
    assert calls_of(message) == EXPECTED


def test_a_stream_tells_the_same_calls() -> None:
    with gateway(TWO_CALLS) as (url, _):
        chunks = ask(url, stream=True, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Let me look."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.type, call.function.name, call.function.arguments) for call in calls] == [
        (index, "function", *expected) for index, expected in enumerate(EXPECTED)
    ]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(TWO_CALLS.split(" "))


def test_the_helper_that_gathers_a_stream_has_the_calls() -> None:
    with gateway(TWO_CALLS) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=ACME_KEY, max_retries=0, timeout=20)
        with client.chat.completions.stream(model="default", messages=QUESTION, tools=TOOLS) as stream:
            final = stream.get_final_completion()
    assert calls_of(final.choices[0].message) == EXPECTED


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_calls_may_be_refused(stream: bool) -> None:
    with gateway(TWO_CALLS) as (url, _):
        answer = ask(url, parallel_tool_calls=False, stream=stream)
    if stream:
        found = [call.function.name for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
    else:
        found = [name for name, _ in calls_of(answer.choices[0].message)]
    assert found == ["weather"]


@pytest.mark.parametrize(
    "reply",
    [
        'Sure. <tool_call> {"name": "weather", "arguments": {"city" </tool_call>',
        '<tool_call> {"name": "rm", "arguments": {}} </tool_call>',
        '<tool_call> {"name": "weather",',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_stays_content(reply: str, stream: bool) -> None:
    with gateway(reply) as (url, _):
        answer = ask(url, stream=stream)
    if stream:
        content = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        reason = answer[-1].choices[0].finish_reason
    else:
        content, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.choices[0].message.tool_calls is None
    assert (content, reason) == (reply, "stop")


def test_none_leaves_the_text_as_it_is() -> None:
    with gateway(TWO_CALLS) as (url, _):
        choice = ask(url, tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (TWO_CALLS, None, "stop")


def test_a_call_that_is_cut_off_is_told_as_cut_off() -> None:
    with gateway(TWO_CALLS) as (url, _):
        choice = ask(url, max_tokens=6).choices[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")


def test_every_choice_has_its_own_calls() -> None:
    with gateway(TWO_CALLS) as (url, _):
        choices = ask(url, n=2).choices
    assert [calls_of(choice.message) for choice in choices] == [EXPECTED, EXPECTED]
    assert len({call.id for choice in choices for call in choice.message.tool_calls}) == 4


def test_log_probabilities_of_held_text_are_not_lost() -> None:
    with gateway(TWO_CALLS) as (url, _):
        told = ask(url, logprobs=True).choices[0].logprobs.content
        chunks = ask(url, logprobs=True, stream=True)
    parts = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert "".join(token.token for token in told) == TWO_CALLS
    assert "".join(token.token for part in parts for token in part) == TWO_CALLS


@pytest.mark.parametrize(
    ("parser", "reply"),
    [
        ("llama3_json", f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "clock", "parameters": {{}}}}'),
        (
            "mistral",
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "clock", "arguments": {{}}}}]',
        ),
        ("mistral", f"[TOOL_CALLS]weather[ARGS] {ARGUMENTS} [TOOL_CALLS]clock[ARGS]{{}}"),
    ],
)
def test_other_formats(parser: ToolParserName, reply: str) -> None:
    with gateway(reply, parser) as (url, backend):
        choice = ask(url).choices[0]
        assert calls_of(choice.message) == EXPECTED
        assert backend.requests[0].sampling.visible_tokens
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    if parser == "mistral":
        assert all(len(call.id) == 9 and call.id.isalnum() for call in choice.message.tool_calls)


def test_a_demanded_function_is_called_with_the_output_as_arguments() -> None:
    with gateway(ARGUMENTS) as (url, backend):
        choice = ask(url, tool_choice={"type": "function", "function": {"name": "weather"}}).choices[0]
        assert backend.requests[0].sampling.json_schema is not None
    assert (calls_of(choice.message), choice.finish_reason) == ([("weather", ARGUMENTS)], "tool_calls")


def test_demanded_calls_are_read_from_the_array() -> None:
    reply = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}, {{"name": "clock", "parameters": {{}}}}]'
    with gateway(reply) as (url, _):
        choice = ask(url, tool_choice="required").choices[0]
    assert (calls_of(choice.message), choice.message.content) == (EXPECTED, None)


def test_a_demand_without_tools_is_the_callers_mistake() -> None:
    with gateway("") as (url, _), pytest.raises(openai.BadRequestError, match="needs 'tools'") as caught:
        ask(url, tools=openai.NOT_GIVEN, tool_choice="required")
    assert caught.value.param == "tool_choice"


def test_results_go_back_beside_their_calls() -> None:
    with gateway(TWO_CALLS) as (url, backend):
        message = ask(url).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
        ask(url, messages=[*QUESTION, message.model_dump(exclude_none=True), *results])
        sent = backend.requests[-1].messages
    assert [entry["role"] for entry in sent] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in sent[1]["tool_calls"]] == [entry["tool_call_id"] for entry in sent[2:]]


MESSAGES_TOOLS: Any = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
]


def ask_message(url: str, **fields: Any) -> Any:
    client = anthropic.Anthropic(base_url=url, api_key=ACME_KEY, max_retries=0, timeout=20)
    fields = {"model": "default", "max_tokens": 64, "messages": QUESTION, "tools": MESSAGES_TOOLS, **fields}
    if fields.pop("stream", False):
        with client.messages.stream(**fields) as stream:
            return stream.get_final_message()
    return client.messages.create(**fields)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_have_blocks_of_tool_use(stream: bool) -> None:
    with gateway(TWO_CALLS) as (url, _):
        message = ask_message(url, stream=stream)
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.content[0].text == "Let me look."
    assert [(block.name, block.input) for block in message.content[1:]] == [
        ("weather", {"city": "Łódź é"}),
        ("clock", {}),
    ]
    assert message.stop_reason == "tool_use"


def test_messages_may_demand_one_tool() -> None:
    with gateway(ARGUMENTS) as (url, backend):
        message = ask_message(url, tool_choice={"type": "tool", "name": "weather"})
        assert backend.requests[0].sampling.json_schema is not None
    assert [(block.type, block.name, block.input) for block in message.content] == [
        ("tool_use", "weather", {"city": "Łódź é"})
    ]


def test_messages_take_results_back() -> None:
    with gateway(TWO_CALLS) as (url, backend):
        message = ask_message(url)
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "7"} for block in message.content[1:]]
        ask_message(
            url,
            messages=[
                *QUESTION,
                {"role": "assistant", "content": [block.model_dump() for block in message.content]},
                {"role": "user", "content": results},
            ],
        )
        sent = backend.requests[-1].messages
    assert [entry["role"] for entry in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["tool_calls"][0]["function"]["name"] == "weather"


RESPONSES_TOOLS: Any = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_items_of_calls(stream: bool) -> None:
    with gateway(TWO_CALLS) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=ACME_KEY, max_retries=0, timeout=20)
        fields: Any = {"model": "default", "input": "How is the weather?", "tools": RESPONSES_TOOLS}
        if stream:
            with client.responses.stream(**fields) as events:
                response: Any = events.get_final_response()
        else:
            response = client.responses.create(**fields)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert [(item.name, item.arguments) for item in response.output[1:]] == EXPECTED
    assert all(item.call_id.startswith("call_") for item in response.output[1:])
    assert response.status == "completed"


def test_a_call_is_no_longer_among_the_ignored_fields() -> None:
    with gateway(ARGUMENTS) as (url, _):
        answer = ask(url, tool_choice={"type": "function", "function": {"name": "weather"}}, parallel_tool_calls=True)
    assert answer.model_extra["firsttoken"]["ignored_fields"] == []
