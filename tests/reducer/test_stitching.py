"""Overlapping windows of one source become one passage, and every character of it leads back to its window."""

import random

import pytest
from factories_reducer import WordCounter, make_parts, make_passages, reduce_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from reducer.config import DedupConfig, ReducerConfig, SelectionConfig
from reducer.prompt import Passage
from reducer.run import make_candidate
from reducer.stage import Candidate, Selected, Span, whole_spans
from reducer.stitching import own_sizes, settle, stitch, window_spans

ARTICLE = (
    "The harbour was opened in 1912 by the city council. Its first crane lifted 40 tons and was built in Leeds. "
    "In 1931 a second basin was dug for coal ships. The coal trade ended in 1968, and the basin was filled. "
    "Today the harbour handles 1.2 million containers a year. The port authority employs 850 people. "
    "A new terminal is planned for 2031 on the north bank, with rail access for freight trains."
)
CHINESE = "港口于一九一二年由市议会启用。第一台起重机可吊起四十吨货物，产自利兹。一九三一年为运煤船开挖了第二个港池。"
KEEP_ALL = ReducerConfig(min_prompt_tokens=0, selection=SelectionConfig(relative_threshold=0.0, min_passages=100))


def candidates(*passages: Passage) -> list[Candidate]:
    return [make_candidate(position, passage, WordCounter()) for position, passage in enumerate(passages)]


def cut(text: str, size: int, stride: int, source: str = "harbour") -> list[Passage]:
    return [
        Passage(id=f"w{start:03}", text=text[start : start + size], source=source)
        for start in range(0, max(len(text) - size, 0) + stride, stride)
        if start < len(text)
    ]


def stitched(*passages: Passage, max_stitched_chars: int = 2400, min_overlap_chars: int = 60) -> list[Candidate]:
    config = DedupConfig(max_stitched_chars=max_stitched_chars, min_overlap_chars=min_overlap_chars)
    return stitch(candidates(*passages), config, WordCounter())


def test_two_overlapping_windows_are_one_passage() -> None:
    windows = cut(ARTICLE[:300], 200, 100)
    (joined,) = stitched(*windows[:2])
    assert joined.passage.text == ARTICLE[:300]
    assert joined.passage.id == "w000"
    assert joined.sources == ("w000", "w100")
    assert joined.num_tokens == WordCounter().count_text(ARTICLE[:300])


def test_a_chain_of_windows_gives_the_document_back() -> None:
    (joined,) = stitched(*cut(ARTICLE, 160, 80))
    assert joined.passage.text == ARTICLE


def test_scripts_without_spaces_are_stitched_by_weight() -> None:
    (joined,) = stitched(*cut(CHINESE, 36, 18))
    assert joined.passage.text == CHINESE


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
    assert [c.passage.text for c in stitched(first, second)] == [first.text, second.text]


def test_a_stitched_passage_stays_within_its_limit() -> None:
    joined = stitched(*cut(ARTICLE, 160, 80), max_stitched_chars=250)
    assert len(joined) > 1
    assert all(len(c.passage.text) <= 250 for c in joined)
    assert {source for c in joined for source in c.sources} == {p.id for p in cut(ARTICLE, 160, 80)}


def test_switched_off_leaves_windows_apart() -> None:
    windows = cut(ARTICLE, 160, 80)
    config = DedupConfig(stitch=False)
    assert len(stitch(candidates(*windows), config, WordCounter())) == len(windows)


def test_order_of_the_request_does_not_change_what_is_stitched() -> None:
    windows = cut(ARTICLE, 160, 80)
    expected = {(c.passage.id, c.passage.text, c.sources) for c in stitched(*windows)}
    rng = random.Random(3)
    for _ in range(20):
        rng.shuffle(windows)
        assert {(c.passage.id, c.passage.text, c.sources) for c in stitched(*windows)} == expected


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
        whole = joined.passage.text
        assert all(texts[source].strip() in whole for source in joined.sources)
        spans = tuple(Span(low, min(low + n, len(whole))) for low, n in sorted(cuts) if low < len(whole))
        item = Selected(joined, spans, 1, "")
        if not joined.windows:
            continue
        for (own, found), window in zip(window_spans(item), joined.windows, strict=True):
            for span in found:
                at = span.start - window.span.start + window.start
                assert own.passage.text[span.start : span.end] == whole[at : at + span.end - span.start]
        full = Selected(joined, whole_spans(whole), 1, "")
        assert sum(own_sizes(full)) == len(whole)


def test_label_goes_to_the_window_with_the_most_kept_text() -> None:
    windows = cut(ARTICLE[:300], 200, 100)
    (joined,) = stitched(*windows[:2])
    (item,) = settle([Selected(joined, (Span(210, 300),), 1, "cut")])
    assert item.candidate.passage.id == "w100"
    assert item.candidate.label == "[2]"
    assert item.candidate.sources == ("w100", "w000")
    assert item.candidate.passage.text == joined.passage.text


def test_receipt_shows_for_each_window_what_is_in_the_prompt() -> None:
    windows = cut(ARTICLE, 160, 80)
    result = reduce_parts(make_parts("How many containers a year?", passages=windows), config=KEEP_ALL)
    content = str(result.messages[-1]["content"])
    assert content.count("The coal trade ended in 1968") == 1
    texts = {window.id: window.text for window in windows}
    (head,) = [decision for decision in result.documents if decision.label]
    assert sorted(head.sources) == sorted(texts)
    for decision in result.documents:
        assert "".join(texts[decision.id][a:b] for a, b in decision.spans).strip() == texts[decision.id].strip()
        assert decision is head or (decision.action, decision.merged_into) == ("merged", head.id)
    assert sum(decision.tokens_after for decision in result.documents) == WordCounter().count_text(ARTICLE)


def test_a_copy_of_a_window_leads_to_the_passage_that_holds_it() -> None:
    windows = cut(ARTICLE[:300], 200, 100)[:2]
    copy = Passage(id="x-copy", text=windows[1].text.upper())
    result = reduce_parts(make_parts("Which crane?", passages=[*windows, copy]), config=KEEP_ALL)
    assert [(d.id, d.action, d.merged_into) for d in result.documents] == [
        ("w000", "kept", None),
        ("w100", "merged", "w000"),
        ("x-copy", "merged", "w000"),
    ]


def test_dropped_windows_are_each_accounted_for() -> None:
    windows = cut(ARTICLE[:300], 200, 100)[:2]
    noise = make_passages("The word for the vault is heron.", "The vault opens with a word.", "Heron is the word.")
    config = ReducerConfig(min_prompt_tokens=0, selection=SelectionConfig(top_k=3))
    result = reduce_parts(make_parts("Which word opens the vault?", passages=[*windows, *noise]), config=config)
    assert [d.action for d in result.documents if d.id.startswith("w")] == ["dropped", "dropped"]
    assert len(result.documents) == 5


def test_thousands_of_windows_cost_no_more_than_their_length() -> None:
    text = " ".join(f"Entry {n} of the log says {n * 7919 % 9973}." for n in range(6000))
    joined = stitched(*cut(text, 120, 60))
    assert len(joined) < len(cut(text, 120, 60))
