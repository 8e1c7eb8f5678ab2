"""Cleaning passages: what goes, what stays byte for byte, and the way back to the received text."""

import html
import time
from typing import Any

import pytest
from factories_reducer import WordCounter, make_parts, make_passages, reduce_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from reducer.boilerplate import is_boilerplate
from reducer.clean import clean, plain_text
from reducer.config import CleanConfig, ReducerConfig, SelectionConfig
from reducer.prompt import Passage
from reducer.run import make_candidate
from reducer.stage import Candidate, Span, SpanText, StageOutcome

PAGE = """<!DOCTYPE html>
<html><head><title>River Aller: length</title><style>p {color: red}</style><script>var a = "<p>no</p>";</script></head>
<body class="page has-sidebar">
<nav><ul><li><a href="/">Home</a></li><li><a href="/rivers">All rivers</a></li><li><a href="/login">Log in</a></li>
</ul></nav>
<div class="cookie-banner"><p>We use cookies to improve your experience.</p><button>Accept all</button></div>
<main><h1>The river Aller</h1>
<p>The Aller is a river of <b>263&nbsp;km</b> in northern Germany.
   It rises near Eggenstedt &amp; flows into the Weser.</p>
<table><tr><th>Town</th><th>Bridge</th></tr><tr><td>Celle</td><td>1532</td></tr>
<tr><td>Verden</td><td>1889</td></tr></table>
<pre>depth  =  4
width  =  60</pre>
</main>
<aside class="related"><a href="/x">The river Oker</a> <a href="/y">The river Leine</a></aside>
<footer><p>Office hours: Monday 9 to 17, telephone 0511 4711.</p><p>&copy; 2024 Rivers Ltd. All rights reserved.</p>
<a href="/privacy">Privacy policy</a></footer>
</body></html>
"""


def clean_texts(*texts: str, question: str = "How long is it?", **config: Any) -> StageOutcome[Candidate]:
    counter = CharCounter()
    candidates = [make_candidate(n, passage, counter) for n, passage in enumerate(make_passages(*texts))]
    return clean(candidates, question, CleanConfig(**config), counter)


class CharCounter(WordCounter):
    """Counts characters, so that white space costs something."""

    def count_text(self, text: str) -> int:
        """Characters of a text."""
        return len(text)


def cleaned_text(text: str, question: str = "How long is it?") -> str:
    (candidate,) = clean_texts(text, question=question).kept
    return candidate.passage.text


def test_page_becomes_the_text_of_its_content() -> None:
    assert cleaned_text(PAGE) == (
        "River Aller: length\nThe river Aller\nThe Aller is a river of 263 km in northern Germany."
        " It rises near Eggenstedt &amp; flows into the Weser.\nTown | Bridge\nCelle | 1532\nVerden | 1889\n"
        "depth  =  4\nwidth  =  60\nOffice hours: Monday 9 to 17, telephone 0511 4711."
    )


def test_kept_text_is_spans_of_the_received_html() -> None:
    (candidate,) = clean_texts(PAGE).kept
    assert candidate.cleaned is not None
    for span, start in zip(candidate.cleaned.spans, candidate.cleaned.starts, strict=True):
        piece = PAGE[span.start : span.end]
        assert candidate.passage.text[start : start + len(piece)] == piece
    at = candidate.passage.text.index("Celle | 1532")
    assert [PAGE[s:e] for s, e in candidate.cleaned.received_spans([Span(at, at + 12)])] == ["Celle", "1532"]


def test_receipt_of_a_page_has_spans_of_the_received_text_and_both_counts() -> None:
    result = reduce_parts(make_parts("How long is the river Aller?", passages=make_passages(PAGE)))
    (decision,) = result.documents
    content = result.messages[-1]["content"]
    assert decision.action == "trimmed"
    assert all(PAGE[start:end].strip() in content for start, end in decision.spans)
    assert decision.tokens_before == WordCounter().count_text(PAGE) > 3 * decision.tokens_after
    assert "<p>" not in content
    assert "263 km" in content


