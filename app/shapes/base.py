"""What all shapes share: a request becomes the JSON of a chat completion, and chunks come back.

body of the shape -> chat_body() -> reduce, generate -> chat completion -> whole()  -> answer of the shape
                                                     '-> chunks         -> events() -> its events
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from app.errors import InvalidRequestError

Json = dict[str, Any]


class Shape(Protocol):
    """One request in another API's shape."""

    @property
    def chat_body(self) -> Json:
        """The chat completion that answers it."""
        ...

    def whole(self, answer: Json) -> Json:
        """The answer, of a chat completion."""
        ...

    def events(self, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The stream, of the frames of a chat completion; it ends ``frames`` as well."""
        ...


async def chunks_of(frames: AsyncIterator[bytes]) -> AsyncIterator[Json]:
    """The chunks in the frames of a chat completion; one with ``error`` is the last."""
    async for several in frames:
        for frame in several.split(b"\n\n"):
            data = frame.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                yield msgspec.json.decode(data)


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """An event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def first_choice(answer: Mapping[str, Any]) -> Json:
    """The one choice of an answer or a chunk; empty for a chunk that only tells usage."""
    choices: Sequence[Json] = answer.get("choices") or ({},)
    return choices[0]


def reasoning_of(message: Mapping[str, Any]) -> str:
    """What the model thought, under either of the names in use."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def expect(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """``value``, which must be of a kind. Raises ``InvalidRequestError`` that names the field."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        names = {dict: "an object", list: "an array", str: "a string", int: "an integer"}
        wanted = " or ".join(names.get(one, one.__name__) for one in (kind if isinstance(kind, tuple) else (kind,)))
        got = "null" if value is None else type(value).__name__
        text = f"Invalid '{where}': it must be {wanted}, got {got}."
        raise InvalidRequestError(text, param=where, code="invalid_type")
    return value


def refuse(where: str, why: str) -> InvalidRequestError:
    """The error for what no chat completion can say."""
    return InvalidRequestError(f"Invalid '{where}': {why}.", param=where, code="unsupported_value")


def required(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """A field that must be there. Raises ``InvalidRequestError``."""
    if name not in body:
        text = f"Invalid '{name}': the required field is missing."
        raise InvalidRequestError(text, param=name, code="invalid_value")
    return expect(body[name], kind, name)


def json_object(text: Any) -> Json:
    """Arguments of a call as an object; what is none stands under ``arguments``."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, TypeError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def usage_counts(usage: Mapping[str, Any] | None) -> tuple[int, int, int]:
    """Prompt tokens, those of them from the cache, and output tokens."""
    usage = usage or {}
    details = usage.get("prompt_tokens_details") or {}
    return usage.get("prompt_tokens") or 0, details.get("cached_tokens") or 0, usage.get("completion_tokens") or 0


def joined(texts: Sequence[str]) -> str:
    """Texts as one, a line break between them."""
    return "\n".join(text for text in texts if text)
