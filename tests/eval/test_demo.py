"""The demo and the side-by-side bench against the small gateway."""

import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from factories_eval import FakeGateway, rag_case, running, write_cases
from rich.console import Console

from eval.benches import bench_side_by_side
from eval.demo import load_request, measure, print_demo
from eval.gateway import GatewayClient
from eval.scoring import SearchText


def test_demo_request_is_realistic() -> None:
    request = load_request()
    assert len(request.documents) == 30
    assert len({document.id for document in request.documents}) == 30
    assert [turn.role for turn in request.messages] == ["system", *["user", "assistant"] * 5]
    texts = Counter(document.text for document in request.documents)
    assert max(texts.values()) == 2  # an exact copy
    assert any(document.acl for document in request.documents)
    assert any("<nav>" in document.text for document in request.documents)
    assert any("夜航" in document.text for document in request.documents)
    assert any("| --- |" in document.text for document in request.documents)


def test_demo_answer_stands_in_the_passages_and_not_in_the_question() -> None:
    request = load_request()
    holders = {
        document.id
        for document in request.documents
        if any(SearchText(document.text).states(answer) for answer in request.accepted_answers)
    }
    assert holders == {"fares-2025", "fares-mirror", "fares-pdf"}
    spoken = "\n".join([request.question, *(turn.content for turn in request.messages)])
    assert not any(SearchText(spoken).states(answer) for answer in request.accepted_answers)


@pytest.mark.parametrize("window", [100_000, 2_000], ids=["fits", "does not fit"])
def test_demo_shows_both_prompts(window: int) -> None:
    request = load_request()
    gateway = FakeGateway(window=window, reply=lambda prompt: "14 euros" if "14 euros" in prompt else "12 euros")
    console = Console(record=True, width=140)
    with (
        running(gateway) as url,
        GatewayClient(url=url, api_key="a") as client,
        GatewayClient(url=url, api_key="b") as other,
    ):
        print_demo(console, request, measure(console, client, other, request))
    shown = console.export_text()
    assert ("does not fit" in shown) == (window == 2_000)
    assert "states the right fare" in shown
    assert "fares-2025" in shown
    bypassed = [(body["firsttoken"], key) for _, body, key in gateway.requests if body.get("firsttoken")]
    assert bypassed[0] == ({"bypass": True}, "b")
    assert {key for options, key in bypassed[1:]} == {"a"}


def test_bench_pairs_both_prompts_in_alternating_order(tmp_path: Path) -> None:
    cases = [rag_case(f"q-{place}", gold_at=place, answer="heron") for place in range(5)]
    data = write_cases(tmp_path / "made.jsonl.gz", cases)
    output = tmp_path / "results" / "out.json"
    gateway = FakeGateway(top_k=3, reply=lambda prompt: "heron" if "heron" in prompt else "no")
    with running(gateway) as url:
        arguments = [str(data), "--cases", "4", "--url", url, "--output", str(output)]
        result = CliRunner().invoke(bench_side_by_side.main, arguments)
    assert result.exit_code == 0, result.output
    last_line = json.loads(result.output.rstrip().rpartition("\n")[2])
    assert last_line == json.loads(output.read_bytes())
    assert [pair["first"] for pair in last_line["pairs"]] == ["full", "reduced", "full", "reduced"]
    assert [pair["id"] for pair in last_line["pairs"]] == ["q-0", "q-1", "q-2", "q-3"]
    assert (last_line["full"]["num_contains"], last_line["reduced"]["num_contains"]) == (4, 3)
    assert last_line["contains"]["difference"] == -0.25
    # Three passages of nine words, the full prompt has ten; all but the one with the one-word answer have ten words.
    fixed = last_line["pairs"][0]["reduced"]["prompt_tokens"] - (9 + 10 + 10)
    assert last_line["prompt_tokens_ratio"] == pytest.approx((fixed + 9 + 9 * 10) / (fixed + 29))
    assert "one two three" not in output.read_text(encoding="utf-8")


def test_bench_counts_full_prompts_that_do_not_fit(tmp_path: Path) -> None:
    cases = [rag_case("q-0"), rag_case("q-1", num_passages=40), rag_case("q-2")]
    data = write_cases(tmp_path / "made.jsonl.gz", cases)
    with running(FakeGateway(window=200)) as url:
        result = CliRunner().invoke(bench_side_by_side.main, [str(data), "--cases", "2", "--url", url])
    assert result.exit_code == 0, result.output
    last_line = json.loads(result.output.rstrip().rpartition("\n")[2])
    assert (last_line["num_cases"], last_line["num_does_not_fit"], last_line["contains"]["num_pairs"]) == (2, 1, 1)


def test_bench_with_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    data = write_cases(tmp_path / "made.jsonl.gz", [rag_case("q-0"), rag_case("q-1")])
    with running(FakeGateway(window=50)) as url:
        result = CliRunner().invoke(bench_side_by_side.main, [str(data), "--url", url])
    assert result.exit_code == 1
    assert "nothing to compare" in result.output
