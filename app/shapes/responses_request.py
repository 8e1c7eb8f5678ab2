"""A request of OpenAI's Responses API as a chat completion.

Nothing is stored between requests: ``previous_response_id`` and ``conversation`` are refused, and the client sends the
whole input. Fields that a chat completion does not know are passed on as they are.
"""

from collections.abc import Mapping
from typing import Any

from app.shapes.base import Json, expect, joined, refuse, required

_TRANSLATED = frozenset(
    ("input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "reasoning", "include", "store")
)
_STATEFUL = ("previous_response_id", "conversation", "prompt", "background")


def chat_body_of(body: Mapping[str, Any]) -> Json:
    """The chat completion for a request. Raises ``InvalidRequestError`` naming the field."""
    for name in _STATEFUL:
        if body.get(name):
            raise refuse(name, "nothing is stored between requests here; send the whole input")
    chat: Json = {name: value for name, value in body.items() if name not in _TRANSLATED | set(_STATEFUL)}
    messages: list[Json] = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": expect(body["instructions"], str, "instructions")})
    received = required(body, "input", (str, list))
    if isinstance(received, str):
        messages.append({"role": "user", "content": received})
    else:
        for index, item in enumerate(received):
            _add(messages, expect(item, dict, f"input[{index}]"), f"input[{index}]")
    chat["messages"] = messages
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    if body.get("tools"):
        tools = expect(body["tools"], list, "tools")
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise refuse("tool_choice.type", f"only function is available, got {choice.get('type')!r}")
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice is not None:
        chat["tool_choice"] = choice
    form = body.get("text")
    if isinstance(form, dict):
        if isinstance(form.get("format"), dict):
            chat["response_format"] = _response_format(form["format"])
        if form.get("verbosity") is not None:
            chat["verbosity"] = form["verbosity"]
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _response_format(form: Json) -> Json:
    kind = form.get("type")
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _tool(tool: Any, where: str) -> Json:
    expect(tool, dict, where)
    if tool.get("type") != "function":
        raise refuse(f"{where}.type", f"only function is available, got {tool.get('type')!r}")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _add(messages: list[Json], item: Json, where: str) -> None:
    """Adds one item; calls that follow each other are one message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise refuse(f"{where}.role", f"it must be user, assistant, system or developer, got {role!r}")
        messages.append(_message(role, item.get("content"), f"{where}.content"))
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        if isinstance(output, list):
            output = joined([part.get("text") or "" for part in output if isinstance(part, dict)])
        content = expect(output, str, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":
        raise refuse(f"{where}.type", f"items of this kind are not available, got {kind!r}")


def _message(role: str, content: Any, where: str) -> Json:
    if isinstance(content, str):
        return {"role": role, "content": content}
    parts: list[Json] = []
    refusal: str | None = None
    for index, part in enumerate(expect(content, list, where)):
        place = f"{where}[{index}]"
        expect(part, dict, place)
        match part.get("type"):
            case "input_text" | "output_text" | "text":
                parts.append({"type": "text", "text": expect(part.get("text"), str, f"{place}.text")})
            case "refusal":
                refusal = expect(part.get("refusal"), str, f"{place}.refusal")
            case "input_image" if part.get("image_url"):
                image = {"url": part["image_url"]}
                if part.get("detail") is not None:
                    image["detail"] = part["detail"]
                parts.append({"type": "image_url", "image_url": image})
            case kind:
                raise refuse(f"{place}.type", f"content of this kind is not available, got {kind!r}")
    if role == "assistant":
        message: Json = {"role": role, "content": "".join(part.get("text", "") for part in parts) or None}
        return message if refusal is None else {**message, "refusal": refusal}
    only_text = len(parts) == 1 and parts[0]["type"] == "text"
    return {"role": role, "content": parts[0]["text"] if only_text else parts}