@pytest.mark.parametrize(
    "lost", ["Home", "Log in", "cookies", "The river Oker", "All rights", "Privacy", "color", "no</p>"]
)
def test_page_furniture_goes(lost: str) -> None:
    assert lost not in cleaned_text(PAGE)


def test_pages_with_navigation_lose_most_tokens_and_no_answer() -> None:
    facts = {f"Bridge {n} over the Aller was built in {1500 + 7 * n} by master {name}.": str(1500 + 7 * n)
             for n, name in enumerate(["Ahrens", "Brandt", "Cordes", "Deters", "Evers"])}  # fmt: skip
    pages = [PAGE.replace("</main>", f"<p>{html.escape(fact)}</p></main>") for fact in facts]
    outcome = clean_texts(*pages, question="When was bridge 3 built?")
    before = sum(len(page) for page in pages)
    after = sum(candidate.num_tokens for candidate in outcome.kept)
    assert after < 0.35 * before
    for candidate, (fact, year) in zip(outcome.kept, facts.items(), strict=True):
        assert fact in candidate.passage.text
        assert year in candidate.passage.text


@pytest.mark.parametrize(
    "text",
    [
        'def page():\n    return "<p>hello</p>" + "<p>world</p>"\n\n\n\n\nx   =   1\n',
        '{"a":   1,\n\n\n\n "b": "<p>x</p><p>y</p>"}',
        "# Title\n\n\n\nHome | About | Contact\n\nText   with   runs.\n",
        "| a   | b |\n|-----|---|\n| 1   | 2 |\n\n\n\n",
        "Name      Price\nBolt      0.12\nNut       0.07\n",
        "Use `<p>` and `</p>`, `<div>` and `</div>` around text.",
        "Compare List<String> with Map<String, List<Integer>> and a < b > c.",
        "The <p> tag starts a paragraph and <table> a table.",
        "```html\n<p>a</p>\n<p>b</p>\n```",
        '<form action="/x"><input name="q"><button type="submit"></button></form>',
        "    indented code stays\n        with its nesting\n    and its end\n",
    ],
)
def test_code_tables_json_markdown_and_examples_stay_byte_for_byte(text: str) -> None:
    (candidate,) = clean_texts(text).kept
    assert candidate.passage.text == text
    assert candidate.cleaned is None


@pytest.mark.parametrize(
    "line",
    [
        "Home | About us | Contact",
        "Skip to main content",
        "Menu Search Log in",
        "© 2024 Acme Ltd. All rights reserved.",
        "Privacy policy - Terms of use - Cookie settings",
        "We use cookies to improve your experience.",
        "Page 3 of 12",
        "首页 > 资讯 > 正文",
        "版权所有：中国政府网",
        "上一篇 下一篇",
        "Startseite | Impressum | Datenschutz",
        "打开客户端，阅读体验更佳",
        "Was this page helpful? Yes No",
        "Wir verwenden Cookies, um die Seite zu verbessern.",
        "Home > Products > Bolts",
    ],
)
def test_furniture_lines_are_recognised(line: str) -> None:
    assert is_boilerplate(line)
    text = f"{line}\nThe Aller is 263 km long.\n{line}"
    assert cleaned_text(text) == "The Aller is 263 km long."


@pytest.mark.parametrize(
    "line",
    [
        "Home | Opening hours | Contact",
        "Yes",
        "More",
        "Help",
        "No.",
        "The menu was searched.",
        "Contact Maria about the keys.",
        "Accept",
        "Cookies are small cakes.",
        "We share more at home.",
        "Print 300 copies.",
        "The page 3 of the book is torn.",
        "Ministry of Home Affairs",
        "Terms of the loan: 5 %.",
        "1984",
        "首页设计由王明负责。",
        "x > y",
        "Home > away in goals.",
    ],
)
def test_lines_that_say_something_stay(line: str) -> None:
    text = f"{line}\nThe Aller is 263 km long.\n{line}"
    assert cleaned_text(text) == text


def test_a_line_with_a_word_of_the_question_stays() -> None:
    text = "The Aller is 263 km long.\n© 2024 Acme Ltd. All rights reserved."
    assert "Acme" not in cleaned_text(text)
    assert cleaned_text(text, "Who holds the copyright of Acme pages?") == text


