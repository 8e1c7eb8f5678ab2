"""Report pages and comparisons, from results that the commands wrote."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from factories_eval import FakeGateway, rag_case, running, write_cases

from eval import plots
from eval.cli import eval_group
from eval.comparison import compare_results
from eval.page import Grid, Page, Paragraph, Plot
from eval.results_io import read_result


def _invoke(*arguments: str | Path, status: int = 0) -> Result:
    result = CliRunner().invoke(eval_group, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result


def _recall(folder: Path, name: str, gateway: FakeGateway, *arguments: str, num_cases: int = 12) -> Path:
    cases = [rag_case(f"q-{place}", gold_at=place % 6) for place in range(num_cases)]
    data = write_cases(folder / "made.jsonl.gz", cases)
    output = folder / name
    with running(gateway) as url:
        _invoke("recall", "--data", data, "--url", url, "--output", output, *arguments)
    return output


def _load(folder: Path, name: str, gateway: FakeGateway, *arguments: str) -> Path:
    cases = [rag_case(f"q-{place}", gold_at=place, num_passages=10 + 60 * (place % 2)) for place in range(4)]
    data = write_cases(folder / "load.jsonl.gz", cases)
    output = folder / name
    with running(gateway) as url:
        command = ("load", "--data", data, "--url", url, "--rate", "300", "--num-requests", "12", "--output", output)
        _invoke(*command, *arguments)
    return output


class _Outside(HTMLParser):
    """Collects what a page would load from elsewhere, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "link", "img", "br", "input"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith(("#", "data:")):
                self.loaded.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _parsed(html: str) -> _Outside:
    parser = _Outside()
    parser.feed(html)
    return parser


def test_a_recall_report_is_one_file_with_plots_and_manifest(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("--answers", "--budget", "0.1,0.3", "--baseline", "head", "--gate", "answer>=0.1")
    output = _recall(tmp_path, "out.json", FakeGateway(), *arguments)
    _invoke("report", output, "--html", tmp_path / "out.html", "--markdown", tmp_path / "out.md")
    html = (tmp_path / "out.html").read_text(encoding="utf-8")
    page = _parsed(html)
    assert (page.loaded, page.open) == ([], [])
    assert html.count("<svg") == 2  # recall against tokens, TTFT against length
    for text in ("The gate passed.", "head", "pairs needed", "Manifest", "SHA-256", "By language and length"):
        assert text in html
    markdown = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert "![Recall against tokens kept](data:image/svg+xml;base64," in markdown
    assert str(tmp_path) not in html + markdown


def test_a_load_report_has_cdfs_waterfall_hits_and_definitions(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = _load(tmp_path, "load.json", FakeGateway())
    _invoke("report", output)
    html = output.with_suffix(".html").read_text(encoding="utf-8")
    page = _parsed(html)
    assert (page.loaded, page.open) == ([], [])
    assert html.count("<svg") == 5
    for text in ("TTFT by length bucket", "Hit rate over time", "Mean time of a request", "includes the first token"):
        assert text in html


def test_the_same_result_gives_the_same_page(tmp_path: Path) -> None:
    output = _load(tmp_path, "load.json", FakeGateway())
    for name in ("a.html", "b.html"):
        _invoke("report", output, "--html", tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_report_without_matplotlib_says_so_and_keeps_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise plots.PlotsMissingError("plots need the package matplotlib")

    output = _recall(tmp_path, "out.json", FakeGateway())
    monkeypatch.setattr(plots, "_figure", missing)
    _invoke("report", output)
    html = output.with_suffix(".html").read_text(encoding="utf-8")
    assert "not drawn, plots need the package matplotlib" in html
    assert "<svg" not in html
    assert "evidence recall" in html


def test_texts_are_escaped_in_both_forms() -> None:
    page = Page("a < b", [Paragraph("<script>x</script>"), Grid(("a",), [["1 | <2>"]]), Plot("<p>", "<svg></svg>")])
    html = page.html()
    assert "<script>" not in html
    assert "<title>a &lt; b</title>" in html
    assert "1 \\| <2>" in page.markdown()


def test_compare_finds_what_changed_and_what_was_made_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    before = _recall(tmp_path, "a.json", FakeGateway(top_k=6), "--answers")
    after = _recall(tmp_path, "b.json", FakeGateway(top_k=2), "--answers", "--seed", "4")
    found = compare_results(read_result(before), read_result(after))
    row = next(row for row in found.rows if (row.arm, row.metric) == ("no budget", "answer"))
    assert (row.before, row.num_pairs) == (1.0, 12)
    assert row.after == pytest.approx(1 / 3)
    assert row.change == pytest.approx(-2 / 3)
    assert row.is_significant
    full = next(row for row in found.rows if (row.arm, row.metric) == ("full prompt", "contains"))
    assert (full.change, full.is_significant) == (0.0, False)
    assert [name for name, _, _ in found.made_differently] == ["seed"]
    gate = ("--gate", "answer_drop<=0.05")
    assert "fail" in _invoke("compare", before, after, *gate, status=1).output
    assert "pass" in _invoke("compare", before, before, *gate).output


def test_compare_names_other_data_and_pairs_what_is_in_both(tmp_path: Path) -> None:
    before = _recall(tmp_path, "a.json", FakeGateway(), num_cases=12)
    after = _recall(tmp_path, "b.json", FakeGateway(), num_cases=8)
    result = _invoke("compare", before, after, "--markdown", tmp_path / "out.md")
    assert "the data differ" in result.output
    assert "| answer | no budget |" in (tmp_path / "out.md").read_text(encoding="utf-8")


def test_compared_load_tests_give_ratios_of_quantiles(tmp_path: Path) -> None:
    before, after = (_load(tmp_path, name, FakeGateway()) for name in ("a.json", "b.json"))
    found = compare_results(read_result(before), read_result(after))
    rows = {row.metric: row for row in found.rows}
    assert rows["ttft_ms P50"].is_ratio
    assert rows["ttft_ms P50"].low <= rows["ttft_ms P50"].change <= rows["ttft_ms P50"].high
    assert (rows["contains"].change, rows["prompt_tokens"].change) == (0.0, 0.0)
    same = {row.metric: row for row in compare_results(read_result(before), read_result(before)).rows}
    assert (same["ttft_ms P95"].change, same["ttft_ms P95"].is_significant) == (1.0, False)


def test_results_of_two_kinds_are_refused(tmp_path: Path) -> None:
    before, after = _recall(tmp_path, "a.json", FakeGateway()), _load(tmp_path, "b.json", FakeGateway())
    result = _invoke("compare", before, after, status=2)
    assert "a.json is a recall result and b.json a load result" in " ".join(result.output.split())


def test_results_without_their_records_are_refused(tmp_path: Path) -> None:
    before = _recall(tmp_path, "a.json", FakeGateway())
    (tmp_path / "a.cases.jsonl.gz").unlink()
    assert "records that belong beside it" in " ".join(_invoke("compare", before, before, status=2).output.split())
    _invoke("report", before)


@pytest.mark.parametrize("content", ["[]", "{", '{"kind": "song"}', '{"kind": "load"}'])
def test_files_that_are_no_results_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(content, encoding="utf-8")
    assert "odd.json" in _invoke("report", path, status=2).output


def test_plots_have_no_date_and_stand_inside_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg = plots.ttft_against_length({"one": [(100, 20.0), (4000, 300.0)]})
    assert svg.startswith("<svg")
    assert re.search(r"\d{4}-\d\d-\d\d", svg) is None
    assert svg == plots.ttft_against_length({"one": [(100, 20.0), (4000, 300.0)]})
    assert json.dumps(svg)
