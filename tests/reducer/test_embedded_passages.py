"""Passages inside plain messages: found without doubt or not at all, reduced in place, verbatim, reversible."""

from collections.abc import Sequence
from typing import Any

import pytest
from factories_reducer import WordCounter, make_parts, make_passages, reduce_parts

from reducer.config import HistoryConfig, RecogniseConfig, ReducerConfig
from reducer.embedded_passages import find_slots
from reducer.errors import BudgetExceededError
from reducer.prompt import Caller, PromptParts
from reducer.result import PassageDecision, PassageOrigin, ReductionResult

FACTS = (
    "The turbine of the north plant failed on 3 May because bearing B-17 was dry. It was replaced within nine days.",
    "The canteen serves soup on Mondays and pasta on Tuesdays, and everybody likes the garden behind the house.",
    "Visitors park on level two. The barrier opens with the badge that the reception hands out in the morning.",
    "The choir meets on Thursday evenings in the old hall, and new singers are welcome at any time of the year.",
)
QUESTION = "Which bearing of the turbine failed?"
CONFIG = ReducerConfig(min_prompt_tokens=0)


def tagged(texts: Sequence[str]) -> str:
    return "".join(f'<document index="{n}">\n{text}\n</document>\n' for n, text in enumerate(texts, 1))


def anthropic(texts: Sequence[str]) -> str:
    entries = [
        f'<document index="{n}">\n<source>f{n}.txt</source>\n<document_content>\n{text}\n'
        "</document_content>\n</document>\n"
        for n, text in enumerate(texts, 1)
    ]
    return f"<documents>\n{''.join(entries)}</documents>\n"


def numbered(texts: Sequence[str]) -> str:
    return "".join(f"[{n}] {text}\n" for n, text in enumerate(texts, 1))


def titled(texts: Sequence[str]) -> str:
    return "".join(f"Document [{n}](Title: Page {n}) {text}\n" for n, text in enumerate(texts, 1))


FORMATS = {"tags": tagged, "anthropic": anthropic, "numbers": numbered, "titles": titled}


def content_of(result: ReductionResult) -> Any:
    return result.messages[-1]["content"]


def origin_of(decision: PassageDecision) -> PassageOrigin:
    assert isinstance(decision.origin, PassageOrigin)
    return decision.origin


def stated_text(parts: PromptParts, result: ReductionResult) -> str:
    """The kept text that the decisions state, each looked up in the message as received."""
    texts = []
    for decision in result.documents:
        origin = origin_of(decision)
        content = parts.messages[origin.message]["content"]
        texts += [content[origin.start + start : origin.start + end] for start, end in decision.spans]
    return "\n".join(texts)


@pytest.mark.parametrize("name", FORMATS)
def test_irrelevant_passages_go_and_everything_else_stays_byte_for_byte(name: str) -> None:
    message = f"Use these:\n\n{FORMATS[name](FACTS)}\nQuestion: {QUESTION}\nAnswer:"
    limit = WordCounter().count_prompt([{"role": "user", "content": message}]) - 30
    parts = make_parts(message)
    result = reduce_parts(parts, limit, config=CONFIG)
    content = content_of(result)
    assert FACTS[0] in content
    assert content.startswith("Use these:\n\n")
    assert content.endswith(f"\nQuestion: {QUESTION}\nAnswer:")
    assert any(decision.action == "dropped" for decision in result.documents)
    assert result.prompt_tokens == WordCounter().count_prompt(result.messages) <= limit
    assert result.original_prompt_tokens == WordCounter().count_prompt(parts.messages)
    # Every line left is a line of the message, or one cut inside it.
    for line in content.split("\n"):
        assert line in message or " … " in line or line.strip() in message
    for line in stated_text(parts, result).split("\n"):
        assert line.strip() in content


@pytest.mark.parametrize("name", FORMATS)
def test_a_prompt_that_fits_is_left_as_it_is(name: str) -> None:
    message = f"{FORMATS[name](FACTS)}\n{QUESTION}"
    result = reduce_parts(make_parts(message), config=ReducerConfig(min_prompt_tokens=10_000))
    assert content_of(result) == message
    assert result.prompt_tokens == result.original_prompt_tokens


def test_labels_stay_the_applications_own() -> None:
    texts = [FACTS[1], FACTS[2], FACTS[0], FACTS[3]]
    result = reduce_parts(make_parts(f"{numbered(texts)}\n{QUESTION}"), 75, config=CONFIG)
    assert f"[3] {FACTS[0]}" in content_of(result)
    labels = [decision.label for decision in result.documents if decision.spans]
    assert "[3]" in labels
    assert set(labels) <= {"[1]", "[2]", "[3]", "[4]"}


def test_a_copy_is_merged() -> None:
    result = reduce_parts(make_parts(f"{tagged([FACTS[0], FACTS[0], FACTS[1]])}\n{QUESTION}"), config=CONFIG)
    assert content_of(result).count("bearing B-17 was dry") == 1
    assert [decision.action for decision in result.documents].count("merged") == 1


def test_content_parts_with_an_image_keep_it() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    content = [{"type": "text", "text": numbered(FACTS)}, image, {"type": "text", "text": QUESTION}]
    parts = PromptParts(messages=({"role": "user", "content": content},))
    result = reduce_parts(parts, 75, config=CONFIG)
    kept = content_of(result)
    assert kept[1:] == content[1:]
    assert FACTS[0] in kept[0]["text"]
    assert len(kept[0]["text"]) < len(numbered(FACTS))
    assert origin_of(result.documents[0]).part == 0


