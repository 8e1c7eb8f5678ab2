"""What users of other reducers reported about citations and copies, through the whole reducer."""

from collections.abc import Sequence

import pytest
from factories_reducer import make_parts, make_passages, reduce_parts

from reducer.clean import clean
from reducer.config import CleanConfig, ReducerConfig, SelectionConfig
from reducer.prompt import AccessRule, Caller, Passage
from reducer.result import ReductionResult
from reducer.run import make_candidate
from reducer.tokens import TokenCounter

LOGIN = "To {} two-factor login, open Settings, choose Security and press the switch beside the login method."
ELECTRON = "Twice the rest energy of the electron, {} MeV, is set free as two photons of equal energy."
PLAN = "The plan of {} costs {} dollars a year and covers five seats, support by mail and all updates."


class LetterCounter:
    """Counts letters, so that every cleaned text is shorter."""

    def count_text(self, text: str) -> int:
        """Letters of a text."""
        return len(text)

    def count_prompt(self, messages: object, tools: object = ()) -> int:
        """Letters of a prompt."""
        return len(str(messages)) + len(str(tools))


def merged(result: ReductionResult) -> dict[str, str | None]:
    return {decision.id: decision.merged_into for decision in result.documents if decision.action == "merged"}


def both(question: str, *texts: str) -> ReductionResult:
    return reduce_parts(make_parts(question, passages=make_passages(*texts)))


@pytest.mark.parametrize(
    ("question", "first", "second"),
    [
        ("What is twice the rest energy of the electron?", ELECTRON.format("1.022"), ELECTRON.format("1.032")),
        ("How do I change two-factor login?", LOGIN.format("enable"), LOGIN.format("disable")),
        ("What does the plan cost a year?", PLAN.format("2025", "240"), PLAN.format("2025", "480")),
        ("Which plan covers five seats?", PLAN.format("2025", "240"), PLAN.format("2026", "240")),
    ],
)
def test_passages_one_fact_apart_both_reach_the_prompt(question: str, first: str, second: str) -> None:
    content = both(question, first, second).messages[-1]["content"]
    assert first in content
    assert second in content


def test_records_in_one_template_are_not_taken_for_copies() -> None:
    recipes = [
        f"Recipe {n}. Take {n % 7 + 1} eggs, {n * 3 + 20} grams of flour and stir. Bake for {n % 40 + 5} minutes."
        " Let it cool, cut it into slices and serve it warm. Enjoy your meal with family and friends!"
        for n in range(200)
    ]
    result = both("How long does recipe 77 bake?", *recipes)
    assert merged(result) == {}
    assert recipes[77] in result.messages[-1]["content"]


def test_a_table_in_two_formats_reaches_the_prompt_once() -> None:
    rows = [("part", "price"), ("bolt", "3"), ("nut", "4"), ("washer", "5"), ("spring", "7")]
    markdown = "| part | price |\n|---|---|\n" + "\n".join(f"| {name} | {price} |" for name, price in rows[1:])
    html = "<table>" + "".join(f"<tr><td>{name}</td><td>{price}</td></tr>" for name, price in rows) + "</table>"
    result = both("What is the price of a washer?", markdown, html)
    assert len(merged(result)) == 1
    assert str(result.messages[-1]["content"]).count("washer") == 2  # once in the table, once in the question


@pytest.mark.parametrize("acl", [("board",), (), AccessRule(all_of=("staff", "board")), AccessRule(deny=("staff",))])
def test_a_better_copy_that_is_denied_takes_nothing_with_it(acl: Sequence[str] | AccessRule) -> None:
    text = "The vault opens with the word heron, and it is closed at noon."
    label = acl if isinstance(acl, AccessRule) else tuple(acl)
    passages = [Passage(id="closed", text=text, acl=label, score=9.0), Passage(id="open", text=text, score=1.0)]
    caller = Caller(groups=frozenset({"staff"}))
    result = reduce_parts(make_parts("With which word does the vault open?", passages=passages), caller=caller)
    assert [(d.id, d.action, d.sources) for d in result.documents] == [("open", "kept", ["open"])]


def test_every_span_in_the_prompt_leads_to_a_document_and_a_chunk() -> None:
    article = " ".join(f"Hall {n} of the museum shows {n * 3 + 1} ships from the {n}th century." for n in range(40))
    chunks = [
        Passage(id=f"doc-7#{start}", text=article[start : start + 400], source="doc-7")
        for start in range(0, len(article) - 200, 200)
    ]
    result = reduce_parts(make_parts("How many ships does hall 11 show?", passages=chunks), 180)
    content = str(result.messages[-1]["content"])
    texts = {chunk.id: chunk.text for chunk in chunks}
    labels = {decision.id: decision.label for decision in result.documents if decision.label}
    sent = [decision for decision in result.documents if decision.spans]
    assert labels
    assert "shows 34 ships" in content
    for decision in sent:
        assert decision.label or decision.merged_into in labels
        assert all(texts[decision.id][a:b].strip() in content for a, b in decision.spans)
    block = content.partition("<documents>\n")[2].partition("\n</documents>")[0]
    for label in labels.values():
        block = block.replace(f"{label} ", "", 1)
    for piece in (piece.strip() for line in block.split("\n") for piece in line.split(" … ")):
        covering = [decision.id for decision in sent if piece[:40] in texts[decision.id]]
        assert covering, piece


def test_nothing_above_a_high_floor_is_an_answerable_prompt() -> None:
    config = ReducerConfig(min_prompt_tokens=0, selection=SelectionConfig(top_k=1, relative_threshold=1.0))
    passages = make_passages(*(f"House {n} has a canteen." for n in range(5)))
    result = reduce_parts(make_parts("Zebra?", passages=passages), 12, config=config)
    assert [decision.action for decision in result.documents] == ["dropped"] * 5
    assert result.messages[-1]["content"] == "Zebra?"


def test_identity_travels_beside_the_text_through_every_transform() -> None:
    page = (
        "<html><body><nav><a>Home</a> <a>Contact</a></nav><p>The fee is 20 dollars for all members.</p></body></html>"
    )
    passage = Passage(
        id="a", text=page, title="Fees", source="wiki", score=0.5, acl=("staff",), metadata={"user": "u1", "n": [1]}
    )
    counter: TokenCounter = LetterCounter()
    (cleaned,) = clean([make_candidate(0, passage, counter)], "fee?", CleanConfig(), counter).kept
    assert cleaned.passage.text == "The fee is 20 dollars for all members."
    for name in ("id", "title", "source", "score", "acl", "metadata"):
        assert getattr(cleaned.passage, name) == getattr(passage, name)
    parts = make_parts("What is the fee?", passages=[passage])
    allowed, refused = (
        reduce_parts(parts, caller=Caller(groups=frozenset(groups))) for groups in ({"staff"}, {"public"})
    )
    assert ("20 dollars" in str(allowed.messages), "20 dollars" in str(refused.messages)) == (True, False)
