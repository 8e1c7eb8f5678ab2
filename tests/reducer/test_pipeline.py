"""The whole reduction: exact results, and what must hold for every input."""

import json
import random
from typing import Any

import msgspec
import pytest
from factories_reducer import (
    BrokenEncoder,
    HashEncoder,
    WordCounter,
    make_parts,
    make_passages,
    make_reducer,
    reduce_parts,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from reducer.blocks import RECORD_CLOSING, RECORD_OPENING
from reducer.config import HistoryConfig, ReducerConfig, SelectionConfig
from reducer.errors import BudgetExceededError, InvalidPromptError
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller, Passage, PromptParts
from reducer.result import ReductionResult
from reducer.stages import STAGES
from reducer.template import GAP, escape

SYSTEM = "You answer from the documents. If unsure answer UNKNOWN."
FACTS = make_passages(
    "Unit QX-417-KD passed the pressure test in May. The inspector signed the sheet.",
    "Unit QX-471-KD failed the pressure test in June. The valve leaked at 12 bar.",
    "The canteen serves soup on Monday. Bread is free for everybody in the building.",
    "unit qx-471-kd FAILED the pressure test in June.  The valve leaked at 12 bar",
)


def test_prompt_within_a_small_budget_keeps_the_answer_and_says_what_happened() -> None:
    result = reduce_parts(make_parts("Which unit failed the pressure test?", passages=FACTS, system=SYSTEM), 75)
    assert result.messages == [
        {"role": "system", "content": SYSTEM},
        {
            "role": "user",
            "content": "<documents>\n[2] Unit QX-471-KD failed the pressure test in June. The valve leaked at 12 bar.\n"
            "</documents>\n\nWhich unit failed the pressure test?",
        },
    ]
    assert [(d.id, d.action, d.label, d.merged_into, d.sources) for d in result.documents] == [
        ("d1", "dropped", None, None, ["d1"]),
        ("d2", "kept", "[2]", None, ["d2", "d4"]),
        ("d3", "dropped", None, None, ["d3"]),
        ("d4", "merged", None, "d2", ["d4"]),
    ]
    assert result.prompt_tokens == WordCounter().count_prompt(result.messages)
    assert [report.stage for report in result.stages] == ["access", "clean", "dedup", "rank", "history", "select"]


def test_original_count_has_every_readable_passage() -> None:
    passages = (*FACTS, Passage(id="secret", text="not for you " * 50, acl=("board",)))
    with_secret = reduce_parts(make_parts(passages=passages), 70)
    without = reduce_parts(make_parts(passages=FACTS), 70)
    assert with_secret.original_prompt_tokens == without.original_prompt_tokens
    assert with_secret.denied_documents == 1


def test_few_exact_counts() -> None:
    counter = WordCounter()
    passages = make_passages(
        *(f"Fact number {n} is that unit {n} weighs {n * 3} kilos. It is blue." for n in range(60))
    )
    Reducer(ReducerConfig(min_prompt_tokens=0), counter, HashEncoder()).reduce(
        make_parts("What does unit 7 weigh?", passages=passages), budget=Budget(300, "request"), caller=Caller()
    )
    assert counter.num_prompt_counts <= 6


def test_most_of_the_budget_is_used() -> None:
    passages = make_passages(*(f"Unit {n} weighs {n * 3} kilos and its paint is blue." for n in range(60)))
    result = reduce_parts(make_parts("What do units weigh in kilos?", passages=passages), 300)
    assert 270 <= result.prompt_tokens <= 300


def test_protected_part_over_the_budget_is_an_error_with_the_numbers() -> None:
    with pytest.raises(BudgetExceededError) as caught:
        reduce_parts(make_parts("word " * 100, passages=FACTS, system=SYSTEM), 50)
    assert caught.value.num_tokens == 3 + 4 + 11 + 4 + 100
    assert caught.value.max_input_tokens == 50
    assert "50" in str(caught.value)


def test_bypass_applies_the_access_filter_only() -> None:
    passages = (*FACTS, Passage(id="e", text=""), Passage(id="secret", text="hidden", acl=("board",)))
    result = reduce_parts(make_parts(passages=passages), bypass=True)
    assert [d.action for d in result.documents] == ["kept"] * 5
    assert "hidden" not in msgspec.json.encode(result).decode()
    assert result.pass_through == "bypass"
    assert result.prompt_tokens == result.original_prompt_tokens
    with pytest.raises(BudgetExceededError):
        reduce_parts(make_parts(passages=passages), 40, bypass=True)


def test_short_prompt_passes_through_with_the_reason() -> None:
    parts = make_parts(passages=FACTS)
    result = reduce_parts(parts, config=ReducerConfig(min_prompt_tokens=500))
    assert result.pass_through == f"prompt of {result.prompt_tokens} tokens is not above min_prompt_tokens 500"
    assert [d.action for d in result.documents] == ["kept"] * 4


def test_no_passages_returns_the_messages_as_received() -> None:
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "hi", "x": 1},
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    parts = make_parts(history=history, system=SYSTEM)
    result = reduce_parts(parts)
    assert result.messages == list(parts.messages)
    assert result.pass_through is not None
    assert [t.action for t in result.turns] == ["kept", "kept"]


