"""Chunks that are passed on by a template are byte for byte what reading and writing them would give."""

import json
from typing import Any

import msgspec
import pytest

from app.backends.chunk_template import ChunkTemplate, learn_template
from app.backends.upstream_chunks import raw_fields, read_chunk


def chunk(text: str, *, ensure_ascii: bool = False, **changes: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None} | changes
    content = {"id": "1", "model": "m", "choices": [choice], "usage": None}
    return json.dumps(content, ensure_ascii=ensure_ascii).encode()


def written(data: bytes) -> bytes:
    fields = raw_fields(data)
    fields["model"] = msgspec.Raw(b'"default"')
    fields.pop("usage")
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def learn(data: bytes) -> ChunkTemplate | None:
    return learn_template(data, written(data), read_chunk(data))


def make_template() -> ChunkTemplate:
    template = learn(chunk("Hello"))
    assert template is not None
    return template


@pytest.mark.parametrize("text", ["a", " world", "wörld", "你好", "😀", "1.0", "content", "choices:[{}]"])
def test_a_chunk_that_fits_becomes_what_writing_it_would_give(text: str) -> None:
    template, data = make_template(), chunk(text)
    assert template.text_of(data) == text
    assert template.frame(text) == written(data)


@pytest.mark.parametrize(
    "data",
    [
        chunk(""),
        chunk('say "hi"'),
        chunk("a\nb"),
        chunk("C:\\"),
        chunk("wörld", ensure_ascii=True),
        chunk("👩‍👩‍👧"),  # joined by a character that is not printed
        chunk("a", finish_reason="stop"),
        chunk("a", index=1),
        chunk("a", logprobs={"content": []}),
        chunk("a").replace(b"null}", b'{"prompt_tokens": 3}}'),
        chunk("a", delta={"content": "a", "tool_calls": []}),
        chunk("a").replace(b'"a"', b'"\xff"'),
        chunk("a")[:-1],
        b"[DONE]",
    ],
)
def test_whatever_looks_otherwise_is_read(data: bytes) -> None:
    assert make_template().text_of(data) is None


@pytest.mark.parametrize(
    "data",
    [
        chunk(""),
        chunk("a", finish_reason="stop"),
        chunk("a", delta={"content": "a", "refusal": "b"}),
        chunk("a", delta={"reasoning_content": "a"}),
        chunk("a", delta={"content": "a", "more": {"content": "a"}}),
    ],
)
def test_a_chunk_with_more_to_it_than_a_text_is_no_template(data: bytes) -> None:
    assert learn(data) is None