def test_the_record_of_earlier_turns_stays_in_front() -> None:
    history = [
        {"role": role, "content": f"Turn {n}: the meeting of the committee number {n} was moved to room {n}."}
        for n in range(12)
        for role in ("user", "assistant")
    ]
    config = ReducerConfig(min_prompt_tokens=0, history=HistoryConfig(max_tokens=40, num_recent_messages=0))
    result = reduce_parts(make_parts(f"{numbered(FACTS)}\n{QUESTION}", history=history), 300, config=config)
    content = content_of(result)
    assert content.startswith("<history>\n")
    assert "<documents>" not in content
    assert content.endswith(QUESTION)
    assert FACTS[0] in content


def test_system_text_is_left_alone_unless_the_policy_says_so() -> None:
    system = f"You answer from these.\n{numbered(FACTS)}"
    parts = make_parts(QUESTION, system=system)
    assert reduce_parts(parts, 200, config=CONFIG).messages[0]["content"] == system
    config = ReducerConfig(min_prompt_tokens=0, recognise=RecogniseConfig(system=True))
    result = reduce_parts(parts, 75, config=config)
    assert result.messages[0]["content"].startswith("You answer from these.\n")
    assert FACTS[0] in result.messages[0]["content"]
    assert result.messages[1]["content"] == QUESTION
    assert {origin_of(decision).message for decision in result.documents} == {0}


@pytest.mark.parametrize(
    "text",
    [
        f"Pick one:\n[1] Paris\n[2] London\n[3] Rome\n\n{QUESTION}",
        f"<document>{FACTS[0]}</document>\n{QUESTION}",
        f"<document>{FACTS[0]}\n<document>{FACTS[1]}\n{QUESTION}",
        f"<document>{FACTS[0]}</passage><document>{FACTS[1]}</passage>",
        f"[2] {FACTS[0]}\n[1] {FACTS[1]}\n{QUESTION}",
        f"```\n[1] {FACTS[0]}\n[2] {FACTS[1]}\n```\n{QUESTION}",
        f"~~~html\n{tagged(FACTS)}~~~\nWhat does this do?",
        f"```\n{tagged(FACTS)}\nWhat does this do?",
        f"See [1] {FACTS[0]} and [2] {FACTS[1]}",
        f"<documents>\n[1] {FACTS[0]}\n[3] {FACTS[1]}\n</documents>\n\n{QUESTION}",
        f"{FACTS[0]}\n---\n{FACTS[1]}\n---\n{QUESTION}",
        "",
    ],
)
def test_in_doubt_a_message_stays_as_it_is(text: str) -> None:
    assert find_slots(text, RecogniseConfig()) == ()


def test_a_passage_may_hold_whole_fences_but_none_is_cut_open() -> None:
    code = f"{FACTS[0]}\n```\n[7] not a label {FACTS[1]}\n```"
    text = f"[1] {code}\n[2] {FACTS[2]}\n\n{QUESTION}"
    assert [text[slot.text_start : slot.text_end] for slot in find_slots(text, RecogniseConfig())] == [code, FACTS[2]]
    assert (
        find_slots(f"<document>{FACTS[0]}\n```\n</document>\n<document>{FACTS[1]}\n```\n</document>", RecogniseConfig())
        == ()
    )


def test_the_last_numbered_passage_ends_where_the_question_begins() -> None:
    for ending in (f"\n\n{QUESTION}", f"\nQuestion: {QUESTION}", f"\n问题：{QUESTION}"):
        text = numbered(FACTS).rstrip("\n") + ending
        slots = find_slots(text, RecogniseConfig())
        assert text[slots[-1].text_start : slots[-1].text_end] == FACTS[-1]


def test_configured_separators_mark_what_is_between_them() -> None:
    text = f"Read:\n---\n{FACTS[0]}\n---\n{FACTS[1]}\n---\n{QUESTION}"
    slots = find_slots(text, RecogniseConfig(separators=("\n---\n",)))
    assert [text[slot.text_start : slot.text_end] for slot in slots] == list(FACTS[:2])


def test_documents_of_the_request_and_bypass_switch_it_off() -> None:
    message = f"{numbered(FACTS)}\n{QUESTION}"
    result = reduce_parts(make_parts(message, passages=make_passages("Bearings are round.")), config=CONFIG)
    assert content_of(result).endswith(message)
    assert content_of(reduce_parts(make_parts(message), config=CONFIG, bypass=True)) == message
    off = ReducerConfig(min_prompt_tokens=0, recognise=RecogniseConfig(enabled=False))
    assert content_of(reduce_parts(make_parts(message), config=off)) == message


def test_a_tenant_that_denies_unlabelled_documents_still_may_write_messages() -> None:
    message = f"{numbered(FACTS)}\n{QUESTION}"
    result = reduce_parts(make_parts(message), config=CONFIG, caller=Caller(deny_unlabelled=True))
    assert result.denied_documents == 0
    assert FACTS[0] in content_of(result)


def test_what_must_not_be_cut_is_still_refused() -> None:
    with pytest.raises(BudgetExceededError):
        reduce_parts(make_parts(f"{numbered(FACTS)}\n{QUESTION}" + " word" * 100), 80, config=CONFIG)


def test_the_same_input_gives_the_same_bytes_and_reducing_again_changes_nothing() -> None:
    message = f"{tagged(FACTS)}\n{QUESTION}"
    first = reduce_parts(make_parts(message), 75, config=CONFIG)
    assert reduce_parts(make_parts(message), 75, config=CONFIG).messages == first.messages
    again = reduce_parts(make_parts(content_of(first)), 75, config=CONFIG)
    assert content_of(again) == content_of(first)
