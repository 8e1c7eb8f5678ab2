"""What the gateway needs to know of a chat completion chunk, and the chunk as the client gets it.

A chunk is read twice, both times in a microsecond or so: into a few typed fields for the account, and into its
top-level fields as raw bytes for the client. Only ``model`` and ``usage`` are exchanged there; content, tool-call
arguments, log probabilities and whatever an upstream adds keep their bytes.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from app.backends.upstream_errors import ToldError, read_error

RawObject = dict[str, msgspec.Raw]
NULL = msgspec.Raw(b"null")


class _Function(msgspec.Struct):
    name: Any = None
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_read = msgspec.json.Decoder(_Chunk).decode
_read_raw = msgspec.json.Decoder(RawObject).decode


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """What one chunk, or one whole answer, tells."""

    texts: tuple[tuple[int, str], ...]
    """By choice: content, reasoning, refusal, names and arguments of calls."""
    contents: tuple[str, ...]
    """Content of the first choice alone."""
    finished: tuple[tuple[int, str], ...]
    """Choices that end here, and why."""
    num_choices: int
    has_usage: bool
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    num_cached_tokens: int | None
    error: ToldError | None

    @property
    def has_text(self) -> bool:
        """Whether the model has said something, the role alone being nothing."""
        return bool(self.texts)


def read_chunk(data: bytes) -> ChunkFacts:
    """Reads a chunk or a whole answer. Raises ``msgspec.MsgspecError`` for what is neither."""
    chunk = _read(data)
    texts: list[tuple[int, str]] = []
    contents: list[str] = []
    finished: list[tuple[int, str]] = []
    for choice in chunk.choices or ():
        delta = choice.delta or choice.message
        if delta is not None:
            if isinstance(delta.content, str) and delta.content:
                texts.append((choice.index, delta.content))
                if choice.index == 0:
                    contents.append(delta.content)
            said = [delta.reasoning_content, delta.reasoning, delta.refusal]
            for function in (*(call.function for call in delta.tool_calls or ()), delta.function_call):
                said += () if function is None else (function.name, function.arguments)
            texts += [(choice.index, text) for text in said if isinstance(text, str) and text]
        if choice.finish_reason is not None:
            finished.append((choice.index, choice.finish_reason))
    usage = chunk.usage
    details = None if usage is None else usage.prompt_tokens_details
    return ChunkFacts(
        texts=tuple(texts),
        contents=tuple(contents),
        finished=tuple(finished),
        num_choices=len(chunk.choices or ()),
        has_usage=usage is not None,
        num_prompt_tokens=None if usage is None else usage.prompt_tokens,
        num_output_tokens=None if usage is None else usage.completion_tokens,
        num_cached_tokens=None if details is None else details.cached_tokens,
        error=None if chunk.error is None else read_error(data),
    )


def raw_fields(data: bytes) -> RawObject:
    """The top-level fields of a chunk or answer, each as its bytes."""
    return _read_raw(data)


def complete_usage(usage: msgspec.Raw) -> msgspec.Raw:
    """Usage with ``prompt_tokens_details.cached_tokens`` as a number: 0 where the upstream says null or nothing."""
    fields = _read_raw(usage)
    details = fields.get("prompt_tokens_details")
    below = {} if details is None or bytes(details).strip() == b"null" else _read_raw(details)
    cached = below.get("cached_tokens")
    if cached is not None and bytes(cached).strip() != b"null":
        return usage
    below["cached_tokens"] = msgspec.Raw(b"0")
    fields["prompt_tokens_details"] = msgspec.Raw(msgspec.json.encode(below))
    return msgspec.Raw(msgspec.json.encode(fields))
