"""Reducing twice, and reducing the same in another order.

Reducing a result again means: the kept passages become the passages, each with its kept text, in the order and with
the ids they had, beside the same question and budget.

What must hold for equal inputs in another order: the same passages with the same spans are kept. Only labels differ,
because they follow the place in the request, and with them the order of the block under the ``input`` policy. Where two
passages are equally good and only one fits, their place in the request decides; scores that differ leave no such ties.
"""

import random
from typing import Any

import msgspec
import pytest
from factories_mixed import HARBOUR, make_mixed
from factories_mixed import QUESTION as MIXED_QUESTION
from factories_reducer import WordCounter, make_parts, reduce_parts
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from reducer.clean import clean
from reducer.config import CleanConfig, ReducerConfig, SelectionConfig, TemplateConfig
from reducer.errors import BudgetExceededError
from reducer.prompt import Passage, PromptParts
from reducer.result import ReductionResult
from reducer.run import make_candidate
from reducer.stage import Span, SpanText
from reducer.template import unescape

QUESTION = "Which unit failed the pressure test? 谁是首席执行官"
SENTENCES = [
    "Unit QX-417-KD passed.",
    "Unit QX-471-KD failed in June 2024.",
    "The valve leaked at 12 bar!",
    "海底捞的新任首席执行官是杨利娟。",
    "Bread is free.",
    "Home | About us | Contact\n",
    "<p>Unit QX-9 is <b>blue</b>.</p><p>It failed.</p>",
    "© 2024 Acme Ltd. All rights reserved.\n",
    "{{KEEP_0}} ",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
]
TEXTS = st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=6).map(" ".join)
KEEP_ALL = ReducerConfig(min_prompt_tokens=0, selection=SelectionConfig(relative_threshold=0.0, linked_threshold=0.0))


def build(texts: list[str]) -> PromptParts:
    # A retriever's scores all differ, so that no tie is left to the place in the request.
    passages = [Passage(id=f"p{n}", text=text, score=10.0 - n) for n, text in enumerate(texts)]
    return make_parts(QUESTION, passages=passages, system="Answer from the documents.")


def kept_passages(parts: PromptParts, result: ReductionResult) -> tuple[Passage, ...]:
    """What was kept, as a client would send it again: the text as it stands in the prompt."""
    content = str(result.messages[-1]["content"])
    kept: list[Passage] = []
    received = {passage.id: passage for passage in parts.passages}
    decisions = [decision for decision in result.documents if decision.label is not None]
    for decision in decisions:
        start = content.index(f"{decision.label} ") + len(str(decision.label)) + 1
        others = [content.find(f"\n{other.label} ", start) for other in decisions if other is not decision]
        end = min([at for at in others if at >= 0] + [content.index("\n</documents>", start)])
        passage = received[decision.id]
        kept.append(Passage(id=passage.id, text=unescape(content[start:end]), score=passage.score))
    return tuple(kept)


@settings(max_examples=120, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=7))
def test_reducing_a_result_again_changes_nothing_when_everything_fits(texts: list[str]) -> None:
    parts = build(texts)
    first = reduce_parts(parts, config=KEEP_ALL)
    assume(any(decision.label for decision in first.documents))
    again = PromptParts(messages=parts.messages, passages=kept_passages(parts, first))
    second = reduce_parts(again, config=KEEP_ALL)
    assert [decision.action for decision in second.documents] == ["kept"] * len(again.passages)
    assert second.prompt_tokens == first.prompt_tokens
    assert kept_passages(again, second) == again.passages


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(3, 14))
def test_reducing_a_result_again_at_default_settings_changes_nothing(rng: random.Random, num_texts: int) -> None:
    """The default drops noise, so what is left must hold none by its own measure."""
    config = ReducerConfig(min_prompt_tokens=0)
    fillers = [
        "Bread is free",
        "The valve leaked",
        "Trees grow",
        "Unit QX-417-KD passed",
        "The pressure test of a unit",
    ]
    texts = [" ".join(rng.choices(fillers, k=rng.randint(1, 4))) + f" at house {n}." for n in range(num_texts)]
    parts = build(texts)
    first = reduce_parts(parts, 10_000, config=config)
    again = PromptParts(messages=parts.messages, passages=kept_passages(parts, first))
    second = reduce_parts(again, 10_000, config=config)
    assert kept_passages(again, second) == again.passages
    assert second.prompt_tokens == first.prompt_tokens


@example(["© 2024 Acme Ltd. All rights reserved.\n | a | b |\n|---|---|\n| 1 | 2 |\n"], 65)
@settings(max_examples=120, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=7), st.integers(30, 200))
def test_reducing_a_result_again_within_the_same_budget_keeps_every_word(texts: list[str], limit: int) -> None:
    parts = build(texts)
    try:
        first = reduce_parts(parts, limit, config=KEEP_ALL)
    except BudgetExceededError:
        return
    assume(any(decision.label for decision in first.documents))
    again = PromptParts(messages=parts.messages, passages=kept_passages(parts, first))
    second = reduce_parts(again, limit, config=KEEP_ALL)
    assert second.prompt_tokens <= first.prompt_tokens
    # A cut can leave a passage that now stands in another one; nothing that was said is lost by merging it.
    gone = [decision for decision in second.documents if decision.label is None]
    assert all(decision.action == "merged" for decision in gone)


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXTS, max_size=6))
def test_cleaning_a_cleaned_text_changes_nothing(texts: list[str]) -> None:
    candidates = [make_candidate(n, Passage(id=str(n), text=text), WordCounter()) for n, text in enumerate(texts)]
    once = clean(candidates, QUESTION, CleanConfig(), WordCounter()).kept
    again = clean(
        [make_candidate(n, candidate.passage, WordCounter()) for n, candidate in enumerate(once)],
        QUESTION,
        CleanConfig(),
        WordCounter(),
    ).kept
    assert [candidate.passage.text for candidate in again] == [candidate.passage.text for candidate in once]


