"""Undoing a reduction: what a receipt holds leads back from the prompt to everything that came in.

Here only the JSON of the receipt is read. Every byte of the prompt is explained by a decision and an original; putting
back what the decisions took out gives the request again.
"""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from factories_mixed import HARBOUR, QUESTION, make_mixed
from factories_reducer import WordCounter, make_parts, reduce_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from app.receipts import encode_receipt
from app.settings import ReceiptSettings
from reducer.blocks import RECALL_CLOSING, RECALL_OPENING, RECORD_CLOSING, RECORD_OPENING
from reducer.config import HistoryConfig, ReducerConfig, TemplateConfig
from reducer.errors import BudgetExceededError
from reducer.prompt import AccessRule, Passage, PromptParts
from reducer.template import CLOSING, GAP, OPENING, escape, render_heading

HISTORY = [
    {"role": role, "content": f"Turn {n} of {role}: {HARBOUR[n * 9 % 300 : n * 9 % 300 + 160]}", "name": f"{role}{n}"}
    for n in range(25)
    for role in ("user", "assistant")
]


def receipt_of(parts: PromptParts, limit: int, config: ReducerConfig | None = None) -> Any:
    """The receipt of a reduction, as a client reads it."""
    result = reduce_parts(parts, limit, config=config)
    return msgspec.json.decode(encode_receipt("rcpt_1", "default", parts, result, ReceiptSettings()))


def stated_spans(decision: Any, text: str) -> list[str]:
    """What a decision says is in the prompt of its passage."""
    spans = decision["spans"]
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    return [text[start:end] for start, end in spans]


def labels_of(receipt: Any) -> dict[str, Any]:
    """The passage that stands for each passage in the prompt, by id; none for those that nothing stands for."""
    by_id = {decision["id"]: decision for decision in receipt["documents"]}
    found = {}
    for decision in receipt["documents"]:
        seen = {decision["id"]}
        bearer = decision
        while bearer["label"] is None and bearer["merged_into"] is not None:
            bearer = by_id[bearer["merged_into"]]
            assert bearer["id"] not in seen, "a passage is merged into itself"
            seen.add(bearer["id"])
        if bearer["label"] is not None:
            assert decision["id"] in bearer["sources"]
            found[decision["id"]] = bearer
    return found


def original_text(originals: Any, decision: Any) -> str:
    return str(originals[decision["id"]]["text"])


def squash(text: str) -> str:
    return "".join(text.split())


def explain_block(receipt: Any, block: str) -> None:
    """Every entry of the documents block is its label, its title and spans of originals, in an order of the labels."""
    originals = {document["id"]: document for document in receipt["originals"]["documents"]}
    labelled = [decision for decision in receipt["documents"] if decision["label"] is not None]
    assert len({decision["label"] for decision in labelled}) == len(labelled)
    places = []
    for decision in labelled:
        original = originals[decision["id"]]
        heading = "\n" + render_heading(decision["label"], original["title"])
        assert block.count(heading) == 1, heading
        places.append((block.index(heading), heading, decision))
    places.sort(key=lambda place: place[0])
    ends = [start for start, _, _ in places[1:]] + [len(block)]
    rebuilt = ""
    for (start, heading, decision), end in zip(places, ends, strict=True):
        entry = block[start + len(heading) : end]
        windows = [other for other in receipt["documents"] if other["merged_into"] == decision["id"] and other["spans"]]
        stated = {other["id"]: stated_spans(other, originals[other["id"]]["text"]) for other in [decision, *windows]}
        if not windows:
            # Between two spans of a page stands layout, a bar between cells; all else are the characters of the spans.
            layout = "|" if "<td>" in original_text(originals, decision) else ""
            stated_text = squash(escape("".join(stated[decision["id"]]))).replace("…", "")
            assert squash(entry.replace(GAP, "")).replace(layout, "") == stated_text.replace(layout, "")
        else:
            pieces = [squash(escape(piece)) for spans in stated.values() for piece in spans]
            assert all(piece in squash(entry) for piece in pieces)
            assert max(map(len, pieces)) <= len(squash(entry)) <= sum(map(len, pieces)) + entry.count(GAP)
        rebuilt += heading + entry
    assert rebuilt == block


