"""OpenAI's old completions: the prompt is answered as one user message, through the model's chat template."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from app.shapes.base import Json, chunks_of, refuse, required

_TRANSLATED = frozenset(("prompt", "suffix", "best_of", "echo", "logprobs"))
_DEFAULT_MAX_TOKENS = 16


class CompletionsShape:
    """One request of ``/v1/completions``."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        """Raises ``InvalidRequestError`` naming the field."""
        prompt = required(body, "prompt", (str, list))
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise refuse("prompt", "one text is answered at a time, neither several nor token ids")
        for name in ("suffix", "echo", "logprobs"):
            if body.get(name):
                raise refuse(name, "it is not available; the prompt is answered through the chat template")
        if (body.get("best_of") or 1) > (body.get("n") or 1):
            raise refuse("best_of", "it must not be above n")
        self.chat_body: Json = {name: value for name, value in body.items() if name not in _TRANSLATED}
        self.chat_body["messages"] = [{"role": "user", "content": prompt}]
        if body.get("max_tokens") is None:
            self.chat_body["max_tokens"] = _DEFAULT_MAX_TOKENS

    def whole(self, answer: Json) -> Json:
        """The completion, of a chat completion."""
        choices = [
            _choice(choice["index"], choice["message"].get("content") or "", choice.get("finish_reason"))
            for choice in answer["choices"]
        ]
        return {**answer, "id": _identity(answer), "object": "text_completion", "choices": choices}

    async def events(self, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The stream, of the frames of a chat completion."""
        is_broken = False
        async with aclosing(frames):
            async for chunk in chunks_of(frames):
                if "error" in chunk:
                    is_broken = True
                else:
                    choices = [
                        _choice(choice["index"], text, choice.get("finish_reason"))
                        for choice in chunk["choices"]
                        if (text := (choice.get("delta") or {}).get("content") or "") or choice.get("finish_reason")
                    ]
                    if chunk["choices"] and not choices:
                        continue  # the role alone
                    chunk = {**chunk, "id": _identity(chunk), "object": "text_completion", "choices": choices}
                yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        if not is_broken:
            yield b"data: [DONE]\n\n"


def _choice(index: int, text: str, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _identity(answer: Json) -> str:
    return f"cmpl-{str(answer.get('id', '')).removeprefix('chatcmpl-')}"
