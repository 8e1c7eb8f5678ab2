"""The order of the passages: policies, reuse of served prompts, and its limit."""

import itertools
import threading

import pytest
from factories_reducer import HashEncoder, WordCounter, make_parts, make_passages
from hypothesis import given, settings
from hypothesis import strategies as st

from reducer.config import ReducerConfig, SelectionConfig, TemplateConfig
from reducer.ordering import OrderMemory, order_documents, order_for_reuse, passage_key, prefix_key, rank_loss
from reducer.pipeline import Reducer
from reducer.prompt import Budget, Caller, Passage, PromptParts
from reducer.result import ReductionResult
from reducer.stage import Candidate, Selected, whole_spans


def select(name: str, score: float, position: int = 0) -> Selected:
    passage = Passage(id=name, text=f"text of {name}")
    return Selected(Candidate(passage, position, 10, 2, (name,), score=score), whole_spans(passage.text), 10, "")


def names(items: list[Selected]) -> str:
    return "".join(item.candidate.passage.id for item in items)


def keys(served: str) -> list[bytes]:
    return [passage_key(select(name, 0.0)) for name in served]


def test_order_policies() -> None:
    selected = [select("a", 0.5, 0), select("b", 0.9, 1), select("c", 0.5, 2)]
    assert names(order_documents(selected[::-1], "input")) == "abc"
    assert names(order_documents(selected, "best_first")) == "bac"
    assert names(order_documents(selected, "best_last")) == "cab"
    assert [item.candidate.label for item in order_documents(selected, "best_last")] == ["[3]", "[1]", "[2]"]


def test_cache_order_does_not_depend_on_the_order_of_the_request() -> None:
    selected = [select(name, 0.5, place) for place, name in enumerate("abcd")]
    orders = {names(order_documents(list(order), "cache")) for order in itertools.permutations(selected)}
    assert len(orders) == 1


def test_served_beginning_comes_first_and_the_rest_best_last() -> None:
    selected = [select("a", 0.3), select("b", 0.2), select("c", 0.4), select("d", 0.9)]
    arranged = order_for_reuse(selected, [keys("abx")], 1.0)
    assert names(arranged) == "abcd"
    assert [item.candidate.label for item in arranged] == ["[1]", "[2]", "[3]", "[4]"]


def test_longest_shared_beginning_wins_and_the_latest_of_equals() -> None:
    selected = [select(name, 0.5) for name in "abcd"]
    assert names(order_for_reuse(selected, [keys("d"), keys("cba"), keys("bax")], 1.0))[:3] == "cba"
    assert names(order_for_reuse(selected, [keys("db"), keys("ca")], 1.0))[:2] == "db"


def test_rank_loss_limits_how_much_is_shared() -> None:
    selected = [select("a", 0.9), select("b", 0.2), select("c", 0.1)]
    served = [keys("bac")]
    assert names(order_for_reuse(selected, served, 1.0)) == "bac"
    assert names(order_for_reuse(selected, served, 0.2)) == "bca"
    assert names(order_for_reuse(selected, [keys("abc")], 0.0)) == "cba"


@pytest.mark.parametrize(("order", "loss"), [("cba", 0.0), ("abc", 1.0), ("bca", 0.0625)])
def test_rank_loss_is_the_share_of_score_differences_the_wrong_way_round(order: str, loss: float) -> None:
    scores = {"a": 0.9, "b": 0.2, "c": 0.1}
    assert rank_loss([select(name, scores[name]) for name in order]) == pytest.approx(loss, abs=1e-9)
    assert rank_loss([select("a", 0.5), select("b", 0.5)]) == 0.0


@settings(deadline=None)
@given(
    st.permutations("abcdef"),
    st.permutations("abcdefxy"),
    st.floats(0, 1),
    st.lists(st.floats(0, 1), min_size=6, max_size=6),
)
def test_reuse_keeps_every_passage_once_and_stays_within_the_loss(
    given_order: list[str], served: list[str], max_loss: float, scores: list[float]
) -> None:
    selected = [select(name, score) for name, score in zip(given_order, scores, strict=True)]
    arranged = order_for_reuse(selected, [keys("".join(served))], max_loss)
    assert sorted(names(arranged)) == list("abcdef")
    assert rank_loss(arranged) <= max_loss + 1e-9
    assert arranged == order_for_reuse(selected[::-1], [keys("".join(served))], max_loss)


