"""Anthropic's Messages API: answers, events and errors."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from app.errors import ErrorAnswer
from app.shapes.anthropic_request import chat_body_of
from app.shapes.base import Json, chunks_of, first_choice, json_object, named_event, reasoning_of, usage_counts

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesShape:
    """One request of the Messages API."""

    def __init__(self, body: Mapping[str, Any], *, prompt_tokens: int = 0) -> None:
        """Raises ``InvalidRequestError`` naming the field."""
        self.chat_body = chat_body_of(body)
        self.prompt_tokens = prompt_tokens
        """As counted before the answer; the stream begins with it."""

    def whole(self, answer: Json) -> Json:
        """The message, of a chat completion."""
        choice = first_choice(answer)
        message = choice["message"]
        content: list[Json] = []
        if thought := reasoning_of(message):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if text := message.get("content") or message.get("refusal"):
            content.append({"type": "text", "text": text})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            content.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": json_object(function["arguments"]),
                }
            )
        return {
            **_head(answer),
            "content": content,
            "stop_reason": _stop_reason(choice),
            "stop_sequence": _stop_sequence(choice),
            "usage": _usage(answer.get("usage")),
            "firsttoken": answer.get("firsttoken"),
        }

    async def events(self, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The stream, of the frames of a chat completion."""
        blocks = _Blocks()
        last: Json = {}
        usage: Any = None
        extension: Any = None
        has_begun = False
        async with aclosing(frames):
            async for chunk in chunks_of(frames):
                if "error" in chunk:
                    yield named_event(
                        "error", {"type": "error", "error": {"type": "api_error", "message": chunk["error"]["message"]}}
                    )
                    return
                if not has_begun:
                    has_begun = True
                    start = {**_head(chunk), "content": [], "stop_reason": None, "stop_sequence": None}
                    start["usage"] = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
                    yield named_event("message_start", {"type": "message_start", "message": start})
                usage = chunk.get("usage") or usage
                extension = chunk.get("firsttoken") or extension
                choice = first_choice(chunk)
                if choice.get("finish_reason") is not None:
                    last = choice
                for event in blocks.feed(choice.get("delta") or {}):
                    yield event
        for event in blocks.close():
            yield event
        delta = {"stop_reason": _stop_reason(last), "stop_sequence": _stop_sequence(last)}
        end: Json = {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        if extension is not None:
            end["firsttoken"] = extension
        yield named_event("message_delta", end)
        yield named_event("message_stop", {"type": "message_stop"})


class _Blocks:
    """The content blocks of a stream: text, thoughts and calls, one open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: tuple[str, int] | None = None

    def feed(self, delta: Json) -> list[bytes]:
        """The events of one delta."""
        events: list[bytes] = []
        if thought := reasoning_of(delta):
            events += self._begin(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": thought}))
        if text := delta.get("content") or delta.get("refusal"):
            events += self._begin(("text", 0), {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": text}))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            start = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
            events += self._begin(("tool_use", call.get("index", 0)), start)
            if arguments := function.get("arguments"):
                events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def close(self) -> list[bytes]:
        """The end of the open block."""
        if self._open is None:
            return []
        self._open = None
        return [named_event("content_block_stop", {"type": "content_block_stop", "index": self._index})]

    def _begin(self, key: tuple[str, int], block: Json) -> list[bytes]:
        if self._open == key:
            return []
        events = self.close()
        self._open = key
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*events, named_event("content_block_start", start)]

    def _delta(self, delta: Json) -> bytes:
        return named_event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})


def error_body(answer: ErrorAnswer) -> bytes:
    """An error in Anthropic's shape."""
    kind = _ERROR_TYPES.get(answer.status, "invalid_request_error" if answer.status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": answer.message}})


def _head(answer: Json) -> Json:
    identity = f"msg_{str(answer.get('id', '')).removeprefix('chatcmpl-')}"
    return {"id": identity, "type": "message", "role": "assistant", "model": answer.get("model")}


def _stop_reason(choice: Json) -> str:
    if _stop_sequence(choice) is not None:
        return "stop_sequence"
    return _STOP_REASONS.get(choice.get("finish_reason") or "stop", "end_turn")


def _stop_sequence(choice: Json) -> str | None:
    """The text that ended the answer, where the engine tells it as vLLM does."""
    reason = choice.get("stop_reason")
    return reason if isinstance(reason, str) else None


def _usage(usage: Json | None) -> Json:
    prompt_tokens, cached_tokens, output_tokens = usage_counts(usage)
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
