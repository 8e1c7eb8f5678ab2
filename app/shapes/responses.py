"""OpenAI's Responses API: answers and events."""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from app.shapes.base import Json, chunks_of, first_choice, named_event, reasoning_of, usage_counts
from app.shapes.responses_request import chat_body_of

_ECHOED = (
    "instructions",
    "temperature",
    "top_p",
    "max_output_tokens",
    "metadata",
    "tools",
    "tool_choice",
    "text",
    "user",
)
_DEFAULTS: Json = {"metadata": {}, "tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}}


class ResponsesShape:
    """One request of the Responses API."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        """Raises ``InvalidRequestError`` naming the field."""
        self.chat_body = chat_body_of(body)
        self._echoed = {name: body.get(name, _DEFAULTS.get(name)) for name in _ECHOED}
        self._echoed["parallel_tool_calls"] = body.get("parallel_tool_calls", True)

    def whole(self, answer: Json) -> Json:
        """The response, of a chat completion."""
        items = _Items(_suffix(answer))
        choice = first_choice(answer)
        for _ in items.feed(_as_delta(choice["message"])):
            pass
        for _ in items.close():
            pass
        return self._response(answer, items, choice.get("finish_reason"), answer.get("usage"), answer.get("firsttoken"))

    async def events(self, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The stream, of the frames of a chat completion."""
        number = 0
        items = _Items("")
        head: Json | None = None
        finish_reason: str | None = None
        usage: Any = None
        extension: Any = None

        def write(kind: str, **fields: Any) -> bytes:
            nonlocal number
            event = named_event(kind, {"type": kind, "sequence_number": number, **fields})
            number += 1
            return event

        async with aclosing(frames):
            async for chunk in chunks_of(frames):
                if "error" in chunk:
                    error = chunk["error"]
                    yield write("error", code=error.get("code"), message=error.get("message"), param=error.get("param"))
                    return
                if head is None:
                    head = chunk
                    items = _Items(_suffix(chunk))
                    started = self._response(chunk, items, None, None, None)
                    yield write("response.created", response=started)
                    yield write("response.in_progress", response=started)
                usage = chunk.get("usage") or usage
                extension = chunk.get("firsttoken") or extension
                choice = first_choice(chunk)
                finish_reason = choice.get("finish_reason") or finish_reason
                for kind, fields in items.feed(choice.get("delta") or {}):
                    yield write(kind, **fields)
        for kind, fields in items.close():
            yield write(kind, **fields)
        response = self._response(head or {}, items, finish_reason, usage, extension)
        yield write(f"response.{response['status']}", response=response)

    def _response(self, answer: Json, items: "_Items", reason: str | None, usage: Any, extension: Any) -> Json:
        status = "in_progress" if reason is None else "completed"
        details = None
        if reason in ("length", "content_filter"):
            status = "incomplete"
            details = {"reason": "max_output_tokens" if reason == "length" else "content_filter"}
        response = {
            "id": f"resp_{_suffix(answer)}",
            "object": "response",
            "created_at": answer.get("created") or int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": details,
            "model": answer.get("model"),
            "output": list(items.done),
            "previous_response_id": None,
            "store": False,
            "usage": None if usage is None else _usage(usage),
            **self._echoed,
        }
        return response if extension is None else {**response, "firsttoken": extension}


class _Items:
    """The output items of a response, one open at a time, and the events that tell them."""

    def __init__(self, suffix: str) -> None:
        self.done: list[Json] = []
        self._suffix = suffix
        self._key: tuple[str, int] | None = None
        self._item: Json = {}
        self._text: list[str] = []

    def feed(self, delta: Json) -> list[tuple[str, Json]]:
        """The events of one delta."""
        events: list[tuple[str, Json]] = []
        if thought := reasoning_of(delta):
            events += self._begin(("reasoning", 0), {"type": "reasoning", "summary": [], "content": []})
            self._text.append(thought)
            events.append(("response.reasoning_text.delta", {**self._place, "content_index": 0, "delta": thought}))
        for kind, text in (("output_text", delta.get("content")), ("refusal", delta.get("refusal"))):
            if text:
                events += self._begin((kind, 0), {"type": "message", "role": "assistant", "content": []})
                self._text.append(text)
                fields = {**self._place, "content_index": 0, "delta": text}
                events.append((f"response.{kind}.delta", fields | ({"logprobs": []} if kind == "output_text" else {})))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            start = {"type": "function_call", "call_id": call.get("id"), "name": function.get("name"), "arguments": ""}
            events += self._begin(("function_call", call.get("index", 0)), start)
            if arguments := function.get("arguments"):
                self._text.append(arguments)
                events.append(("response.function_call_arguments.delta", {**self._place, "delta": arguments}))
        return events

    def close(self) -> list[tuple[str, Json]]:
        """The end of the open item."""
        if self._key is None:
            return []
        kind, text = self._key[0], "".join(self._text)
        events: list[tuple[str, Json]] = []
        if kind == "function_call":
            self._item["arguments"] = text
            done = {**self._place, "arguments": text, "name": self._item["name"]}
            events.append(("response.function_call_arguments.done", done))
        elif kind == "reasoning":
            self._item["content"] = [{"type": "reasoning_text", "text": text}]
            events.append(("response.reasoning_text.done", {**self._place, "content_index": 0, "text": text}))
        else:
            part = _part(kind, text)
            self._item["content"] = [part]
            name = "text" if kind == "output_text" else "refusal"
            fields = {**self._place, "content_index": 0, name: text} | ({"logprobs": []} if name == "text" else {})
            events.append((f"response.{kind}.done", fields))
            events.append(("response.content_part.done", {**self._place, "content_index": 0, "part": part}))
        self._item["status"] = "completed"
        events.append(("response.output_item.done", {"output_index": len(self.done), "item": self._item}))
        self.done.append(self._item)
        self._key, self._item, self._text = None, {}, []
        return events

    @property
    def _place(self) -> Json:
        return {"item_id": self._item["id"], "output_index": len(self.done)}

    def _begin(self, key: tuple[str, int], item: Json) -> list[tuple[str, Json]]:
        if self._key == key:
            return []
        events = self.close()
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}[item["type"]]
        self._key = key
        self._item = {"id": f"{prefix}_{self._suffix}_{len(self.done)}", "status": "in_progress", **item}
        events.append(("response.output_item.added", {"output_index": len(self.done), "item": dict(self._item)}))
        if item["type"] == "message":
            part = _part(key[0], "")
            events.append(("response.content_part.added", {**self._place, "content_index": 0, "part": part}))
        return events


def _part(kind: str, text: str) -> Json:
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _as_delta(message: Json) -> Json:
    """A whole message as one delta: calls get their places."""
    calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
    return {**message, "tool_calls": calls}


def _suffix(answer: Json) -> str:
    return str(answer.get("id", "")).removeprefix("chatcmpl-")


def _usage(usage: Json) -> Json:
    prompt_tokens, cached_tokens, output_tokens = usage_counts(usage)
    details = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens") or 0},
        "total_tokens": prompt_tokens + output_tokens,
    }
