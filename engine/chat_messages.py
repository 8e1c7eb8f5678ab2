"""Brings OpenAI chat messages and tools into the shape chat templates expect, and says what is wrong with them.

Templates see: a known ``role``; ``content`` as a string; ``tool_calls`` whose ``arguments`` are an object where they
parse as one. For a template that does not know tools, ``describe_tools`` writes them as text in the form that Hermes
models were trained on and most instruction models follow:

- the first system message ends with the tools inside ``<tools></tools>`` and how to call one;
- a call in an assistant message is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` after its text;
- results are a user message of ``<tool_response>...</tool_response>``, neighbouring ones in one message.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KEPT_FIELDS = ("name", "tool_call_id", "reasoning_content")

_TOOLS_PREAMBLE = """# Tools

You may call one or more functions to help with the answer. Their signatures are inside <tools></tools>, one a line:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as JSON inside <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fresh messages with string contents and checked roles. Raises ValueError naming the message and the field."""
    if not messages:
        raise ValueError("messages is empty")
    return [_normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]


def normalise_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fresh copies of the tools. Raises ValueError for one that is no object with a named function."""
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{index}].function.name must be a string")
    return [_copy(tool) for tool in tools]


def describe_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with tools, calls and results as text, for templates that know none of them."""
    described: list[dict[str, Any]] = []
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        preamble = _TOOLS_PREAMBLE.format(tools=lines)
        if messages[0]["role"] in ("system", "developer"):
            first = messages[0]
            content = f"{first['content']}\n\n{preamble}" if first["content"] else preamble
            messages = [first | {"content": content}, *messages[1:]]
        else:
            described.append({"role": "system", "content": preamble})
    is_result_open = False
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if is_result_open:
                described[-1]["content"] += f"\n{result}"
            else:
                described.append({"role": "user", "content": result})
            is_result_open = True
            continue
        is_result_open = False
        calls = message.get("tool_calls")
        if calls:
            texts = [message["content"]] if message["content"] else []
            texts += [_describe_call(call["function"]) for call in calls]
            message = {"role": message["role"], "content": "\n".join(texts)}
        described.append(message)
    return described


def _describe_call(function: Mapping[str, Any]) -> str:
    call = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _normalise(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be an object, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        got = "nothing" if role is None else repr(role)
        raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}, got {got}")
    normal: dict[str, Any] = {
        "role": "tool" if role == "function" else role,
        "content": _content_text(message.get("content"), f"{where}.content"),
    }
    for field in _KEPT_FIELDS:
        if isinstance(message.get(field), str):
            normal[field] = message[field]
    if role == "assistant":
        if isinstance(message.get("reasoning"), str):  # the other name clients send back
            normal.setdefault("reasoning_content", message["reasoning"])
        if not normal["content"] and isinstance(message.get("refusal"), str):
            normal["content"] = message["refusal"]
        calls = message.get("tool_calls")
        if not calls and isinstance(message.get("function_call"), Mapping):
            calls = [{"type": "function", "function": message["function_call"]}]
        if calls:
            normal["tool_calls"] = _normalise_calls(calls, f"{where}.tool_calls")
    return normal


def _content_text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(f"{where} must be a string, null or a list of parts, got {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise ValueError(f"{where}[{index}] must be an object, got {type(part).__name__}")
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise ValueError(f"{where}[{index}] is of type {kind!r}; this model reads text only")
        text = part.get(kind)
        if not isinstance(text, str):
            raise ValueError(f"{where}[{index}].{kind} must be a string")
        texts.append(text)
    return "\n".join(texts)


def _normalise_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where} must be a list, got {type(calls).__name__}")
    normal = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}[{index}].function.name must be a string")
        arguments = _parsed_arguments(function.get("arguments"), f"{where}[{index}].function.arguments")
        copy = {key: _copy(value) for key, value in call.items() if key != "function"}
        normal.append({"type": "function", **copy, "function": {"name": function["name"], "arguments": arguments}})
    return normal


def _parsed_arguments(arguments: Any, where: str) -> Any:
    """Templates print ``arguments`` as JSON, so a string that is an object already would be quoted twice."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return _copy(arguments)
    if not isinstance(arguments, str):
        raise ValueError(f"{where} must be a string of JSON, got {type(arguments).__name__}")
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _copy(value: Any) -> Any:
    """A deep copy of JSON in plain dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value
