"""Failures of summarised histories that were reported elsewhere, as tests: each is one tiny conversation."""

from collections.abc import Mapping
from typing import Any

import pytest
from factories_reducer import WordCounter, make_parts, reduce_parts

from reducer.config import HistoryConfig, ReducerConfig
from reducer.ledger import find_facts, missing_facts
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller, PromptParts
from reducer.template import message_text

TOPICS = ("gardens", "wooden boats", "fresh bread", "long walks", "old songs", "tall trees", "quiet rivers", "warm tea")


def turn(number: int, text: str) -> dict[str, str]:
    return {"role": "assistant" if number % 2 else "user", "content": text}


def filler(num_turns: int) -> list[dict[str, str]]:
    """Talk without facts, every turn different."""
    return [
        turn(
            number,
            f"People like {TOPICS[number % 8]} because they remind them of {TOPICS[number * 5 % 7]} "
            f"and of {TOPICS[number * 3 % 8]}, as everybody in the village used to say in those times.",
        )
        for number in range(num_turns)
    ]


def sent(messages: tuple[Mapping[str, Any], ...] | list[dict[str, Any]]) -> str:
    return "\n".join(message_text(message) for message in messages)


def test_values_are_values_and_no_labels_after_six_compactions() -> None:
    facts = ("ORD-88231", "4,250 euros", "12 June", "17 chairs", "Marta Vogel", "+49 30 90182", "SKU-77A", "8:15 am")
    messages: list[Mapping[str, Any]] = [
        turn(0, f"My order is {facts[0]}, worth {facts[1]}, due on {facts[2]}."),
        turn(1, f"It holds {facts[3]} for {facts[4]}, phone {facts[5]}."),
        turn(2, f"The item is {facts[6]}, please deliver at {facts[7]}."),
        turn(3, "Noted."),
    ]
    talk = filler(48)
    for step in range(6):
        messages = [*messages, *talk[8 * step : 8 * step + 8]]
        result = reduce_parts(PromptParts(messages=(*messages, turn(0, "And now?"))), 260)
        assert result.prompt_tokens <= 260
        for fact in facts:
            assert fact in sent(result.messages), (step, fact)
        messages = list(result.messages[:-1])


def test_a_prohibition_keeps_both_of_its_halves() -> None:
    rule = "Do not push and do not open a PR until I say so"
    result = reduce_parts(make_parts("Go on.", history=[turn(0, rule + "."), turn(1, "Understood."), *filler(30)]), 300)
    assert rule in sent(result.messages)


def test_a_fact_of_the_first_pass_is_in_the_third() -> None:
    messages: list[Mapping[str, Any]] = [turn(0, "The licence key is ZX-4410-QQ."), turn(1, "Thanks."), *filler(12)]
    for _ in range(3):
        result = reduce_parts(PromptParts(messages=(*messages, turn(0, "And now?"))), 200)
        messages = [*result.messages[:-1], *filler(12)]
    assert "ZX-4410-QQ" in sent(result.messages)


@pytest.mark.parametrize("limit", range(60, 420, 15))
def test_a_call_and_its_results_are_kept_or_dropped_together(limit: int) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "boats"}'}}
    history: list[dict[str, Any]] = [
        *filler(6),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "three boats at the pier and one in the shed"},
        *filler(3)[1:],
    ]
    result = reduce_parts(make_parts("Which boats?", history=history), limit)
    calls = [message for message in result.messages if message.get("tool_calls")]
    results = [message for message in result.messages if message["role"] == "tool"]
    assert len(calls) == len(results)
    assert result.prompt_tokens <= limit


class Forgetful:
    """A model whose summaries hold no fact at all."""

    def summarise(self, transcript: str, max_tokens: int) -> str:
        """Nothing but talk."""
        return "They talked about an order."


def test_what_a_summary_lost_is_found_and_appended() -> None:
    told = (
        "Order ORD-88231 of 12 June is for Marta Vogel in Ghent. It costs 4,250 euros, weighs 31 kg and ships "
        "with DHL. Call +49 30 90182 at 8:15 am. Never ring the bell."
    )
    config = ReducerConfig(min_prompt_tokens=0, history=HistoryConfig(summarizer="model"))
    reducer = Reducer(config, WordCounter(), None, summarizer=Forgetful())
    parts = make_parts("And now?", history=[turn(0, told), turn(1, "Noted."), *filler(40)])
    result = reducer.reduce(parts, budget=Budget(300, "request"), caller=Caller())
    text = sent(result.messages)
    assert "They talked about an order." in text
    facts = [fact for fact in find_facts(told, "user") if fact.kind != "negation"]
    assert len(facts) >= 8
    assert missing_facts(facts, text) == []
