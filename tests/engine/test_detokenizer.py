"""Incremental detokenisation: whole characters, no part of a stop string, the same text whatever the steps."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from factories_tokenizer import TEXTS, write_gguf_tokenizer, write_sentencepiece_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer import IncrementalDetokenizer
from engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_path(write_gguf_tokenizer(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_path(write_sentencepiece_folder(tmp_path_factory.mktemp("sp")))


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int], stop: tuple[str, ...] = ()) -> list[str]:
    """What each single-token step returns, and the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    return [*(detokenizer.append([token_id]) for token_id in token_ids), detokenizer.flush()]


def byte_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """``text`` in tokens of one byte each: the worst case for characters and stop strings."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    return [by_byte[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("text", TEXTS)
def test_steps_of_one_token_add_up_to_the_text(tiny: Tokenizer, text: str) -> None:
    assert "".join(pieces(tiny, tiny.encode(text))) == text
    assert "".join(pieces(tiny, byte_tokens(tiny, text))) == text


@pytest.mark.parametrize("text", ["好", "😀", "👩‍👩‍👧‍👦", "é", "한"])
def test_no_step_returns_part_of_a_character(tiny: Tokenizer, text: str) -> None:
    for piece in pieces(tiny, byte_tokens(tiny, text * 3)):
        assert "\N{REPLACEMENT CHARACTER}" not in piece
        piece.encode()  # no half of a surrogate pair either


def test_character_comes_with_its_last_byte(tiny: Tokenizer) -> None:
    assert pieces(tiny, byte_tokens(tiny, "a😀b")) == ["a", "", "", "", "😀", "b", ""]


def test_byte_fallback_tokens_wait_for_the_whole_character(sentencepiece: Tokenizer) -> None:
    ids = [3 + byte for byte in "好".encode()]
    assert pieces(sentencepiece, ids) == ["", "", "好", ""]


@pytest.mark.parametrize("text", ["the fox", " the", "  the fox", "héllo 好", ""])
def test_leading_space_of_sentencepiece_is_dropped_once(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert "".join(pieces(sentencepiece, ids)) == sentencepiece.decode(ids) == text


def test_broken_character_becomes_the_replacement_character(tiny: Tokenizer) -> None:
    ids = byte_tokens(tiny, "好")
    assert pieces(tiny, [*ids[:2], *byte_tokens(tiny, "x")]) == ["", "", "\N{REPLACEMENT CHARACTER}x", ""]
    assert pieces(tiny, ids[:2]) == ["", "", ""]  # cut off by the end of the output


def test_control_tokens_add_no_text(tiny: Tokenizer) -> None:
    assert pieces(tiny, [*tiny.encode("a"), 2, *tiny.encode("b")]) == ["a", "", "b", ""]


def test_stop_string_and_what_follows_is_cut(tiny: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tiny, ("STOP",))
    assert detokenizer.append(tiny.encode("before STOP after")) == "before "
    assert detokenizer.stopped
    assert detokenizer.stop_reason == "STOP"
    assert detokenizer.append(tiny.encode("more")) == ""
    assert detokenizer.flush() == ""


def test_stop_string_across_tokens_is_never_shown(tiny: Tokenizer) -> None:
    assert pieces(tiny, byte_tokens(tiny, "ok\n\nUser: x"), ("\n\nUser",)) == ["o", "k", *[""] * 10]


def test_false_alarm_is_released_as_soon_as_it_is_certain(tiny: Tokenizer) -> None:
    assert pieces(tiny, byte_tokens(tiny, "a\n\nB"), ("\n\nUser",)) == ["a", "", "", "\n\nB", ""]


def test_possible_stop_prefix_is_released_at_the_end(tiny: Tokenizer) -> None:
    assert pieces(tiny, byte_tokens(tiny, "a\n\nUs"), ("\n\nUser",)) == ["a", "", "", "", "", "\n\nUs"]


def test_stop_string_of_split_characters_is_found(tiny: Tokenizer) -> None:
    assert "".join(pieces(tiny, byte_tokens(tiny, "答案。完😀后"), ("。完😀",))) == "答案"


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        (("world", "lo"), "hel", "lo"),
        (("lo", "world"), "hel", "lo"),
        (("hello world", "lo"), "hel", "lo"),  # the first to be complete
        (("lo", "ello"), "h", "ello"),  # complete at once: the longest
        (("o w", "zzz"), "hell", "o w"),
        (("hello world!",), "hello world", None),
    ],
)
def test_first_complete_stop_string_wins(
    tiny: Tokenizer, stop: tuple[str, ...], expected: str, reason: str | None
) -> None:
    for ids in (tiny.encode("hello world"), byte_tokens(tiny, "hello world")):
        for steps in ([ids], [[token_id] for token_id in ids]):
            detokenizer = IncrementalDetokenizer(tiny, stop)
            text = "".join(detokenizer.append(step) for step in steps) + detokenizer.flush()
            assert text == expected
            assert detokenizer.stop_reason == reason


def test_self_overlapping_stop_string_is_found(tiny: Tokenizer) -> None:
    assert "".join(pieces(tiny, byte_tokens(tiny, "xaabaabaaac"), ("aabaaa",))) == "xaab"


def _reference(text: str, stop: Sequence[str]) -> str:
    """Character by character, as the docstring defines it."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - len(max(complete, key=len))]
    return text


