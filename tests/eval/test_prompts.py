"""Requests from cases, and the passages found again in the messages that come back."""

import pytest
from factories_eval import make_case, make_chunk, make_history_case

from eval.gateway import BudgetInForce, Compaction, DocumentDecision
from eval.prompts import SYSTEM_PROMPT, fixed_request, full_request, max_input_tokens, prove_documents, sent_context
from eval.samples import Turn
from eval.scoring import SearchText


def _compaction(*messages: tuple[str, object], documents: list[DocumentDecision] | None = None) -> Compaction:
    return Compaction(
        messages=[{"role": role, "content": content} for role, content in messages],
        prompt_tokens=1,
        original_prompt_tokens=1,
        budget=BudgetInForce(max_input_tokens=1, source="request"),
        documents=documents or [],
    )


def _kept(id: str, *spans: tuple[int, int], action: str = "kept") -> DocumentDecision:
    return DocumentDecision(id=id, action=action, spans=list(spans))


@pytest.mark.parametrize(
    ("budget", "fixed", "full", "limit"), [(0.1, 40, 3999, 439), (0.25, 0, 8, 2), (1.0, 7, 100, 107), (0.01, 5, 50, 5)]
)
def test_a_budget_leaves_at_most_its_share_beside_the_fixed_tokens(
    budget: float, fixed: int, full: int, limit: int
) -> None:
    assert max_input_tokens(budget, fixed_tokens=fixed, full_tokens=full) == limit


def test_documents_carry_no_labels() -> None:
    case = make_case([make_chunk("a", "Text.", gold=True, title="T", score=2.0, dup_of="b", support=["Text."])])
    assert full_request(case).documents == [{"id": "a", "text": "Text.", "title": "T", "score": 2.0}]


def test_fixed_request_is_the_case_without_documents_or_in_history_cases_without_history() -> None:
    chat = make_case([make_chunk("a")], history=[Turn(role="user", content="Before.")])
    assert [message["content"] for message in fixed_request(chat).messages] == [SYSTEM_PROMPT, "Before.", "What is it?"]
    assert not fixed_request(chat).documents
    history = make_history_case(["Before."], [])
    assert [message["role"] for message in fixed_request(history).messages] == ["system", "user"]
    assert [message["role"] for message in full_request(history).messages] == ["system", "user", "user"]


def test_the_question_and_earlier_turns_are_no_context() -> None:
    case = make_case([make_chunk("a")], question="Is it the answer?", history=[Turn(role="user", content="an answer")])
    sent = _compaction(
        ("system", SYSTEM_PROMPT), ("user", "an answer"), ("user", "[1] The passage.\n\nIs it the answer?")
    )
    context = sent_context(sent, case)
    assert not SearchText(context).states("answer")
    assert SearchText(context).states("the passage")


def test_parts_of_a_message_are_context_too() -> None:
    parts = [{"type": "text", "text": "The passage."}, {"type": "text", "text": "What is it?"}]
    assert "The passage." in sent_context(_compaction(("user", parts)), make_case([make_chunk("a")]))


def test_compacted_history_is_context_in_history_cases() -> None:
    case = make_history_case(["To San Jose."], [])
    sent = _compaction(("system", "You are a helpful assistant.\nSummary: trip."), ("user", "What is it?"))
    assert sent_context(sent, case).split() == ["Summary:", "trip."]


def test_kept_text_is_proven_span_by_span() -> None:
    case = make_case([make_chunk("a", "One is here. Two is there. Three.")])
    context = SearchText("One is here. … Three.")
    honest = prove_documents(_compaction(documents=[_kept("a", (0, 12), (27, 33), action="trimmed")]), case, context)
    assert (honest.kept, honest.unproven) == ({"a": [(0, 12), (27, 33)]}, [])
    lying = prove_documents(_compaction(documents=[_kept("a", (0, 26))]), case, context)
    assert (lying.kept, lying.unproven) == ({}, ["a"])


@pytest.mark.parametrize("spans", [[], [(0, 99)], [(5, 5)]], ids=["none", "past the end", "empty"])
def test_kept_without_valid_spans_is_unproven(spans: list[tuple[int, int]]) -> None:
    case = make_case([make_chunk("a", "Text of a.")])
    proven = prove_documents(_compaction(documents=[_kept("a", *spans)]), case, SearchText("Text of a."))
    assert proven.unproven == ["a"]


def test_decisions_on_documents_that_were_not_sent_are_unproven() -> None:
    proven = prove_documents(_compaction(documents=[_kept("z", (0, 1))]), make_case([make_chunk("a")]), SearchText("x"))
    assert proven.unproven == ["z"]


def test_merged_and_dropped_are_told_apart() -> None:
    decisions = [
        DocumentDecision(id="a", action="merged", merged_into="b"),
        DocumentDecision(id="b", action="dropped", reason="low score"),
        DocumentDecision(id="c", action="merged", merged_into="b", spans=[(0, 10)]),
    ]
    case = make_case([make_chunk("a"), make_chunk("b"), make_chunk("c", "Text of c.")])
    proven = prove_documents(_compaction(documents=decisions), case, SearchText("Text of c."))
    assert (proven.merged, proven.dropped, list(proven.kept)) == ({"a": "b"}, {"b": "low score"}, ["c"])