def undo(receipt: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and documents as received, put together from the prompt and the decisions."""
    originals = receipt["originals"]["messages"]
    turns = {turn["index"]: turn for turn in receipt["turns"]}
    sent = [dict(message) for message in receipt["messages"]]
    question = len(originals) - 1
    *before, last = sent
    content = last["content"]
    if RECORD_OPENING in content:
        content = content.partition(RECORD_CLOSING)[2]
    recalled, opening, rest = content.partition(RECALL_CLOSING)
    content = rest if opening else content
    if OPENING in content:
        block, _, content = content.removeprefix(OPENING).partition("\n" + CLOSING)
        explain_block(receipt, "\n" + block)
    last["content"] = content
    restored: list[dict[str, Any]] = []
    for index in range(question):
        action = turns[index]["action"] if index in turns else "kept"
        if action != "kept":
            if action == "recalled":
                assert originals[index]["content"] in recalled.removeprefix(RECALL_OPENING)
            restored.append(originals[index])
            continue
        message = before.pop(0)
        if str(message["content"]).startswith(RECORD_OPENING):
            behind = message["content"].partition(RECORD_CLOSING.strip())[2].removeprefix("\n\n")
            message = before.pop(0) if not behind else {**message, "content": behind}
        restored.append(message)
    assert not before, "a message that no decision explains"
    return [*restored, last], receipt["originals"]["documents"]


@pytest.mark.parametrize("order", ["input", "best_first", "best_last"])
@pytest.mark.parametrize("limit", [150, 300, 700, 1200, 2000, 100_000])
@pytest.mark.parametrize("num_turns", [0, 8, 50])
def test_receipt_leads_from_the_prompt_back_to_the_request(num_turns: int, limit: int, order: Any) -> None:
    passages = [*make_mixed(), Passage(id="secret", text="The board knows.", acl=("board",))]
    history = HISTORY[:num_turns]
    parts = make_parts(QUESTION, passages=passages, history=history, system="Answer from the documents.")
    config = ReducerConfig(min_prompt_tokens=0, template=TemplateConfig(document_order=order))
    receipt = receipt_of(parts, limit, config)
    messages, documents = undo(receipt)
    assert messages == [dict(message) for message in parts.messages]
    assert [(d["id"], d["text"], d["title"], d["source"], d["score"], d["metadata"]) for d in documents] == [
        (p.id, p.text, p.title, p.source, p.score, p.metadata) for p in passages[:-1]
    ]
    assert [decision["id"] for decision in receipt["documents"]] == [passage.id for passage in passages[:-1]]
    assert "board" not in msgspec.json.encode(receipt).decode()
    bearers = labels_of(receipt)
    assert all(decision["reason"] for decision in [*receipt["documents"], *receipt["turns"]])
    for decision in receipt["documents"]:
        if decision["action"] in ("kept", "trimmed"):
            assert bearers[decision["id"]] is decision
        elif decision["action"] == "dropped":
            assert decision["id"] not in bearers
            assert (decision["tokens_after"], decision["spans"]) == (0, [])


def test_each_kind_of_decision_is_undone() -> None:
    parts = make_parts(QUESTION, passages=make_mixed(), history=HISTORY, system="Answer from the documents.")
    seen, turns = set(), set()
    for limit in (150, 700, 2000, 100_000):
        config = ReducerConfig(min_prompt_tokens=0, history=HistoryConfig(max_tokens=600))
        receipt = receipt_of(parts, limit, config)
        seen |= {decision["action"] + ("/window" if decision["spans"] else "") for decision in receipt["documents"]}
        turns |= {turn["action"] for turn in receipt["turns"]}
    assert seen >= {"kept/window", "trimmed/window", "merged/window", "merged", "dropped"}
    assert turns >= {"kept", "summarised"}


def check_sums(receipt: Any) -> None:
    """Tokens of all decisions are those of the stages, and the stages follow on each other."""
    counter = WordCounter()
    titles = {document["id"]: document["title"] for document in receipt["originals"]["documents"]}
    stages, documents, turns = receipt["stages"], receipt["documents"], receipt["turns"]

    def heading(decision: Any, label: str) -> int:
        return counter.count_text(render_heading(label, titles[decision["id"]]))

    headings = sum(heading(decision, decision["label"]) for decision in documents if decision["label"])
    num_after = sum(decision["tokens_after"] for decision in documents) + headings
    num_after += sum(turn["tokens_after"] for turn in turns)
    told = " ".join(str(message["content"]) for message in receipt["messages"])
    if RECORD_OPENING in told or RECALL_OPENING in told:
        # The blocks of earlier turns have frames, which belong to no turn.
        assert num_after <= stages[-1]["tokens_after"]
    else:
        assert num_after == stages[-1]["tokens_after"]
    places = {document["id"]: place for place, document in enumerate(receipt["originals"]["documents"], 1)}
    num_before = sum(
        decision["tokens_before"] + heading(decision, f"[{places[decision['id']]}]") for decision in documents
    )
    assert stages[0]["tokens_before"] == num_before + sum(turn["tokens_before"] for turn in turns)
    for before, after in pairwise(stages):
        assert after["tokens_before"] == before["tokens_after"]
    assert receipt["saved_tokens"] == receipt["original_prompt_tokens"] - receipt["prompt_tokens"] >= 0
    assert receipt["prompt_tokens"] <= receipt["budget"]["max_input_tokens"]
    assert receipt["prompt_tokens"] == counter.count_prompt(receipt["messages"], receipt["tools"])
    for document in receipt["originals"]["documents"]:
        (decision,) = [decision for decision in documents if decision["id"] == document["id"]]
        assert decision["tokens_before"] == counter.count_text(document["text"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(make_mixed()), unique_by=lambda passage: passage.id, max_size=12),
    st.integers(0, 30),
    st.integers(30, 1500),
)
def test_receipt_adds_up_and_is_reversed_for_every_budget(passages: list[Passage], num_turns: int, limit: int) -> None:
    parts = make_parts(QUESTION, passages=passages, history=HISTORY[:num_turns], system="Answer from the documents.")
    try:
        receipt = receipt_of(parts, limit)
    except BudgetExceededError:
        return
    check_sums(receipt)
    assert undo(receipt)[0] == [dict(message) for message in parts.messages]
    labels_of(receipt)


def test_access_rules_come_back_as_they_were_sent() -> None:
    rules = [None, (), ("staff",), AccessRule(any_of=("staff",), deny=("guests",)), AccessRule(deny=("guests",))]
    passages = [Passage(id=f"p{n}", text=f"Text number {n} of the shelf.", acl=rule) for n, rule in enumerate(rules)]
    receipt = receipt_of(make_parts("Which text?", passages=passages), 1000)
    assert [(d["id"], d["acl"]) for d in receipt["originals"]["documents"]] == [
        ("p0", None),
        ("p4", {"all_of": [], "deny": ["guests"]}),
    ]
    assert receipt["denied_documents"] == 3