_TINY: list[Tokenizer] = []


@given(
    st.text("abß好", max_size=40),
    st.lists(st.text("abß好", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_any_steps_and_stops_agree_with_the_definition(text: str, stop: list[str], sizes: list[int]) -> None:
    if not _TINY:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _TINY.append(Tokenizer.from_path(write_gguf_tokenizer(Path(folder) / "tiny.gguf")))
    tokenizer = _TINY[0]
    ids = byte_tokens(tokenizer, text)
    detokenizer = IncrementalDetokenizer(tokenizer, tuple(stop))
    shown, position, step = "", 0, 0
    expected = _reference(text, stop)
    while position < len(ids):
        size = sizes[step % len(sizes)]
        shown += detokenizer.append(ids[position : position + size])
        assert expected.startswith(shown)
        position, step = position + size, step + 1
    assert shown + detokenizer.flush() == expected
    assert detokenizer.stopped == any(s in text for s in stop)


def test_long_output_takes_linear_time(tiny: Tokenizer) -> None:
    stop = ("a" * 2000 + "b",)
    ids = tiny.encode("a")

    def seconds(num_tokens: int) -> float:
        detokenizer = IncrementalDetokenizer(tiny, stop)
        start = time.process_time()
        for _ in range(num_tokens):
            detokenizer.append(ids)
        return time.process_time() - start

    seconds(1000)
    short, long = min(seconds(2000) for _ in range(3)), min(seconds(40000) for _ in range(3))
    assert long < 100 * short  # 20 times as long; quadratic would be 400


def settled(tokenizer: Tokenizer, token_ids: Sequence[int], stop: tuple[str, ...] = ()) -> list[int]:
    """How many tokens count as settled after each step and after the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    counts = []
    for token_id in token_ids:
        detokenizer.append([token_id])
        counts.append(detokenizer.num_settled_tokens)
    detokenizer.flush()
    return [*counts, detokenizer.num_settled_tokens]


def test_tokens_settle_with_their_text(tiny: Tokenizer) -> None:
    assert settled(tiny, byte_tokens(tiny, "ab")) == [1, 2, 2]
    # "b" may begin the stop string, and so wait two tokens
    assert settled(tiny, byte_tokens(tiny, "abcx"), ("bcd",)) == [1, 1, 1, 4, 4]


def test_tokens_of_a_stop_string_never_settle(tiny: Tokenizer) -> None:
    assert settled(tiny, byte_tokens(tiny, "abcd"), ("bcd",)) == [1, 1, 1, 1, 1]
    assert settled(tiny, byte_tokens(tiny, "ab"), ("bcd",)) == [1, 1, 2]  # it stayed a possible one


def test_token_that_the_stop_string_begins_inside_of_settles(tiny: Tokenizer) -> None:
    text = next(text for text in ("the", "ing", "and", "qu") if len(tiny.encode(text)) == 1)
    assert settled(tiny, tiny.encode(text), (text[1:],)) == [1, 1]


def test_tokens_settle_when_the_output_ends_inside_a_character(tiny: Tokenizer) -> None:
    assert settled(tiny, byte_tokens(tiny, "a😀")[:3])[-1] == 3


def test_stop_strings_are_not_looked_for_before_min_tokens(tiny: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tiny, ("ab",), min_tokens=3)
    assert [detokenizer.append([token_id]) for token_id in byte_tokens(tiny, "abcxaby")] == [
        *("a", "b", "c", "x", "", "", "")
    ]
    assert detokenizer.stop_reason == "ab"
    # a stop string that begins in the exempt part is none
    detokenizer = IncrementalDetokenizer(tiny, ("ab",), min_tokens=1)
    assert "".join(detokenizer.append([token_id]) for token_id in byte_tokens(tiny, "abc")) == "abc"
    assert not detokenizer.stopped