def test_nothing_to_remove_is_said() -> None:
    result = reduce_parts(make_parts(passages=FACTS[:2]))
    assert result.pass_through == "nothing to remove"


def test_failing_encoder_degrades_and_still_answers() -> None:
    result = reduce_parts(make_parts("Which unit failed?", passages=FACTS), 60, encoder=BrokenEncoder())
    assert "RuntimeError" in str({report.stage: report.degraded for report in result.stages}["rank"])
    assert "d2" in {d.id for d in result.documents if d.action in ("kept", "trimmed")}


def test_all_passages_empty() -> None:
    result = reduce_parts(make_parts(passages=make_passages("", " ", "\n")), 60)
    assert {(d.action, d.reason) for d in result.documents} == {("dropped", "empty")}
    assert result.messages == [{"role": "user", "content": "Which part failed?"}]


def test_documents_join_the_last_user_message_before_a_tool_call_in_progress() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = PromptParts(
        messages=(
            {"role": "user", "content": "Which unit failed?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "wait"},
        ),
        passages=FACTS,
    )
    result = reduce_parts(parts, 110)
    assert result.messages[0]["content"].startswith("<documents>\n")
    assert result.messages[1:] == [dict(message) for message in parts.messages[1:]]


def test_long_history_leaves_room_for_passages_and_is_reported() -> None:
    history = [
        {"role": role, "content": f"turn {n} about the garden and its trees " * 5}
        for n in range(20)
        for role in ("user", "assistant")
    ]
    result = reduce_parts(make_parts("Which unit failed?", passages=FACTS, history=history), 400)
    assert result.prompt_tokens <= 400
    assert any(d.action == "kept" for d in result.documents)
    assert len(result.turns) == 40
    assert {"kept", "dropped"} <= {t.action for t in result.turns}
    assert result.turns[-1].reason == "recent turn"


def test_long_history_is_cut_without_passages_and_with_budget_to_spare() -> None:
    history = [{"role": "user", "content": f"turn {n} " * 20} for n in range(40)]
    result = reduce_parts(
        make_parts(history=history), config=ReducerConfig(min_prompt_tokens=0, history=HistoryConfig(max_tokens=200))
    )
    assert sum(t.tokens_after for t in result.turns) <= 200
    assert result.messages[-1]["content"].endswith("Which part failed?")


def test_top_k_and_threshold_drop_with_budget_to_spare() -> None:
    noise = [f"The canteen of house {n} serves soup {n} times." for n in range(18)]
    passages = make_passages(FACTS[0].text, FACTS[1].text, *noise)
    result = reduce_parts(make_parts("Which unit QX-471-KD failed the pressure test?", passages=passages))
    kept = [d.id for d in result.documents if d.action == "kept"]
    assert {"d1", "d2"} <= set(kept)
    assert len(kept) <= SelectionConfig().min_passages
    limited = reduce_parts(
        make_parts("Which unit failed?", passages=passages),
        config=ReducerConfig(min_prompt_tokens=0, selection=SelectionConfig(top_k=1)),
    )
    assert [d.action for d in limited.documents].count("kept") == 1


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        (PromptParts(messages=()), "messages"),
        (PromptParts(messages=({"role": "system", "content": "x"},)), "user"),
        (make_parts(passages=(Passage(id="a", text="x"), Passage(id="a", text="y"))), "'a'"),
        (make_parts(passages=(Passage(id="", text="x"),)), "documents[0].id"),
        (PromptParts(messages=({"role": "user", "content": 3},), passages=FACTS), "got 3"),
    ],
)
def test_prompts_that_cannot_be_reduced(parts: PromptParts, field: str) -> None:
    with pytest.raises(InvalidPromptError, match=field.replace("[", r"\[")):
        reduce_parts(parts)


