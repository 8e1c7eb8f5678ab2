"""Volatile fields in system text: found by label or shape, moved only when that is safe; and what the prefix loses."""

import re
from typing import Any

import pytest
from factories_reducer import WordCounter, make_parts, make_passages, make_reducer, reduce_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from reducer.config import ReducerConfig, TemplateConfig
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller
from reducer.result import ReductionResult
from reducer.template import message_text
from reducer.volatile import VolatileField, find_volatile, move_volatile

UUID = "7f0c2a44-1b7e-4c7e-9d5b-0d4f6c2b9a10"
RULES = "You answer from the documents. Cite labels. If unsure answer UNKNOWN."
MOVE = ReducerConfig(min_prompt_tokens=0, template=TemplateConfig(volatile_fields="move"))
FACTS = make_passages("Unit QX-471-KD failed in June.", "The canteen serves soup.")


def find(text: str) -> list[VolatileField]:
    return find_volatile([{"role": "system", "content": text}], [0])


def move(text: str) -> tuple[str, tuple[str, ...]]:
    messages = [{"role": "system", "content": text}]
    moved = move_volatile(messages, find_volatile(messages, [0]))
    return message_text(moved.messages[0]), moved.lines


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("Current date: 2026-11-30", "date"),
        ("Today is Monday, 30 November 2026.", "date"),
        ("Today's date is November 30, 2026.", "date"),
        ("The current time is 10:33:05 UTC.", "clock"),
        ("Current date and time: 2026-11-30T10:33:05Z", "clock"),
        ("Current time: 10:33 a.m.", "clock"),
        ("Timestamp: 1764498785", "clock"),
        ("Heute ist Montag, 30.11.2026.", "date"),
        ("当前时间：2026年11月30日 10:33", "clock"),
        ("今天是2026年11月30日。", "date"),
        (f"Request ID: {UUID}", "request_id"),
        ("Session id: s-82f1", "request_id"),
        ("User name: Anna Schmidt", "user_name"),
        ("The user's name is Anna Schmidt.", "user_name"),
        ("Message count: 17", "counter"),
        ("Remaining tokens: 12,400", "counter"),
        ("- Current date: 2026-11-30", "date"),
    ],
)
def test_field_that_is_a_line_of_its_own_moves_and_leaves_the_rest_as_it_was(line: str, kind: str) -> None:
    text = f"You are a helpful assistant.\n{line}\n{RULES}"
    (field,) = find(text)
    assert (field.kind, field.can_move) == (kind, True)
    assert move(text) == (f"You are a helpful assistant.\n{RULES}", (line.removeprefix("- "),))


def test_sentence_between_sentences_moves() -> None:
    assert move(f"You are Ann. Today is 2026-11-30. {RULES}") == (f"You are Ann. {RULES}", ("Today is 2026-11-30.",))
    assert move(f"Today is 2026-11-30. {RULES}") == (RULES, ("Today is 2026-11-30.",))
    assert move(f"{RULES} Today is 2026-11-30.")[1] == ("Today is 2026-11-30.",)


@pytest.mark.parametrize(
    "text",
    [
        "The price list holds from 2026-01-01 until 2026-12-31.",
        "Date: 2024-03-01\nThis policy replaces the one of 2023.",
        "User: What is the time?\nAssistant: I cannot know.",
        "Step 3: ask back. Turn left at 10:30 street.",
        "Use ISO dates. The user name must not be repeated.",
        "Be brief.",
        "",
        "Time zones: UTC, CET.",
    ],
)
def test_text_without_fields_of_the_request_has_none(text: str) -> None:
    assert [field for field in find(text) if field.can_move] == []
    assert move(text) == (text, ())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"You serve the tenant {UUID} and nobody else.", "uuid"),
        ("As of 2026-11-30 10:33 you may use the archive.", "clock"),
        ("Current date: 2026-11-30. It decides which price list holds.", "date"),
        ("| Current date: 2026-11-30 | Be brief |", "date"),
        ('{"current date": "x", "request_id": "abcdef12"}', None),
        ("```\nCurrent date: 2026-11-30\n```", "date"),
        ("Remember, the current time is 10:33, so greet with good morning.", "clock"),
    ],
)
def test_field_inside_other_text_is_reported_and_never_cut_out(text: str, kind: str | None) -> None:
    fields = find(text)
    assert all(not field.can_move for field in fields)
    assert kind is None or kind in {field.kind for field in fields}
    assert move(text) == (text, ())


def test_message_of_fields_only_keeps_its_text() -> None:
    assert move("Current date: 2026-11-30") == ("Current date: 2026-11-30", ())


def test_parts_of_a_content_list_are_reported_only() -> None:
    messages = [{"role": "system", "content": [{"type": "text", "text": f"{RULES}\nCurrent date: 2026-11-30"}]}]
    fields = find_volatile(messages, [0])
    assert [field.kind for field in fields] == ["date"]
    assert move_volatile(messages, fields).messages == tuple(messages)


