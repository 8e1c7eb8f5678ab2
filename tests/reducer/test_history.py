"""Which earlier turns stay."""

from typing import Any

import pytest
from factories_reducer import HashEncoder, WordCounter

from reducer.config import HistoryConfig, RankConfig
from reducer.errors import InvalidPromptError
from reducer.history import HistoryOutcome, group_units, make_query, read_conversation, reduce_history
from reducer.template import message_text


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    user("The budget of project Falcon is 70000 euros"),
    assistant("Noted, the Falcon budget is 70000 euros"),
    user("Tell me about the weather"),
    assistant(None, tool_calls=[CALL]),
    {"role": "tool", "tool_call_id": "c1", "content": "rain and wind today"},
    assistant("It rains"),
    user("Thanks"),
    assistant("You are welcome"),
    user("What is the budget of Falcon?"),
]


def reduce_chat(allowance: int, **config: Any) -> HistoryOutcome:
    conversation = read_conversation(CHAT)
    tokens = {i: WordCounter().count_text(message_text(CHAT[i])) + 4 for i in conversation.history}
    query = make_query(CHAT, conversation)
    return reduce_history(
        CHAT, conversation.history, tokens, allowance, query, HistoryConfig(**config), RankConfig(), HashEncoder()
    )


def test_question_protected_part_and_history_are_told_apart() -> None:
    conversation = read_conversation(CHAT)
    assert conversation.question == 9
    assert conversation.protected == (0, 9)
    assert conversation.history == tuple(range(1, 9))


def test_tool_call_in_progress_is_protected() -> None:
    chat = [*CHAT, assistant(None, tool_calls=[CALL]), {"role": "tool", "tool_call_id": "c1", "content": "x"}]
    assert read_conversation(chat).protected == (0, 9, 10, 11)


@pytest.mark.parametrize("messages", [[], [{"role": "system", "content": "x"}], [{"content": "x"}], [{"role": 3}]])
def test_messages_without_a_question_are_an_error(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidPromptError):
        read_conversation(messages)


def test_call_and_results_are_one_unit() -> None:
    assert group_units(CHAT, range(1, 9)) == [(1,), (2,), (3,), (4, 5), (6,), (7,), (8,)]


def test_everything_that_fits_stays() -> None:
    outcome = reduce_chat(1000)
    assert outcome.kept == tuple(range(1, 9))
    assert {d.action for d in outcome.decisions} == {"kept"}


def test_last_turns_then_relevant_turns_stay_in_order() -> None:
    outcome = reduce_chat(30, num_recent_messages=2)
    assert outcome.kept in ((1, 6, 7, 8), (2, 6, 7, 8))
    reasons = {d.index: d.reason for d in outcome.decisions}
    assert reasons[8] == "recent turn"
    assert reasons[4] == "history is limited to 30 tokens"


@pytest.mark.parametrize("allowance", range(0, 80, 3))
def test_allowance_is_kept_and_calls_stay_with_their_results(allowance: int) -> None:
    outcome = reduce_chat(allowance)
    assert sum(d.tokens_after for d in outcome.decisions) <= allowance
    assert (4 in outcome.kept) == (5 in outcome.kept)
    assert [d.index for d in outcome.decisions] == list(range(1, 9))
    assert {d.index for d in outcome.decisions if d.action == "kept"} == set(outcome.kept)


def test_query_has_the_turn_before_as_context() -> None:
    query = make_query(CHAT, read_conversation(CHAT))
    assert query.text == "What is the budget of Falcon?"
    assert query.context == "Thanks"
