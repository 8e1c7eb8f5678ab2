"""Overlapping windows of one source become one passage, and every character of it leads back to its window."""

import random
import time
from dataclasses import replace

import pytest
from factories_reducer import WordCounter, make_parts, reduce_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from reducer.config import DedupConfig, ReducerConfig, SelectionConfig
from reducer.prompt import Passage
from reducer.receipt import decide_documents
from reducer.run import make_candidate
from reducer.stage import Selected, Span, whole_spans
from reducer.stitching import own_sizes, stitch, window_spans

ARTICLE = (
    "The harbour was opened in 1912 by the city council. Its first crane lifted 40 tons and was built in Leeds. "
    "In 1931 a second basin was dug for coal ships. The coal trade ended in 1968, and the basin was filled. "
    "Today the harbour handles 1.2 million containers a year. The port authority employs 850 people. "
    "A new terminal is planned for 2031 on the north bank, with rail access for freight trains."
)
CHINESE = "港口于一九一二年由市议会启用。第一台起重机可吊起四十吨货物，产自利兹。一九三一年为运煤船开挖了第二个港池。"
KEEP_ALL = ReducerConfig(min_prompt_tokens=0, selection=SelectionConfig(relative_threshold=0.0, min_passages=100))


def choose(*passages: Passage) -> list[Selected]:
    candidates = [make_candidate(position, passage, WordCounter()) for position, passage in enumerate(passages)]
    return [Selected(c, whole_spans(c.passage.text), c.num_tokens, "relevant") for c in candidates]


def cut(text: str, size: int, stride: int, source: str = "harbour") -> list[Passage]:
    return [
        Passage(id=f"w{start:03}", text=text[start : start + size], source=source)
        for start in range(0, max(len(text) - size, 0) + stride, stride)
        if start < len(text)
    ]


def stitched(*passages: Passage, min_overlap_chars: int = 60) -> list[Selected]:
    config = DedupConfig(min_overlap_chars=min_overlap_chars)
    return list(stitch(choose(*passages), config, WordCounter()))


def text_of(item: Selected) -> str:
    return item.candidate.passage.text


def test_two_overlapping_windows_are_one_passage() -> None:
    windows = cut(ARTICLE[:300], 200, 100)
    (joined,) = stitched(*windows[:2])
    assert text_of(joined) == ARTICLE[:300]
    assert joined.spans == whole_spans(ARTICLE[:300])
    assert joined.candidate.passage.id == "w000"
    assert joined.candidate.sources == ("w000", "w100")
    assert joined.num_tokens == WordCounter().count_text(ARTICLE[:300])
    assert joined.reason == "relevant, stitched of 2 windows"


def test_a_chain_of_windows_gives_the_document_back() -> None:
    (joined,) = stitched(*cut(ARTICLE, 160, 80))
    assert text_of(joined) == ARTICLE


def test_scripts_without_spaces_are_stitched_by_weight() -> None:
    (joined,) = stitched(*cut(CHINESE, 36, 18))
    assert text_of(joined) == CHINESE


@pytest.mark.parametrize(
    "second",
    [
        Passage(id="b", text=ARTICLE[100:300], source="other"),
        Passage(id="b", text=ARTICLE[100:300], source=None),
        Passage(id="b", text=ARTICLE[100:300], source="harbour", title="Ports"),
        Passage(id="b", text=ARTICLE[170:300], source="harbour"),
        Passage(id="b", text=ARTICLE[100:300].replace("Leeds", "Derby"), source="harbour"),
    ],
    ids=["other source", "no source", "other title", "little overlap", "another name in the overlap"],
)
def test_what_is_no_window_of_the_same_text_stays_apart(second: Passage) -> None:
    first = Passage(id="a", text=ARTICLE[:200], source="harbour")
    assert [text_of(item) for item in stitched(first, second)] == [first.text, second.text]


def test_what_is_cut_from_both_windows_stays_cut() -> None:
    first, second = choose(*cut(ARTICLE[:300], 200, 100)[:2])
    items = [replace(first, spans=(Span(0, 52),), reason="cut"), replace(second, spans=(Span(8, 100), Span(150, 200)))]
    (joined,) = stitch(items, DedupConfig(), WordCounter())
    assert joined.spans == (Span(0, 52), Span(108, 200), Span(250, 300))
    assert joined.candidate.passage.id == "w100"
    assert joined.candidate.label == "[2]"
    assert joined.candidate.sources == ("w100", "w000")


def test_a_shared_sentence_kept_of_both_windows_is_kept_once() -> None:
    first, second = choose(*cut(ARTICLE[:300], 200, 100)[:2])
    items = [replace(first, spans=(Span(108, 180),)), replace(second, spans=(Span(8, 80),))]
    (joined,) = stitch(items, DedupConfig(), WordCounter())
    assert joined.spans == (Span(108, 180),)


def test_the_best_score_of_the_windows_is_the_score_and_the_first_place_the_place() -> None:
    first, second = choose(*cut(ARTICLE[:300], 200, 100)[:2])
    (other,) = choose(Passage(id="z", text="Bread is free."))
    items = [
        replace(second, candidate=replace(second.candidate, score=0.9)),
        other,
        replace(first, candidate=replace(first.candidate, score=0.4)),
    ]
    joined, last = stitch(items, DedupConfig(), WordCounter())
    assert (joined.candidate.score, last) == (0.9, other)