def test_by_default_system_text_is_byte_equal_and_the_finding_is_reported() -> None:
    system = f"Current date: 2026-11-30\n{RULES}"
    result = reduce_parts(make_parts("Which unit failed?", passages=FACTS, system=system))
    assert result.messages[0]["content"] == system
    assert result.prefix is not None
    (found,) = result.prefix.volatile
    assert (found.kind, system[found.start : found.end], found.is_moved) == ("date", "Current date: 2026-11-30", False)
    assert result.prefix.stable_tokens < 6


def test_moved_field_stands_between_documents_and_question_within_the_exact_count() -> None:
    system = f"Current date: 2026-11-30\n{RULES}"
    result = reduce_parts(make_parts("Which unit failed?", passages=FACTS, system=system), 60, config=MOVE)
    assert result.messages[0]["content"] == RULES
    content = result.messages[-1]["content"]
    assert content.endswith("</documents>\n\nCurrent date: 2026-11-30\n\nWhich unit failed?")
    assert result.prompt_tokens == WordCounter().count_prompt(result.messages) <= 60
    assert result.prefix is not None
    assert [found.is_moved for found in result.prefix.volatile] == [True]
    assert result.prefix.stable_tokens == WordCounter().count_text(RULES) + 4


def test_two_requests_a_minute_apart_share_the_whole_system_text() -> None:
    def ask(clock: str) -> ReductionResult:
        system = f"You are Ann.\nCurrent time: {clock}\nRequest id: {hash(clock)}\n{RULES}"
        return reduce_parts(make_parts("Which unit failed?", passages=FACTS, system=system), config=MOVE)

    first, second = ask("10:33:05"), ask("10:34:05")
    assert first.messages[0] == second.messages[0]
    before = [str(result.messages[-1]["content"]).partition("Current time")[0] for result in (first, second)]
    assert before[0] == before[1]
    assert "10:34:05" in second.messages[-1]["content"]


def test_move_without_documents_and_on_a_short_prompt() -> None:
    parts = make_parts("Which unit failed?", system=f"{RULES}\nToday is 2026-11-30.")
    result = reduce_parts(parts, config=MOVE)
    assert result.messages[-1]["content"] == "Today is 2026-11-30.\n\nWhich unit failed?"
    assert result.prompt_tokens == result.original_prompt_tokens == WordCounter().count_prompt(result.messages)
    assert reduce_parts(parts, config=MOVE, bypass=True).messages == list(parts.messages)


class TokenizingCounter(WordCounter):
    """Tells the tokens too: role mark, words, end mark."""

    def encode_prompt(self, messages: Any, tools: Any = ()) -> list[str]:
        """Tokens of the rendered prompt."""
        tokens: list[str] = [str(tool) for tool in tools]
        for message in messages:
            tokens += [f"<{message['role']}>", *re.findall(r"\w+|[^\w\s]", message_text(message)), "<end>"]
        return [*tokens, "<assistant>"]


@pytest.mark.parametrize(("num_words", "lost"), [(16 * 3 + 9 - 3, 9), (16 * 2 - 3, 0), (16 - 4, 15)])
def test_loss_at_the_block_edge_is_counted_on_real_tokens(num_words: int, lost: int) -> None:
    # Role mark, end mark and the user's role mark are three more stable tokens.
    parts = make_parts("Which unit failed?", passages=FACTS, system=" ".join(["word"] * num_words))
    reducer = Reducer(ReducerConfig(min_prompt_tokens=0), TokenizingCounter(), None)
    prefix = reducer.reduce(parts, budget=Budget(10_000, "request"), caller=Caller()).prefix
    assert prefix is not None
    assert (prefix.stable_tokens, prefix.lost_tokens, prefix.is_exact) == (num_words + 3, lost, True)


def test_prefix_facts_without_the_tokens_leave_the_templates_marks_out() -> None:
    result = make_reducer().reduce(
        make_parts("Which?", system="one two three"), budget=Budget(1000, "request"), caller=Caller()
    )
    assert result.prefix is not None
    assert (result.prefix.stable_tokens, result.prefix.is_exact) == (7, False)


PIECES = st.sampled_from(
    [
        "Current date: 2026-11-30",
        "Today is Monday.",
        "Be brief.",
        "\n",
        " ",
        "Request id: abcd-12",
        UUID,
        "10:33",
        "- ",
        "|",
        "```",
        "The user name is Ann.",
        "当前时间：10:33",
        "It is so.",
        "Date: x",
        "Turn count: 4",
        "\n\n",
    ]
)


@settings(deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_moving_only_takes_whole_found_pieces_out(text: str) -> None:
    remainder, lines = move(text)
    rest = remainder
    squashed = "".join(text.split())
    for line in lines:
        piece = "".join(line.split())
        assert piece in squashed
        squashed = squashed.replace(piece, "", 1)
    assert sorted("".join(rest.split()).replace("-", "")) == sorted(squashed.replace("-", ""))
    assert move(remainder)[0] == remainder or lines
    assert not lines or any(map(str.isalnum, remainder))
