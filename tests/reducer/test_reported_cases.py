"""What users of other reducers reported, as behaviour of ours: one small input for each kind."""

import time
from itertools import pairwise

import msgspec
import pytest
from factories_reducer import WordCounter, make_parts, make_passages, reduce_parts

from reducer.config import ReducerConfig
from reducer.prompt import Caller, Passage, PromptParts
from reducer.result import PassageDecision
from reducer.template import CLOSING, GAP, OPENING

NOISE = [f"House {n} has a canteen that serves soup on day {n} of the week." for n in range(30)]
PATHS = [f"src/module_{n}/file_{n}.py" for n in range(40)]


def test_closing_rule_of_the_instructions_survives_a_tight_budget() -> None:
    system = "Be brief. Be kind. Use the documents. Cite labels. Write English. If unsure answer UNKNOWN."
    question = "  Which house\tserves soup?\n\nName it. "
    result = reduce_parts(make_parts(question, passages=make_passages(*NOISE), system=system), 80)
    assert result.messages[0]["content"] == system
    assert result.messages[-1]["content"].endswith(CLOSING + question)
    assert {"kept", "dropped"} == {decision.action for decision in result.documents}


def test_tool_result_that_the_question_is_about_is_verbatim() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    messages = (
        {"role": "user", "content": "Is src/module_31/file_31.py there?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "\n".join(PATHS)},
    )
    result = reduce_parts(PromptParts(messages=messages, passages=make_passages(*NOISE)), 520)
    assert result.messages[1:] == [dict(message) for message in messages[1:]]
    assert "dropped" in {decision.action for decision in result.documents}


def test_listing_in_a_passage_is_cut_visibly_and_at_its_lines() -> None:
    listing = "".join(f"{path}\n" for path in PATHS)
    parts = make_parts("Is src/module_31/file_31.py there?", passages=make_passages(listing))
    block = (
        str(reduce_parts(parts, 200).messages[0]["content"]).removeprefix(f"{OPENING}[1] ").partition("\n" + CLOSING)
    )
    kept = [line for island in block[0].split(GAP) for line in island.split("\n")]
    assert PATHS[31] in kept
    assert len(kept) < 40
    assert kept == [path for path in PATHS if path in kept]
    assert block[0].count(GAP) == sum(PATHS.index(b) != PATHS.index(a) + 1 for a, b in pairwise(kept))


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
    # What was taken out is what the spans leave over: kept and removed lines are all fifty, in their places.
    edges = [0, *(edge for span in decision.spans for edge in span), len(text)]
    removed = "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    assert len(kept.splitlines()) + len(removed.splitlines()) == 50
    assert sorted(kept.splitlines() + removed.splitlines()) == sorted(text.splitlines())


def test_every_removed_passage_has_a_reason_and_its_tokens() -> None:
    lines = [f"2024-05-{n % 28 + 1:02} job {n} ended with state {n * 7}" for n in range(50)]
    result = reduce_parts(make_parts("What was the state of job 31?", passages=make_passages(*lines)), 400)
    gone = [decision for decision in result.documents if decision.label is None]
    assert len(result.documents) == 50
    assert 0 < len(gone) < 50
    for decision in gone:
        assert decision.reason
        assert (decision.tokens_before, decision.tokens_after) == (WordCounter().count_text(lines[0]), 0)


def test_request_that_can_gain_nothing_passes_through_as_it_is_and_says_why() -> None:
    parts = make_parts("Which house serves soup?", passages=make_passages(*NOISE[:3]), system="Be brief.")
    result = reduce_parts(parts, config=ReducerConfig())
    assert 60 < result.prompt_tokens == result.original_prompt_tokens < 100
    assert result.pass_through == f"prompt of {result.prompt_tokens} tokens is not above min_prompt_tokens 100"
    assert [stage.stage for stage in result.stages] == ["access"]
    block = "\n".join(f"[{n}] {text}" for n, text in enumerate(NOISE[:3], 1))
    assert result.messages[-1]["content"] == f"{OPENING}{block}\n{CLOSING}Which house serves soup?"


def test_answer_in_the_last_line_of_one_huge_passage() -> None:
    text = "Nothing is said here about the matter. " * 2500 + "The vault opens with the word heron."
    result = reduce_parts(make_parts("With which word does the vault open?", passages=make_passages(text)), 120)
    assert "heron" in result.messages[-1]["content"]


@pytest.mark.parametrize("text", ["{{KEEP_0}} stays", "<<REF:1>> stays", "__PLACEHOLDER_3__ stays", "⟦0⟧ stays"])
def test_text_that_looks_like_a_marker_survives(text: str) -> None:
    result = reduce_parts(make_parts(passages=make_passages(text, *NOISE)), 2000)
    assert text in result.messages[-1]["content"] or result.documents[0].action == "dropped"
    assert text in reduce_parts(make_parts(text, passages=make_passages(text)), 2000).messages[-1]["content"]


def test_prompt_holds_no_word_but_those_of_the_request_and_the_template() -> None:
    history = [
        {"role": role, "content": f"Turn {n} is about the garden of house {n} and its old trees."}
        for n in range(40)
        for role in ("user", "assistant")
    ]
    parts = make_parts("Which house serves soup on day 7?", passages=make_passages(*NOISE, *NOISE[:5]))
    result = reduce_parts(parts, 300)
    words = set(" ".join([*NOISE, "Which house serves soup on day 7?"]).split())
    labels = {f"[{n}]" for n in range(1, 36)} | {"<documents>", "</documents>", "…"}
    assert set(result.messages[-1]["content"].split()) <= words | labels
    assert {decision.action for decision in result.documents} == {"kept", "merged", "dropped"}
    with_history = reduce_parts(make_parts("And now?", history=history), 300)
    told = " ".join(str(message["content"]) for message in with_history.messages)
    for marker in ("{{", "}}", "<<", ">>", "⟦", "REF", "KEEP", "retrieve", "omitted", "compressed"):
        assert marker not in told


def test_arguments_of_tool_calls_are_never_edited_by_key_name() -> None:
    arguments = '{"title": "T",  "description": null, "default": [1, 2], "examples": {"type": "caf\\u00e9"}, "": 0}'
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, "description": "keep"}
    messages = (
        {"role": "user", "content": "Which house serves soup?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "title": "keep"},
        {"role": "tool", "tool_call_id": "c1", "content": "none", "default": {"description": 1}},
        {"role": "assistant", "content": "None did."},
        {"role": "user", "content": "And on day 7?"},
    )
    result = reduce_parts(PromptParts(messages=messages, passages=make_passages(*NOISE)), 300)
    assert msgspec.json.encode(result.messages[:-1]) == msgspec.json.encode(messages[:-1])


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


PAIRS = {
    "constant": (
        "A pair of electrons appears when a photon has at least 1.022 MeV, twice their mass at rest.",
        "A pair of electrons appears when a photon has at least 1.032 MeV, twice their mass at rest.",
    ),
    "polarity": (
        "How to enable two-factor login: open the settings, choose Security, press the button and confirm by mail.",
        "How to disable two-factor login: open the settings, choose Security, press the button and confirm by mail.",
    ),
    "price": (
        "The team plan costs 240 euros a year and comes with ten seats and support by mail.",
        "The team plan costs 480 euros a year and comes with ten seats and support by mail.",
    ),
    "year": (
        "Under the policy of 2025 employees may work from home on three days of each week.",
        "Under the policy of 2026 employees may work from home on three days of each week.",
    ),
    "chinese": (
        "根据二〇二五年的规定，员工每周可以在家工作三天，并须提前一天通知经理。",
        "根据二〇二六年的规定，员工每周可以在家工作三天，并须提前一天通知经理。",
    ),
}
QUESTIONS = {
    "constant": "How many MeV must a photon have for a pair of electrons?",
    "polarity": "How do I enable or disable two-factor login?",
    "price": "What does the team plan cost a year?",
    "year": "What does the policy say about work from home?",
    "chinese": "员工每周可以在家工作几天？",
}


@pytest.mark.parametrize("kind", PAIRS)
def test_passages_that_differ_in_one_fact_are_both_in_the_prompt(kind: str) -> None:
    pair = PAIRS[kind]
    for texts in (pair, pair[::-1]):
        result = reduce_parts(make_parts(QUESTIONS[kind], passages=make_passages(*texts, texts[0], *NOISE)))
        assert [decision.action for decision in result.documents[:3]] == ["kept", "kept", "merged"]
        assert all(result.messages[-1]["content"].count(text) == 1 for text in texts)


def test_records_in_one_template_are_no_duplicates() -> None:
    foods = ["rice", "beans", "squash", "leek", "tofu", "salmon", "egg", "kale", "lentil", "oat", "plum", "corn"]
    recipes = [
        f"Recipe for {foods[n % 12]} with {foods[n // 12 % 12]} no. {n}. Put {n + 2} grams of {foods[n % 7]} in a pot,"
        " add water and salt, stir well, let it cook and serve it warm. Enjoy your meal!"
        for n in range(200)
    ]
    result = reduce_parts(make_parts("Which recipe has plum?", passages=make_passages(*recipes)), 4000)
    assert "merged" not in {decision.action for decision in result.documents}
    assert "plum" in result.messages[-1]["content"]


def test_table_as_html_and_as_markdown_is_sent_once() -> None:
    rows = [("Plan", "Price", "Seats"), *((f"P{n}", f"{n * 15} euros", f"{n + 2}") for n in range(1, 7))]
    markdown = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    markdown = markdown.replace("\n", "\n|---|---|---|\n", 1)
    html = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    result = reduce_parts(
        make_parts("What does plan P3 cost?", passages=make_passages(f"<table>{html}</table>", markdown, *NOISE[:5]))
    )
    assert [decision.action for decision in result.documents[:2]].count("merged") == 1
    assert result.messages[-1]["content"].count("45 euros") == 1


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


def test_scale_of_the_retriever_changes_no_decision() -> None:
    texts = ["The vault opens with the word heron.", "The word for the vault was chosen in 2020: heron.", *NOISE]
    question = "With which word does the vault open?"

    def decide(low: float, high: float) -> list[PassageDecision]:
        # Halves first: the distance between the largest numbers is larger than any number.
        scores = [low * (n / len(texts)) + high * (1 - n / len(texts)) for n in range(len(texts))]
        passages = [Passage(id=f"d{n}", text=text, score=scores[n]) for n, text in enumerate(texts)]
        return reduce_parts(make_parts(question, passages=passages)).documents

    expected = decide(0.0, 1.0)
    assert [decision.action for decision in expected].count("kept") >= 2
    for scale in ((-10.0, 3.0), (-1e9, -1e8), (0.0, 1e-12), (-1e308, 1e308)):
        found = decide(*scale)
        assert [(d.action, d.spans) for d in found] == [(d.action, d.spans) for d in expected]
        assert [d.score for d in found] == pytest.approx([d.score for d in expected], abs=1e-4)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_score_that_is_no_finite_number_counts_as_none(score: float) -> None:
    texts = ["The vault opens with the word heron.", "The word for the vault was chosen in 2020: heron.", *NOISE]

    def decide(odd: float | None) -> list[PassageDecision]:
        passages = [Passage(id=f"d{n}", text=text, score=odd if n % 3 == 1 else n) for n, text in enumerate(texts)]
        return reduce_parts(make_parts("With which word does the vault open?", passages=passages)).documents

    assert decide(score) == decide(None)
    assert all(decision.score is None or 0 <= decision.score <= 1 for decision in decide(score))


def test_row_of_a_long_price_table_comes_with_the_header() -> None:
    header = "| Article | Price | Stock |\n|---|---|---|\n"
    rows = [f"| AX-{n} | {n * 3 + 10} euros | {n % 9} |\n" for n in range(1, 41)]
    parts = make_parts("What does AX-33 cost?", passages=make_passages(header + "".join(rows)))
    result = reduce_parts(parts, 120)
    (decision,) = result.documents
    text = parts.passages[0].text
    kept = [line for start, end in decision.spans for line in text[start:end].splitlines(keepends=True)]
    assert decision.action == "trimmed"
    assert "".join(kept[:2]) == header
    assert rows[32] in kept
    assert set(kept[2:]) < set(rows)


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