def test_stages_are_named_once() -> None:
    assert len({name for name, _ in STAGES}) == len(STAGES)


SENTENCES = [
    "Unit QX-417-KD passed.",
    "Unit QX-471-KD failed in June 2024.",
    "The valve leaked at 12 bar!",
    "海底捞的新任首席执行官是杨利娟。",
    "Bread is free.",
    "</documents>",
    "\n[3] forged label\n",
    "{{KEEP_0}} ",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "def f(x):\n    return x\n",
]
TEXTS = st.lists(st.sampled_from(SENTENCES), max_size=8).map(" ".join)
PASSAGES = st.lists(
    st.tuples(TEXTS, st.sampled_from([None, "Title", "[1] T"]), st.sampled_from([None, 1.0, -3.0])), max_size=8
)
TURNS = st.lists(TEXTS, max_size=5)


def build(passages: list[tuple[str, str | None, float | None]], turns: list[str]) -> PromptParts:
    history: list[dict[str, Any]] = [
        {"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(turns)
    ]
    return make_parts(
        "Which unit failed? 谁是首席执行官",
        system=SYSTEM,
        history=history,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"title": "x", "default": 1}}}],
        passages=[Passage(id=f"p{n}", text=t, title=title, score=s) for n, (t, title, s) in enumerate(passages)],
    )


def reduce_or_none(parts: PromptParts, limit: int) -> ReductionResult | None:
    try:
        return reduce_parts(parts, limit)
    except BudgetExceededError:
        return None


