"""A faithful OpenAI-compatible server in a process of its own, for tests: vLLM's fields, chunks and errors.

    python tests/upstream_server.py        prints its port, answers until its standard input ends

It counts prompts with o200k_base, caches prefixes by ``cache_salt``, and notices clients that leave. How it answers is
set for one request by the field ``x_behaviour`` in its body (it arrives only if unknown fields do), or for all further
ones by ``POST /control``; ``GET /log`` tells what came in, byte by byte, and what was cancelled.

    reply         text of the answer, one chunk a word           tool_calls   [[name, arguments, ...], ...]
    pieces        a list of strings: one delta each, exactly     reasoning    text before the answer
    status        answer with this status, headers, body         times        for so many requests only
    die_after     close the connection after so many events      error_after  send an error frame then
    hang_after    send nothing more after so many events; -1: not even a status line
    write_size    bytes of one write, each in a packet of its own
    delay_s       pause before each event                        end          "none": no [DONE] and no finish_reason
    usage         "with_finish": in the last chunk with a choice; "none": never
    newline       line end of the stream
"""

import asyncio
import base64
import contextlib
import json
import sys
import time
from typing import Any

from bpe_openai import get_encoding

ENCODING = get_encoding("o200k_base")
MODEL = "upstream-model"
WINDOW = 32768
BLOCK = 16


