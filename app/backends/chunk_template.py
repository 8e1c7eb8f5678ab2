"""Passes on chunks that differ from an earlier one in their text alone, without reading or writing JSON.

Nearly all chunks of a stream are such: once one has been read and written, the next ones are known by the bytes around
their text, and get the bytes that the written one has there. Whatever looks otherwise is read again.

    upstream   {"id":"1","model":"m","choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}],"usage":null}
               '---------------------------- head ---------------------------''--'-------------- tail ---------------'
    client     {"id":"1","model":"default","choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}
"""

from dataclasses import dataclass

from app.backends.upstream_chunks import ChunkFacts

_MARK = b'"content":'


@dataclass(frozen=True, slots=True)
class ChunkTemplate:
    """What stands around the text of one choice."""

    choice: int
    head: bytes
    tail: bytes
    new_head: bytes
    new_tail: bytes

    def text_of(self, data: bytes) -> str | None:
        """The text of a chunk that fits and needs no reading: one without quotes, escapes and rare characters."""
        if not data.startswith(self.head) or not data.endswith(self.tail):
            return None
        found = data[len(self.head) : -len(self.tail)]
        if not found or b'"' in found or b"\\" in found:
            return None
        try:
            text = found.decode()
        except UnicodeDecodeError:
            return None
        return text if text.isprintable() else None

    def frame(self, text: str) -> bytes:
        """The frame for the client."""
        return self.new_head + text.encode() + self.new_tail


def learn_template(data: bytes, frame: bytes, facts: ChunkFacts) -> ChunkTemplate | None:
    """The template of a chunk and of the frame that was made of it; ``None`` where it has more to it than a text."""
    if len(facts.texts) != 1 or facts.finished or facts.has_usage or facts.num_choices != 1:
        return None
    choice, text = facts.texts[0]
    if not text.isprintable() or '"' in text or "\\" in text:
        return None
    content = text.encode()
    for space in (b"", b" "):
        mark = _MARK + space + b'"' + content + b'"'
        if data.count(mark) == 1 and frame.count(mark) == 1:
            head, tail = data.split(mark)
            new_head, new_tail = frame.split(mark)
            opening = _MARK + space + b'"'
            return ChunkTemplate(choice, head + opening, b'"' + tail, new_head + opening, b'"' + new_tail)
    return None