def test_equal_passages_are_all_kept() -> None:
    twins = [select("a", 0.5, 0), select("a", 0.5, 1), select("b", 0.1, 2)]
    assert sorted(names(order_for_reuse(twins, [keys("aab")], 1.0))) == list("aab")


def test_memory_is_bounded_and_separates_scopes() -> None:
    memory = OrderMemory(max_prefixes=2, max_sequences=2)
    acme, globex = prefix_key("acme", "system"), prefix_key("globex", "system")
    for served in ("ab", "cd", "ef"):
        memory.remember(acme, keys(served))
    assert memory.recent(acme) == (tuple(keys("ef")), tuple(keys("cd")))
    assert memory.recent(globex) == ()
    memory.remember(globex, keys("a"))
    memory.remember(prefix_key("third"), keys("a"))
    assert memory.recent(acme) == ()
    memory.remember(globex, ())
    assert memory.recent(globex) == (tuple(keys("a")),)


def test_scope_and_text_do_not_run_together() -> None:
    assert prefix_key("ab", "c") != prefix_key("a", "bc")
    assert all(b"text" not in key for key in keys("abc"))


def test_memory_serves_threads() -> None:
    memory = OrderMemory(max_prefixes=4, max_sequences=4)

    def work(number: int) -> None:
        for step in range(300):
            memory.remember(prefix_key(str(step % 6)), keys("abc"[number % 3 :]))
            memory.recent(prefix_key(str(step % 6)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(bool(memory.recent(prefix_key(str(step)))) for step in range(6)) == 4


DOCUMENTS = make_passages(*(f"Unit {n} weighs {n * 3} kilos and failed in test {n + 50}." for n in range(1, 6)))
CONFIG = ReducerConfig(
    min_prompt_tokens=0,
    template=TemplateConfig(document_order="cache", max_rank_loss=1.0),
    selection=SelectionConfig(min_passages=5),
)


def ask(memory: OrderMemory, passages: tuple[Passage, ...], question: str, scope: str = "acme") -> ReductionResult:
    reducer = Reducer(CONFIG, WordCounter(), HashEncoder(), order_memory=memory)
    parts = make_parts(question, passages=passages, system="Answer from the documents.")
    return reducer.reduce(parts, budget=Budget(10_000, "request"), caller=Caller(), cache_scope=scope)


def block(result: ReductionResult) -> str:
    return str(result.messages[-1]["content"]).split("</documents>")[0]


def test_five_documents_in_two_orders_share_the_whole_block() -> None:
    memory = OrderMemory()
    first = ask(memory, DOCUMENTS, "Which unit failed in test 53?")
    second = ask(memory, DOCUMENTS[::-1], "What does unit 5 weigh in kilos?")
    assert block(first) == block(second)
    labels = {document.id: document.label for document in second.documents}
    for passage in DOCUMENTS:
        assert f"{labels[passage.id]} {passage.text}" in block(second)


def test_another_tenant_or_no_scope_or_another_system_text_does_not_see_what_was_served() -> None:
    memory = OrderMemory()
    ask(memory, DOCUMENTS, "Which unit failed in test 53?")
    alone = ask(OrderMemory(), DOCUMENTS[::-1], "What does unit 5 weigh in kilos?")
    assert block(ask(memory, DOCUMENTS[::-1], "What does unit 5 weigh in kilos?", scope="globex")) == block(alone)
    assert block(ask(memory, DOCUMENTS[::-1], "What does unit 5 weigh in kilos?", scope=" ")) == block(alone)


def test_growing_context_keeps_its_beginning() -> None:
    memory = OrderMemory()
    first = ask(memory, DOCUMENTS[:3], "Which unit failed?")
    second = ask(memory, (DOCUMENTS[4], *DOCUMENTS[:3], DOCUMENTS[3]), "Which unit failed?")
    assert block(second).startswith(block(first).rstrip("\n"))


def test_order_is_the_same_over_shuffled_repeats() -> None:
    blocks = set()
    for number, passages in enumerate(itertools.permutations(DOCUMENTS)):
        parts = PromptParts(messages=make_parts("Which unit failed in test 53?").messages, passages=passages)
        reducer = Reducer(CONFIG, WordCounter(), HashEncoder())
        blocks.add(block(reducer.reduce(parts, budget=Budget(10_000, "request"), caller=Caller())))
        if number >= 60:
            break
    assert len(blocks) == 1