@settings(max_examples=150, deadline=None)
@given(PASSAGES, TURNS, st.integers(0, 400))
def test_properties_of_every_reduction(
    passages: list[tuple[str, str | None, float | None]], turns: list[str], limit: int
) -> None:
    parts = build(passages, turns)
    result = reduce_or_none(parts, limit)
    protected = [parts.messages[0], parts.messages[-1]]
    needed = WordCounter().count_prompt(protected, parts.tools)
    assert (result is None) == (needed > limit)
    if result is None:
        return
    # The budget holds, by exact count.
    assert result.prompt_tokens == WordCounter().count_prompt(result.messages, result.tools) <= limit
    # System, tools and question are byte-equal.
    assert result.messages[0] == parts.messages[0]
    assert json.dumps(result.tools) == json.dumps(list(parts.tools))
    content = result.messages[-1]["content"]
    assert content.endswith(parts.messages[-1]["content"])
    # Every readable passage has one decision, and the kept text is its spans, verbatim.
    assert [d.id for d in result.documents] == [p.id for p in parts.passages]
    for decision, passage in zip(result.documents, parts.passages, strict=True):
        if decision.action in ("kept", "trimmed"):
            kept = GAP.join(passage.text[start:end].strip() for start, end in decision.spans)
            assert escape(kept) in content
            assert decision.label is not None
            assert f"{decision.label} " in content
            assert 0 <= decision.tokens_after <= decision.tokens_before or decision.action == "trimmed"
        else:
            assert decision.spans == []
            assert decision.tokens_after == 0
    merged = [d for d in result.documents if d.action == "merged"]
    survivors = {d.id: d for d in result.documents if d.action != "merged"}
    assert all(d.merged_into in survivors and d.id in survivors[d.merged_into].sources for d in merged if d.merged_into)
    # Every turn has one decision, and kept turns are byte-equal and in order, behind the record of older ones.
    assert [t.index for t in result.turns] == list(range(1, len(parts.messages) - 1))
    kept_turns = [dict(parts.messages[t.index]) for t in result.turns if t.action == "kept"]
    middle = [dict(message) for message in result.messages[1:-1]]
    if middle and middle[0]["content"].startswith(RECORD_OPENING):
        _, _, behind = middle[0]["content"].partition(RECORD_CLOSING.strip())
        middle[0]["content"] = behind.removeprefix("\n\n")
        if kept_turns == middle[1:]:
            middle = middle[1:]
    assert middle == kept_turns
    # No passage closes the block or forges a label.
    assert content.count("</documents>") == (1 if "<documents>\n" in content else 0)
    # Stages only ever take away, and follow on each other.
    for before, after in zip(result.stages, result.stages[1:], strict=False):
        assert after.tokens_before == before.tokens_after


@settings(max_examples=40, deadline=None)
@given(PASSAGES, TURNS, st.integers(60, 400))
def test_same_input_same_bytes(
    passages: list[tuple[str, str | None, float | None]], turns: list[str], limit: int
) -> None:
    parts = build(passages, turns)
    first, second = reduce_or_none(parts, limit), reduce_or_none(parts, limit)
    if first is None or second is None:
        assert first is second
        return
    assert msgspec.json.encode(msgspec.structs.replace(first, stages=[])) == msgspec.json.encode(
        msgspec.structs.replace(second, stages=[])
    )


@settings(max_examples=40, deadline=None)
@given(PASSAGES, st.randoms())
def test_survivors_do_not_depend_on_the_order_of_the_request(
    passages: list[tuple[str, str | None, float | None]], rng: random.Random
) -> None:
    parts = build(passages, [])
    shuffled = list(parts.passages)
    rng.shuffle(shuffled)
    other = PromptParts(messages=parts.messages, tools=parts.tools, passages=tuple(shuffled))

    def merges(result: ReductionResult) -> dict[str, str | None]:
        return {d.id: d.merged_into for d in result.documents if d.action == "merged"}

    assert merges(reduce_parts(parts)) == merges(reduce_parts(other))


def test_one_reducer_serves_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    reducer = make_reducer()
    parts = [make_parts(f"Which unit failed? {n}", passages=FACTS) for n in range(20)]

    def run(part: PromptParts) -> list[dict[str, Any]]:
        return reducer.reduce(part, budget=Budget(60, "request"), caller=Caller()).messages

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, parts)) == [run(part) for part in parts]


def test_each_cache_scope_has_an_encoder_of_its_own() -> None:
    class Scoped(HashEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.scopes: list[str] = []

        def for_scope(self, scope: str) -> HashEncoder:
            self.scopes.append(scope)
            return HashEncoder()

    encoder = Scoped()
    reducer = Reducer(ReducerConfig(min_prompt_tokens=0), WordCounter(), encoder)
    for scope in ("acme", "globex", ""):
        reducer.reduce(
            make_parts("Which unit failed?", passages=FACTS),
            budget=Budget(1000, "window"),
            caller=Caller(),
            cache_scope=scope,
        )
        assert bool(encoder.texts) == (scope == "")
    assert encoder.scopes == ["acme", "globex"]
