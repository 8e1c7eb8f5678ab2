"""Who may read a passage, and that what nobody may read reaches nothing."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from factories_reducer import HashEncoder, WordCounter, make_parts, make_passages

from reducer.access import filter_readable
from reducer.config import ReducerConfig
from reducer.encoder import FloatArray
from reducer.errors import BudgetExceededError
from reducer.pipeline import Reducer
from reducer.prompt import AccessRule, Budget, Caller, Passage
from reducer.summary import SummaryCache

SECRET = "zanzibar"


@pytest.mark.parametrize(
    ("acl", "groups", "deny_unlabelled", "readable"),
    [
        (("staff",), {"staff", "public"}, False, True),
        (("staff", "board"), {"staff"}, False, True),
        (("board",), {"staff"}, False, False),
        (("Staff",), {"staff"}, False, False),
        ((), {"staff"}, False, False),
        (None, set(), False, True),
        (None, {"staff"}, True, False),
        (("staff",), {"staff"}, True, True),
        (AccessRule(any_of=("staff", "board")), {"board"}, False, True),
        (AccessRule(any_of=()), {"board"}, False, False),
        (AccessRule(all_of=("staff", "legal")), {"staff"}, False, False),
        (AccessRule(all_of=("staff", "legal")), {"staff", "legal", "x"}, True, True),
        (AccessRule(any_of=("staff",), all_of=("legal",)), {"legal"}, False, False),
        (AccessRule(any_of=("staff",), all_of=("legal",)), {"legal", "staff"}, False, True),
        (AccessRule(any_of=("staff",), deny=("intern",)), {"staff", "intern"}, False, False),
        (AccessRule(any_of=("staff",), deny=("intern",)), {"staff"}, False, True),
        (AccessRule(all_of=("staff",), deny=("staff",)), {"staff"}, False, False),
        (AccessRule(deny=("intern",)), set(), False, True),
        (AccessRule(deny=("intern",)), {"intern"}, False, False),
        (AccessRule(deny=("intern",)), {"staff"}, True, False),
        (AccessRule(), {"staff"}, True, False),
    ],
)
def test_acl(acl: tuple[str, ...] | AccessRule | None, groups: set[str], deny_unlabelled: bool, readable: bool) -> None:
    caller = Caller(groups=frozenset(groups), deny_unlabelled=deny_unlabelled)
    result = filter_readable([Passage(id="a", text="x", acl=acl)], caller)
    assert len(result.passages) == readable
    assert result.num_denied == (not readable)


def test_places_in_the_request_are_kept() -> None:
    passages = [Passage(id="a", text="x", acl=("board",)), Passage(id="b", text="y")]
    assert filter_readable(passages, Caller()).passages == ((1, passages[1]),)


class RecordingCounter(WordCounter):
    """Notes every text it is asked to count."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def count_text(self, text: str) -> int:
        """Tokens of a text."""
        self.texts.append(text)
        return super().count_text(text)

    def count_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Tokens of the rendered prompt."""
        self.texts.append(str(messages))
        return super().count_prompt(messages, tools)


class RecordingEncoder(HashEncoder):
    """Notes the texts it embeds, and fails where it is told to."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self._fails = fails

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Embed texts."""
        vectors = super().encode(texts)
        if self._fails:
            raise RuntimeError(str(texts))
        return vectors


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("acl", [("board",), AccessRule(deny=("staff",)), AccessRule(all_of=("staff", "board"))])
def test_denied_text_reaches_no_score_embedding_cache_log_receipt_or_error(
    acl: tuple[str, ...] | AccessRule, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"The vault in {SECRET} opens with the word heron. " * 3
    denied = Passage(
        id="denied", text=text, title=SECRET, source=SECRET, acl=acl, score=99.0, metadata={"note": SECRET}
    )
    readable = make_passages(*(f"House {n} has a vault that opens with word {n}." for n in range(12)))
    history = [{"role": "user", "content": f"Turn {n}"} for n in range(12)]
    counter, encoder, cache = RecordingCounter(), RecordingEncoder(fails=fails), SummaryCache(1_000_000)
    reducer = Reducer(ReducerConfig(min_prompt_tokens=0), counter, encoder, summary_cache=cache)
    caller = Caller(groups=frozenset({"staff"}))
    parts = make_parts("Which word opens the vault?", passages=[denied, *readable], history=history)
    with caplog.at_level(logging.DEBUG):
        result = reducer.reduce(parts, budget=Budget(150, "request"), caller=caller, cache_scope="tenant")
        with pytest.raises(BudgetExceededError) as caught:
            reducer.reduce(parts, budget=Budget(5, "request"), caller=caller)
    assert result.denied_documents == 1
    seen = [*counter.texts, *encoder.texts, caplog.text, str(caught.value), msgspec.json.encode(result).decode()]
    assert encoder.texts
    assert all(SECRET not in told and 'denied"' not in told.replace('denied_documents"', "") for told in seen)


def test_a_denied_passage_changes_nothing_for_the_others() -> None:
    readable = make_passages(*(f"House {n} has a vault that opens with word {n}." for n in range(12)))
    denied = Passage(id="x", text="vault word opens " * 9, acl=AccessRule(all_of=("board",)), score=99.0)
    results = [
        Reducer(ReducerConfig(min_prompt_tokens=0), WordCounter(), HashEncoder()).reduce(
            make_parts("Which word opens vault 7?", passages=passages), budget=Budget(90, "request"), caller=Caller()
        )
        for passages in ([*readable], [*readable, denied])
    ]
    assert results[0].messages == results[1].messages
    assert results[0].documents == results[1].documents