def outcome(result: ReductionResult) -> Any:
    return {
        decision.id: (decision.action, decision.spans, decision.merged_into, sorted(decision.sources))
        for decision in result.documents
    }


def make_texts(rng: random.Random) -> list[str]:
    return [
        " ".join(rng.choices(SENTENCES, k=rng.randint(1, 5))) + f" Number {n} of {rng.randint(1, 99)}."
        for n in range(9)
    ]


@pytest.mark.parametrize("order", ["input", "best_first", "best_last", "cache"])
def test_same_input_gives_the_same_over_200_shuffled_repeats(order: Any) -> None:
    rng = random.Random(7)
    parts = build(make_texts(rng))
    config = ReducerConfig(min_prompt_tokens=0, template=TemplateConfig(document_order=order))
    first = reduce_parts(parts, 150, config=config)
    for _ in range(200 if order == "cache" else 20):
        passages = list(parts.passages)
        rng.shuffle(passages)
        result = reduce_parts(PromptParts(messages=parts.messages, passages=tuple(passages)), 150, config=config)
        assert outcome(result) == outcome(first)
        if order == "cache":
            # Labels follow the place in the prompt, so not a byte of it differs.
            assert result.messages == first.messages


@pytest.mark.parametrize("limit", [300, 100_000])
def test_mixed_passages_in_200_orders_give_the_same(limit: int) -> None:
    rng = random.Random(limit)
    passages = make_mixed()
    parts = make_parts(MIXED_QUESTION, passages=passages, system="Answer from the documents.")
    first = reduce_parts(parts, limit)
    assert {"kept", "trimmed", "merged", "dropped"} == {decision.action for decision in first.documents}
    kept = {decision.id for decision in first.documents if decision.label}
    for _ in range(200):
        rng.shuffle(passages)
        result = reduce_parts(PromptParts(messages=parts.messages, passages=tuple(passages)), limit)
        assert {decision.id for decision in result.documents if decision.label} == kept
        assert outcome(result) == outcome(first)


def test_mixed_request_gives_the_same_bytes_200_times() -> None:
    history = [
        {"role": role, "content": f"{role} says {n}: {HARBOUR}"} for n in range(6) for role in ("user", "assistant")
    ]
    parts = make_parts(MIXED_QUESTION, passages=make_mixed(), history=history, system="Answer from the documents.")
    results = {msgspec.json.encode(msgspec.structs.replace(reduce_parts(parts, 900), stages=[])) for _ in range(200)}
    assert len(results) == 1


@pytest.mark.parametrize("limit", [120, 250, 600, 1500, 100_000])
@pytest.mark.parametrize("num_turns", [0, 3, 30])
def test_messages_of_a_result_reduced_again_are_the_same_bytes(limit: int, num_turns: int) -> None:
    history = [
        {"role": role, "content": f"Turn {n}: {HARBOUR[n * 7 : n * 7 + 200]}"}
        for n in range(num_turns)
        for role in ("user", "assistant")
    ]
    parts = make_parts(MIXED_QUESTION, passages=make_mixed(), history=history, system="Answer from the documents.")
    first = reduce_parts(parts, limit)
    again = reduce_parts(PromptParts(messages=tuple(first.messages)), limit)
    assert msgspec.json.encode(again.messages) == msgspec.json.encode(first.messages)
    assert again.prompt_tokens == again.original_prompt_tokens == first.prompt_tokens
    assert {turn.action for turn in again.turns} <= {"kept"}


def test_merged_passages_keep_one_label_and_all_sources() -> None:
    text = "Unit QX-471-KD failed in June 2024. The valve leaked at 12 bar."
    passages = (Passage(id="a", text="Bread is free."), Passage(id="b", text=text), Passage(id="c", text=text.upper()),
                Passage(id="d", text=f"<p>{text}</p>"))  # fmt: skip
    result = reduce_parts(PromptParts(messages=make_parts(QUESTION).messages, passages=passages))
    labelled = {decision.id: decision for decision in result.documents if decision.label}
    survivor = next(decision for decision in labelled.values() if decision.id != "a")
    assert sorted(survivor.sources) == ["b", "c", "d"]
    place = [passage.id for passage in passages].index(survivor.id) + 1
    assert survivor.label == f"[{place}]"
    assert str(result.messages[-1]["content"]).count(f"[{place}] ") == 1


def test_span_texts_compose() -> None:
    received = "<p>One  two</p><p>three</p>"
    outer = SpanText.join(received, [("", Span(3, 7)), ("", Span(8, 11)), ("\n", Span(18, 23))])
    assert outer.text == "One two\nthree"
    inner = SpanText.join(outer.text, [("", Span(4, 7)), ("", Span(7, 13))])
    narrowed = outer.narrow(received, inner)
    assert narrowed.text == "two\nthree"
    assert [received[start:end] for start, end in narrowed.spans] == ["two", "three"]
    assert outer.slice(4, 13) == narrowed
    assert outer.received_spans([Span(2, 9)]) == (Span(5, 7), Span(8, 11), Span(18, 19))
