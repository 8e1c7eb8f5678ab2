"""Server-sent events come out whole, however their bytes are cut."""

import pytest

from app.backends import event_stream
from app.backends.event_stream import EventParser, ServerEvent

STREAM = 'data: {"a": "你好 😀"}\n\n: a comment\n\nevent: ping\ndata: x\ndata: y\n\ndata: [DONE]\n\n'.encode()
EVENTS = [ServerEvent('{"a": "你好 😀"}'.encode()), ServerEvent(b"x\ny", b"ping"), ServerEvent(b"[DONE]")]


def parse(pieces: list[bytes]) -> list[ServerEvent]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_where_the_bytes_are_cut(newline: bytes, size: int) -> None:
    stream = STREAM.replace(b"\n", newline) + b": the end"
    pieces = [stream[place : place + size] for place in range(0, len(stream), size)]
    assert parse(pieces) == EVENTS


def test_every_single_cut_gives_the_same_events() -> None:
    for place in range(len(STREAM) + 1):
        assert parse([STREAM[:place], STREAM[place:]]) == EVENTS


def test_an_event_that_has_not_ended_is_not_handed_on() -> None:
    assert parse([b"data: half\n"]) == []


def test_a_byte_order_mark_and_a_missing_space_are_read_over() -> None:
    assert parse([b"\xef\xbb", b"\xbfdata:x\n\n"]) == [ServerEvent(b"x")]


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        list(parser.feed(b"data: " + b"x" * 200))
