"""What users of other reducers reported, as behaviour of ours: one small input for each kind."""

import time

import msgspec
import pytest
from factories_reducer import WordCounter, make_parts, make_passages, reduce_parts

from reducer.prompt import Caller, Passage

NOISE = [f"House {n} has a canteen that serves soup on day {n} of the week." for n in range(30)]


def test_closing_rule_of_the_instructions_survives_a_tight_budget() -> None:
    system = "Be brief. Be kind. Use the documents. Cite labels. Write English. If unsure answer UNKNOWN."
    result = reduce_parts(make_parts(passages=make_passages(*NOISE), system=system), 60)
    assert result.messages[0]["content"] == system


def test_identifiers_are_whole_or_absent() -> None:
    text = "Unit QX-417-KD passed in May after a long series of runs. Unit QX-471-KD failed at once in the first run."
    for limit in range(20, 70):
        content = str(reduce_parts(make_parts(passages=make_passages(text)), limit).messages[-1]["content"])
        for piece in ("QX-417-KD", "QX-471-KD"):
            assert content.count(piece[:5]) == content.count(piece)


def test_every_removed_line_is_accounted_for() -> None:
    lines = [f"2024-05-{n % 28 + 1:02} job {n} ended with state {n * 7}\n" for n in range(50)]
    text = "".join(lines)
    result = reduce_parts(make_parts("What was the state of job 31?", passages=make_passages(text)), 200)
    (decision,) = result.documents
    kept = "".join(text[start:end] for start, end in decision.spans)
    assert decision.action == "trimmed"
    assert "job 31 ended" in kept
    assert all(line in lines for line in kept.splitlines(keepends=True))
    assert 0 < decision.tokens_after < decision.tokens_before


def test_answer_in_the_last_line_of_one_huge_passage() -> None:
    text = "Nothing is said here about the matter. " * 2500 + "The vault opens with the word heron."
    result = reduce_parts(make_parts("With which word does the vault open?", passages=make_passages(text)), 120)
    assert "heron" in result.messages[-1]["content"]


@pytest.mark.parametrize("text", ["{{KEEP_0}} stays", "<<REF:1>> stays", "__PLACEHOLDER_3__ stays", "⟦0⟧ stays"])
def test_text_that_looks_like_a_marker_survives(text: str) -> None:
    result = reduce_parts(make_parts(passages=make_passages(text, *NOISE)), 2000)
    assert text in result.messages[-1]["content"] or result.documents[0].action == "dropped"
    assert text in reduce_parts(make_parts(text, passages=make_passages(text)), 2000).messages[-1]["content"]


def test_tool_schema_is_untouched() -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {
            "title": "T", "default": 1, "properties": {"description": {"type": "string"}, "default": {"title": "x"}}}}}
    ]  # fmt: skip
    assert reduce_parts(make_parts(passages=make_passages(*NOISE), tools=tools), 200).tools == tools


def test_every_kept_passage_maps_to_its_id_and_span() -> None:
    passages = make_passages(*(f"The river number {n} is {n * 11} km long and flows north." for n in range(8)))
    result = reduce_parts(make_parts("How long is river number 5?", passages=passages), 75)
    content = result.messages[-1]["content"]
    kept = [d for d in result.documents if d.label]
    assert kept
    for decision in kept:
        text = next(p.text for p in passages if p.id == decision.id)
        assert f"{decision.label} {''.join(text[s:e] for s, e in decision.spans).strip()}" in content


def test_nothing_relevant_is_no_crash() -> None:
    result = reduce_parts(make_parts("Zebra?", passages=make_passages(*NOISE[:5])), 12)
    assert [d.action for d in result.documents] == ["dropped"] * 5


def test_open_copy_of_a_restricted_text_stays() -> None:
    text = "The vault opens with the word heron."
    passages = (Passage(id="closed", text=text, acl=("board",), score=9), Passage(id="open", text=text, score=1))
    result = reduce_parts(make_parts("Which word?", passages=passages), caller=Caller(groups=frozenset({"staff"})))
    assert [(d.id, d.action, d.sources) for d in result.documents] == [("open", "kept", ["open"])]
    assert "closed" not in msgspec.json.encode(result).decode()
    assert text in result.messages[-1]["content"]


def test_unlabelled_passage_is_denied_where_the_tenant_says_so() -> None:
    passages = (Passage(id="a", text="alpha", acl=("staff",)), Passage(id="b", text="beta"))
    caller = Caller(groups=frozenset({"staff"}), deny_unlabelled=True)
    result = reduce_parts(make_parts(passages=passages), caller=caller)
    assert [d.id for d in result.documents] == ["a"]
    assert result.denied_documents == 1


def test_chinese_text_is_budgeted_by_the_tokenizer() -> None:
    text = "海底捞发布公告，任命新的首席执行官。" * 56
    result = reduce_parts(make_parts("谁是首席执行官？", passages=make_passages(text)), 900)
    assert result.prompt_tokens == WordCounter().count_prompt(result.messages) <= 900
    assert result.documents[0].action == "trimmed"


def test_all_text_parts_of_a_question_count_once() -> None:
    content = [
        {"type": "text", "text": "Which word"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}},
        {"type": "text", "text": "opens the vault"},
    ]
    parts = make_parts(passages=make_passages("The vault opens with the word heron.", *NOISE))
    messages = ({"role": "user", "content": content},)
    result = reduce_parts(type(parts)(messages=messages, passages=parts.passages), 100)
    assert result.messages[0]["content"][1:] == content
    assert "heron" in result.messages[0]["content"][0]["text"]


def test_noise_is_dropped_even_when_budget_is_free() -> None:
    good = ["The vault opens with the word heron.", "The word for the vault was chosen in 2020: heron."]
    result = reduce_parts(make_parts("With which word does the vault open?", passages=make_passages(*good, *NOISE)))
    kept = [d.id for d in result.documents if d.action == "kept"]
    assert {"d1", "d2"} <= set(kept)
    assert len(kept) <= 5


@pytest.mark.parametrize(
    "text",
    [
        "word. " * 170_000,
        "海底捞。" * 250_000,
        " " * 1_000_000 + "x",
        "\n" * 1_000_000,
        "." * 1_000_000,
        "<" * 1_000_000,
        "[1]\n" * 250_000,
        "“" * 1_000_000,
        "x" * 1_000_000,
    ],
    ids=["prose", "chinese", "spaces", "lines", "dots", "tags", "labels", "quotes", "one word"],
)
def test_a_passage_of_a_million_characters_is_no_trap(text: str) -> None:
    started = time.process_time()
    reduce_parts(make_parts("heron?", passages=make_passages(text, "The word is heron.")), 300)
    # Linear takes seconds; quadratic would take hours.
    assert time.process_time() - started < 120