def test_single_word_answer_inside_a_sentence_chain_stays() -> None:
    text = "Is it ready? More. Help. Yes. © 2024 Acme. All rights reserved. We ship."
    assert "More. Help. Yes." in cleaned_text(text)
    assert "We ship." in cleaned_text(text)


def test_running_footer_stays_in_one_passage() -> None:
    texts = [f"Unit {n} weighs {n * 3} kilos.\nIt is blue.\nManual of the pressure plant" for n in range(4)]
    outcome = clean_texts(*texts)
    assert [("Manual" in c.passage.text) for c in outcome.kept] == [True, False, False, False]
    assert all(f"Unit {n} weighs {n * 3} kilos.\nIt is blue." in c.passage.text for n, c in enumerate(outcome.kept))


def test_first_line_shared_by_some_names_their_topic_and_stays() -> None:
    some = [f"Amazon River\nFact {n} about it: {n * 7} tributaries." for n in range(3)]
    others = [f"Subject {n}\nFact {n} about that: {n * 5} lakes." for n in range(6)]
    assert all(c.cleaned is None for c in clean_texts(*some, *others).kept)
    many = [f"Amazon River\nFact {n} about it: {n * 7} tributaries." for n in range(9)]
    assert sum("Amazon River" in c.passage.text for c in clean_texts(*many).kept) == 1


def test_copies_of_one_passage_are_no_running_header() -> None:
    text = "A line\nAnother line\nA third line"
    assert all(c.cleaned is None for c in clean_texts(text, text, text).kept)


def test_white_space_runs_become_one_of_their_own_characters() -> None:
    assert (
        cleaned_text("电子报    当前情况：\r          人口总数为23264640人。")
        == "电子报 当前情况： 人口总数为23264640人。"
    )
    assert cleaned_text("First one.\n \n\n\n\nSecond one.") == "First one.\n\nSecond one."
    assert (
        cleaned_text("Two  spaces stay.\n\nSo does one empty line.\n")
        == "Two  spaces stay.\n\nSo does one empty line.\n"
    )


def test_empty_and_furniture_only_passages_are_dropped_with_the_reason() -> None:
    outcome = clean_texts("", " \n", "首页  登录  注册", "The Aller.")
    assert [(f.candidate.passage.id, f.reason) for f in outcome.filtered] == [
        ("d1", "empty"),
        ("d2", "empty"),
        ("d3", "page furniture only"),
    ]
    assert [c.passage.id for c in outcome.kept] == ["d4"]


def test_unmappable_page_is_kept_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import trafilatura

    monkeypatch.setattr(trafilatura, "extract", lambda *args, **kwargs: "text that stands nowhere in this page")
    outcome = clean_texts(PAGE)
    assert outcome.kept[0].passage.text == PAGE
    assert "does not map" in str(outcome.degraded)


def test_failing_parser_still_removes_markup_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import trafilatura

    def fail(*args: Any, **kwargs: Any) -> str:
        raise RuntimeError("broken")

    monkeypatch.setattr(trafilatura, "extract", fail)
    outcome = clean_texts(PAGE)
    assert "263 km" in outcome.kept[0].passage.text
    assert "<p>" not in outcome.kept[0].passage.text
    assert "main content not found" in str(outcome.degraded)


def test_table_in_html_equals_its_markdown_twin() -> None:
    page = "<table><tr><th>Part</th><th>Price</th></tr><tr><td>Bolt &amp; nut</td><td>0.12</td></tr></table>"
    twin = "| Part | Price |\n|------|------:|\n| Bolt & nut |  0.12 |\n"
    assert plain_text(page) == plain_text(twin) == "Part | Price\nBolt & nut | 0.12"
    result = reduce_parts(make_parts("What does a bolt cost?", passages=make_passages(page, twin)))
    assert sorted(d.action == "merged" for d in result.documents) == [False, True]


def test_switched_off_nothing_changes() -> None:
    assert clean_texts(PAGE, " ", enabled=False).kept[0].passage.text == PAGE
    assert "Home" not in cleaned_text(PAGE)
    assert "<h1>The river Aller</h1>" in clean_texts(PAGE, html=False).kept[0].passage.text