def test_switched_off_leaves_windows_apart() -> None:
    items = choose(*cut(ARTICLE, 160, 80))
    assert stitch(items, DedupConfig(stitch=False), WordCounter()) == tuple(items)


def test_a_text_that_repeats_itself_does_not_follow_itself() -> None:
    text = "The fee is due in May, and it is due again in autumn, when the year ends. " * 3
    windows = [Passage(id=name, text=text[start:], source="s") for name, start in (("a", 0), ("b", 30))]
    assert all(window.text in "".join(map(text_of, stitched(*windows))) for window in windows)


def test_order_of_the_request_does_not_change_what_is_stitched() -> None:
    windows = cut(ARTICLE, 160, 80)
    expected = [(text_of(item), item.spans, item.candidate.sources) for item in stitched(*windows)]
    rng = random.Random(3)
    for _ in range(20):
        rng.shuffle(windows)
        assert [(text_of(item), item.spans, item.candidate.sources) for item in stitched(*windows)] == expected


@settings(deadline=None, max_examples=60)
@given(
    st.text(alphabet="ab c.\n", min_size=60, max_size=240),
    st.integers(40, 90),
    st.lists(st.tuples(st.integers(0, 240), st.integers(1, 80)), max_size=5),
)
def test_every_character_leads_back_to_its_window(text: str, size: int, cuts: list[tuple[int, int]]) -> None:
    windows = cut(text, size, max(size // 2, 1))
    texts = {window.id: window.text for window in windows}
    for joined in stitched(*windows, min_overlap_chars=12):
        whole = text_of(joined)
        assert all(texts[source].strip() in whole for source in joined.candidate.sources)
        if not joined.candidate.windows:
            continue
        assert sum(own_sizes(joined)) == len(whole)
        spans = tuple(Span(low, min(low + n, len(whole))) for low, n in sorted(cuts) if low < len(whole))
        for (own, found), window in zip(
            window_spans(replace(joined, spans=spans)), joined.candidate.windows, strict=True
        ):
            for span in found:
                at = span.start - window.span.start + window.start
                assert own.passage.text[span.start : span.end] == whole[at : at + span.end - span.start]


def test_receipt_shows_for_each_window_what_is_in_the_prompt() -> None:
    windows = cut(ARTICLE, 160, 80)
    items = choose(*windows)
    decisions = decide_documents(
        [item.candidate for item in items], stitch(items, DedupConfig(), WordCounter()), filtered=[]
    )
    texts = {window.id: window.text for window in windows}
    (head,) = [decision for decision in decisions if decision.label]
    assert sorted(head.sources) == sorted(texts)
    for decision in decisions:
        assert "".join(texts[decision.id][a:b] for a, b in decision.spans).strip() == texts[decision.id].strip()
        assert decision is head or (decision.action, decision.merged_into) == ("merged", head.id)
    assert sum(decision.tokens_after for decision in decisions) == WordCounter().count_text(ARTICLE)


def test_shared_text_is_in_the_prompt_once_and_a_copy_of_a_window_leads_to_it() -> None:
    windows = cut(ARTICLE[:300], 200, 100)[:2]
    copy = Passage(id="x-copy", text=windows[1].text.upper())
    question = "Where was the first crane of the harbour built, and when was a second basin dug for coal ships?"
    result = reduce_parts(make_parts(question, passages=[*windows, copy]), config=KEEP_ALL)
    assert str(result.messages[-1]["content"]).count("Its first crane lifted 40 tons and was built in Leeds.") == 1
    assert [(d.id, d.action, d.merged_into) for d in result.documents] == [
        ("w000", "kept", None),
        ("w100", "merged", "w000"),
        ("x-copy", "merged", "w000"),
    ]


def test_thousands_of_windows_cost_no_more_than_their_length() -> None:
    text = " ".join(f"Entry {n} of the log says {n * 7919 % 9973}." for n in range(6000))
    windows = cut(text, 120, 60)
    assert len(stitched(*windows)) < len(windows)


def test_reducing_a_stitched_result_again_changes_nothing() -> None:
    windows = cut(ARTICLE[:300], 200, 100)[:2]
    question = "Where was the first crane of the harbour built, and when was a second basin dug for coal ships?"
    first = reduce_parts(make_parts(question, passages=windows), config=KEEP_ALL)
    again = [Passage(id="w000", text=ARTICLE[:300], source="harbour")]
    second = reduce_parts(make_parts(question, passages=again), config=KEEP_ALL)
    assert ARTICLE[:300].strip() in str(first.messages[-1]["content"])
    assert second.messages == first.messages
    assert second.prompt_tokens == first.prompt_tokens


@pytest.mark.parametrize("pattern", ["na ", "a", "\n", "The fee is due. "])
def test_texts_that_repeat_themselves_are_no_trap(pattern: str) -> None:
    windows = [Passage(id=f"w{n}", text=pattern * 3000 + str(n), source="s") for n in range(100)]
    started = time.process_time()
    stitched(*windows)
    # A second or two; every place against every other would take minutes.
    assert time.process_time() - started < 60