class Server:
    """Everything that the server remembers."""

    def __init__(self) -> None:
        self.control: dict[str, Any] = {}
        self.log: list[dict[str, Any]] = []
        self.prefixes: dict[str, list[list[int]]] = {}
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, as many requests as come."""
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while (line := await reader.readline()).strip():
                method, path, _ = line.decode().split(" ", 2)
                headers: dict[str, str] = {}
                while line := (await reader.readline()).strip():
                    name, _, value = line.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if not await self.answer(method, path, headers, body, reader, writer):
                    break
        writer.close()

    async def answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Whether the connection stays open."""
        if path == "/control":
            self.control = json.loads(body)
            await respond(writer, 200, {})
        elif path == "/log":
            await respond(writer, 200, {"requests": self.log, "connections": self.num_connections})
        elif path == "/health":
            await respond(writer, int(self.control.get("health", 200)), None)
        elif path.endswith("/models"):
            card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": WINDOW}
            await respond(writer, 200, {"object": "list", "data": [card]})
        elif path.endswith("/chat/completions"):
            return await self.complete(headers, body, reader, writer)
        else:
            await respond(writer, 404, {"detail": "Not Found"})
        return True

    async def complete(
        self, headers: dict[str, str], body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        request = json.loads(body)
        behaviour = request.get("x_behaviour") or self.control
        entry = {"body": base64.b64encode(body).decode(), "headers": headers, "cancelled": False, "done": False}
        self.log.append(entry)
        if behaviour is self.control and "times" in behaviour:
            self.control = {**behaviour, "times": behaviour["times"] - 1} if behaviour["times"] > 1 else {}
        if behaviour.get("hang_after") == -1:
            await self.wait_for_leaving(reader, entry)
            return False
        if "status" in behaviour:
            await respond(writer, behaviour["status"], behaviour.get("body"), behaviour.get("headers"))
            return True
        work = asyncio.ensure_future(self.write_answer(request, behaviour, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            entry["cancelled"], entry["cancelled_at"] = True, time.time()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return False
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        keeps = work.result()
        entry["done"] = keeps
        return keeps

    async def wait_for_leaving(self, reader: asyncio.StreamReader, entry: dict[str, Any]) -> None:
        await reader.read(1)
        entry["cancelled"], entry["cancelled_at"] = True, time.time()

    async def write_answer(
        self, request: dict[str, Any], behaviour: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        prompt = prompt_of(request)
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        if len(prompt) + (limit or 1) > WINDOW:
            text = (
                f"This model's maximum context length is {WINDOW} tokens. However, you requested "
                f"{len(prompt) + (limit or 1)} tokens. Please reduce the length of the messages."
            )
            error = {"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": 400}
            await respond(writer, 400, error)
            return True
        cached = self.cached_tokens(request.get("cache_salt", ""), prompt)
        deltas, reason = deltas_of(behaviour, limit)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": sum(tokens for _, tokens in deltas),
            "total_tokens": len(prompt) + sum(tokens for _, tokens in deltas),
            "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        }
        if not request.get("stream"):
            if behaviour.get("delay_s"):
                await asyncio.sleep(behaviour["delay_s"])
            if "die_after" in behaviour:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{")
                await writer.drain()
                return False
            choices = [
                {
                    "index": index,
                    "message": merged(deltas),
                    "logprobs": None,
                    "finish_reason": reason,
                    "stop_reason": None,
                }
                for index in range(request.get("n") or 1)
            ]
            answer = {**head("chat.completion"), "choices": choices, "usage": usage, "x_vendor": 1.50}
            await respond(writer, 200, answer)
            return True
        return await self.stream(request, behaviour, deltas, reason, usage, writer)

    async def stream(
        self,
        request: dict[str, Any],
        behaviour: dict[str, Any],
        deltas: list[tuple[dict[str, Any], int]],
        reason: str,
        usage: dict[str, Any],
        writer: asyncio.StreamWriter,
    ) -> bool:
        asked = bool((request.get("stream_options") or {}).get("include_usage"))
        start = head("chat.completion.chunk")

        def chunk(index: int, delta: dict[str, Any], finish_reason: str | None, told: Any = None) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            usage_field = {"usage": told} if asked else {}
            document = {**start, "choices": [choice], **usage_field, "x_vendor": {"n": 1.0}}
            return json.dumps(document, ensure_ascii=False).encode()

        indices = range(request.get("n") or 1)
        events = [chunk(index, {"role": "assistant", "content": ""}, None) for index in indices]
        events += [chunk(index, delta, None) for delta, _ in deltas for index in indices]
        with_finish = usage if behaviour.get("usage") == "with_finish" else None
        if behaviour.get("end") != "none":
            events += [chunk(index, {}, reason, with_finish) for index in indices]
        if asked and behaviour.get("usage") not in ("with_finish", "none"):
            events.append(json.dumps({**start, "choices": [], "usage": usage}).encode())
        if behaviour.get("end") != "none":
            events.append(b"[DONE]")
        if "error_after" in behaviour:
            code = behaviour.get("error_code", 500)
            error = {"message": "CUDA error", "type": "InternalServerError", "param": None, "code": code}
            events[behaviour["error_after"] :] = [json.dumps({"error": error}).encode(), b"[DONE]"]
        newline = behaviour.get("newline", "\n").encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for number, event in enumerate(events):
            if number == behaviour.get("hang_after"):
                await asyncio.sleep(3600)
            if number == behaviour.get("die_after"):
                await writer.drain()
                writer.transport.abort()
                return False
            if behaviour.get("delay_s"):
                await asyncio.sleep(behaviour["delay_s"])
            frame = b"data: " + event + newline * 2
            size = behaviour.get("write_size") or len(frame)
            for place in range(0, len(frame), size):
                piece = frame[place : place + size]
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
                if size < len(frame):
                    await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def cached_tokens(self, salt: str, prompt: list[int]) -> int:
        known = self.prefixes.setdefault(salt, [])
        shared = [
            next((i for i, (a, b) in enumerate(zip(old, prompt, strict=False)) if a != b), min(len(old), len(prompt)))
            for old in known
        ]
        known.append(prompt)
        return min(max(shared, default=0), len(prompt) - 1) // BLOCK * BLOCK


def prompt_of(request: dict[str, Any]) -> list[int]:
    """Token ids of a prompt in ChatML, tools as JSON in front, an image as 85 ids."""
    text = json.dumps(request["tools"]) if request.get("tools") else ""
    token_ids = list(ENCODING.encode_ordinary(text))
    for message in request["messages"]:
        token_ids += [200006, *ENCODING.encode_ordinary(message["role"]), 200008]
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            text = part.get("text") or part.get("refusal")
            token_ids += ENCODING.encode_ordinary(text) if text is not None else [0] * 85
        calls = message.get("tool_calls")
        token_ids += ENCODING.encode_ordinary(json.dumps(calls)) if calls else []
        token_ids.append(200007)
    return [*token_ids, 200006, *ENCODING.encode_ordinary("assistant"), 200008]


def deltas_of(behaviour: dict[str, Any], limit: int | None) -> tuple[list[tuple[dict[str, Any], int]], str]:
    """Deltas with their tokens, and how the answer ends."""
    found: list[tuple[dict[str, Any], int]] = []
    if "reasoning" in behaviour:
        found.append(({"reasoning_content": behaviour["reasoning"]}, 1))
    if "tool_calls" in behaviour:
        for place, (name, *arguments) in enumerate(behaviour["tool_calls"]):
            opening = {"index": place, "id": f"call_{place}", "type": "function"}
            found.append(({"tool_calls": [{**opening, "function": {"name": name, "arguments": ""}}]}, 1))
            found += [({"tool_calls": [{"index": place, "function": {"arguments": part}}]}, 1) for part in arguments]
        return found, "tool_calls"
    words = behaviour.get("reply", "Hello, wörld! 你好 😀").split(" ")
    pieces = behaviour.get("pieces") or [word if place == 0 else f" {word}" for place, word in enumerate(words)]
    found += [({"content": piece}, 1) for piece in pieces]
    if limit is not None and len(found) > limit:
        return found[:limit], "length"
    return found, behaviour.get("finish_reason", "stop")


def merged(deltas: list[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """The message that the deltas add up to."""
    content = "".join(delta.get("content", "") for delta, _ in deltas)
    calls: list[dict[str, Any]] = []
    for delta, _ in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
    return {**message, "tool_calls": calls} if calls else message


def head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{time.time_ns()}", "object": kind, "created": int(time.time()), "model": MODEL}


async def respond(writer: asyncio.StreamWriter, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
    """A whole answer in JSON; a text is sent as it is."""
    data = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Status", "content-type: application/json", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    await writer.drain()


async def main() -> None:
    """Serves until standard input ends."""
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=2**26)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    listening.close()


if __name__ == "__main__":
    asyncio.run(main())
