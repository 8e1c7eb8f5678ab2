"""A request of Anthropic's Messages API as a chat completion.

Text documents and search results of the last message become ``documents``, so they are reduced like those of any
request; elsewhere they are text. Fields that a chat completion does not know are passed on as they are.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from app.shapes.base import Json, expect, joined, refuse, required

_TRANSLATED = frozenset(("system", "messages", "tools", "tool_choice", "stop_sequences", "max_tokens", "metadata"))
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body_of(body: Mapping[str, Any], *, needs_max_tokens: bool = True) -> Json:
    """The chat completion for a request. Raises ``InvalidRequestError`` naming the field."""
    chat: Json = {name: value for name, value in body.items() if name not in _TRANSLATED}
    messages: list[Json] = []
    if (system := body.get("system")) is not None:
        messages.append({"role": "system", "content": _system_text(system)})
    received = required(body, "messages", list)
    documents: list[Json] = []
    for index, message in enumerate(received):
        where = f"messages[{index}]"
        expect(message, dict, where)
        is_last = index == len(received) - 1
        messages += _messages_of(message, where, documents if is_last else None)
    chat["messages"] = messages
    if documents:
        chat["documents"] = [*(chat.get("documents") or ()), *documents]
    if needs_max_tokens:
        chat["max_tokens"] = required(body, "max_tokens", int)
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    user = (body.get("metadata") or {}).get("user_id") if isinstance(body.get("metadata"), dict) else None
    if user is not None:
        chat["user"] = user
    if body.get("tools"):
        chat["tools"] = [
            _tool(tool, f"tools[{index}]") for index, tool in enumerate(expect(body["tools"], list, "tools"))
        ]
    if (choice := body.get("tool_choice")) is not None:
        expect(choice, dict, "tool_choice")
        kind = choice.get("type")
        if kind == "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        elif kind in _TOOL_CHOICES:
            chat["tool_choice"] = _TOOL_CHOICES[kind]
        else:
            raise refuse("tool_choice.type", f"it must be auto, any, tool or none, got {kind!r}")
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _system_text(system: Any) -> str:
    if isinstance(system, str):
        return system
    blocks = expect(system, list, "system")
    return joined([_text(block, f"system[{index}]") for index, block in enumerate(blocks)])


def _text(block: Any, where: str) -> str:
    expect(block, dict, where)
    if block.get("type") != "text":
        raise refuse(f"{where}.type", f"only text is understood here, got {block.get('type')!r}")
    text: str = expect(block.get("text"), str, f"{where}.text")
    return text


def _tool(tool: Any, where: str) -> Json:
    expect(tool, dict, where)
    if tool.get("type") not in (None, "custom"):
        raise refuse(f"{where}.type", f"tools that run at the provider are not available, got {tool['type']!r}")
    function = {"name": expect(tool.get("name"), str, f"{where}.name")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _messages_of(message: Json, where: str, documents: list[Json] | None) -> list[Json]:
    """One message becomes several where it brings results of tools; these stand first."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise refuse(f"{where}.role", f"it must be user or assistant, got {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks: list[Any] = expect(content, list, f"{where}.content")
    results: list[Json] = []
    parts: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        expect(block, dict, place)
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": expect(block.get("text"), str, f"{place}.text")})
            case "image":
                parts.append(_image(block, place))
            case "document" | "search_result" if documents is not None and (found := _document(block, documents)):
                documents.append(found)
            case "document" | "search_result" if (found := _document(block, ())) is not None:
                parts.append({"type": "text", "text": joined([found.get("title") or "", found["text"]])})
            case "tool_use" if role == "assistant":
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                function = {"name": expect(block.get("name"), str, f"{place}.name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result" if role == "user":
                results.append(_tool_result(block, place))
            case "thinking" if role == "assistant":
                thoughts.append(block.get("thinking") or "")
            case "redacted_thinking" if role == "assistant":
                pass
            case kind:
                raise refuse(
                    f"{place}.type", f"content of this kind is not available in a {role} message, got {kind!r}"
                )
    found_messages = results
    if role == "assistant":
        text = "".join(part.get("text", "") for part in parts)
        own: Json = {"role": "assistant", "content": text or None}
        if thoughts:
            own["reasoning_content"] = joined(thoughts)
        if calls:
            own["tool_calls"] = calls
        return [own]
    if parts or not results:
        only_text = len(parts) == 1 and parts[0]["type"] == "text"
        found_messages.append({"role": "user", "content": parts[0]["text"] if only_text else parts})
    return found_messages


def _image(block: Json, where: str) -> Json:
    source = expect(block.get("source"), dict, f"{where}.source")
    if source.get("type") == "url":
        url = source.get("url")
    elif source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    else:
        raise refuse(f"{where}.source.type", f"it must be base64 or url, got {source.get('type')!r}")
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Json, before: Any) -> Json | None:
    """A block's document, where its text is in the request."""
    source = block.get("source")
    texts: list[Any] = []
    if block.get("type") == "search_result":
        texts = [part.get("text") for part in block.get("content") or () if isinstance(part, dict)]
    elif isinstance(source, dict) and source.get("type") == "text":
        texts = [source.get("data")]
    elif isinstance(source, dict) and source.get("type") == "content":
        inner = source.get("content")
        texts = (
            [inner] if isinstance(inner, str) else [part.get("text") for part in inner or () if isinstance(part, dict)]
        )
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    document: Json = {"id": f"block-{len(before) + 1}", "text": joined(texts)}
    if isinstance(block.get("title"), str):
        document["title"] = block["title"]
    if isinstance(source, str):
        document["source"] = source
    return document


def _tool_result(block: Json, where: str) -> Json:
    content = block.get("content")
    if isinstance(content, list):
        texts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) == len(content):
            content = joined([_text(part, f"{where}.content") for part in texts])
        else:
            content = [
                _image(part, f"{where}.content")
                if part.get("type") == "image"
                else {"type": "text", "text": _text(part, where)}
                for part in (expect(part, dict, f"{where}.content") for part in content)
            ]
    identity = expect(block.get("tool_use_id"), str, f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": identity, "content": content if content is not None else ""}