def test_entities_stay_as_written() -> None:
    assert cleaned_text("<p>A &lt; B &amp; C&nbsp;&nbsp;D</p><p>x</p>") == "A &lt; B &amp; C D\nx"


LINES = st.sampled_from(
    [
        "The Aller is 263 km long.",
        "Home | About us",
        "© 2024 Acme",
        "Page 3 of 9",
        "",
        "  ",
        "Manual of the plant",
        "a   b",
        "<p>One <b>two</b></p>",
        "<div class='nav'><a href='/'>Home</a></div>",
        "</p>",
        "| a | b |",
        "海底捞。    登录",
        "&nbsp;x",
        "<!-- x",
        "<script>",
        "def f():",
        "\t",
        "<td>1</td><td>2</td>",
        "We use cookies to improve this site.",
    ]
)
TEXTS = st.lists(st.lists(LINES, max_size=7).map("\n".join), max_size=6)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_cleaned_text_is_its_spans_and_cleaning_again_changes_nothing(texts: list[str]) -> None:
    outcome = clean_texts(*texts)
    for candidate in outcome.kept:
        received = texts[candidate.position]
        if candidate.cleaned is None:
            assert candidate.passage.text == received
            continue
        joined = SpanText.join(received, [("", span) for span in candidate.cleaned.spans])
        whole = candidate.cleaned.received_spans([Span(0, len(candidate.passage.text))])
        assert whole == joined.spans
        for span, start in zip(candidate.cleaned.spans, candidate.cleaned.starts, strict=True):
            assert candidate.passage.text[start : start + span.end - span.start] == received[span.start : span.end]
        assert candidate.num_tokens < len(received)
    again = clean_texts(*(candidate.passage.text for candidate in outcome.kept))
    assert [c.passage.text for c in again.kept] == [c.passage.text for c in outcome.kept]


@pytest.mark.parametrize(
    "text",
    [
        "<" * 300_000,
        "<!--" * 80_000,
        '<p a="' * 50_000,
        "<script>" * 40_000,
        "<div>" * 60_000 + "</p>" * 60_000,
        "&nbsp;" * 50_000,
        "<p>a</p>" * 20_000,
        "Home | " * 50_000,
        "\n" * 300_000,
        "x\n" * 40_000,
        "<td>" * 70_000,
        "</b>" * 70_000,
    ],
    ids=[
        "brackets",
        "comments",
        "quotes",
        "scripts",
        "nesting",
        "entities",
        "paragraphs",
        "menu",
        "lines",
        "short lines",
        "cells",
        "closings",
    ],
)
def test_cleaning_is_linear(text: str) -> None:
    started = time.process_time()
    clean_texts(text, text + "x", text + "y")
    assert time.process_time() - started < 60  # quadratic takes hours


def test_a_megabyte_of_html_keeps_its_last_paragraph_in_linear_time() -> None:
    body = "".join(
        f"<p>Unit {n} of <i>series {n % 7}</i> weighs {n * 3} kilos and is &quot;blue&quot;.</p>\n"
        for n in range(13_000)
    )
    page = PAGE.replace("</main>", body + "</main>")
    assert len(page) > 1_000_000
    clean_texts(PAGE)  # the parser's import is not the page's
    started = time.process_time()
    (candidate,) = clean_texts(page).kept
    elapsed = time.process_time() - started
    assert "Unit 12999 of series 0 weighs 38997 kilos" in candidate.passage.text
    assert elapsed < 60


def test_question_words_reach_the_stage_through_the_pipeline() -> None:
    passages = (Passage(id="a", text="© 2024 Acme Ltd. All rights reserved.\nThe Aller is 263 km long."),)
    config = ReducerConfig(min_prompt_tokens=0, selection=SelectionConfig(relative_threshold=0))
    asked = reduce_parts(make_parts("Which year is in the copyright of Acme?", passages=passages), config=config)
    assert "© 2024 Acme" in asked.messages[-1]["content"]
