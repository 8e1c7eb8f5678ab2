"""The bench of peers: its workload, its plan, what it keeps, and its figures; and the server around OpenVINO GenAI."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from factories_eval import make_case, make_chunk
from rich.console import Console

from eval.benches import bench_peers
from eval.benches.bench_peers import Bench, Options, StageRun, make_plan, make_report, peers_manifest, run_bench
from eval.benches.peers_servers import OURS, Peer, descendants_mib, make_peers
from eval.benches.peers_workload import (
    PeerTrace,
    figures,
    load_request,
    make_corpora,
    make_trace,
    read_peer_trace,
    write_peer_trace,
)
from eval.cli import eval_group
from eval.datasets import Dataset
from eval.errors import DataError, EvalError
from eval.gateway import PromptRequest
from eval.load_records import RequestRecord
from eval.page_blocks import between
from eval.peers_page import MARKS, result_table
from eval.peers_summary import compare_servers, ratio_of_percentiles, requirements
from eval.records import encode_report
from eval.samples import Case

_SERVER = """
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        time.sleep(float(sys.argv[2]))
        self.send_response(200)
        self.end_headers()
        answer = "bird 1" if len(prompt) % 2 else "no idea"
        for event in (
            {"choices": [{"index": 0, "delta": {"content": answer}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": len(prompt.split()), "completion_tokens": 2}},
        ):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def _corpus(number: int, questions: int) -> tuple[Case, list[Case]]:
    """One case of the redundant set, and the questions of the other set about its passages."""
    chunks = [make_chunk(f"c{number}-{place}", f"Bird {place} of corpus {number}.", gold=True) for place in range(9)]
    asked = [
        make_case([chunks[place]], id=f"q{number}-{place}", question=f"Bird {number} {place}?", answers=["bird 1"])
        for place in range(questions)
    ]
    own = make_case(chunks[:-1], id=f"r{number}", question=f"Which bird {number}?", answers=["bird 1"])
    return own, asked


def _datasets(num_corpora: int = 4, questions: int = 5) -> tuple[Dataset, Dataset]:
    made = [_corpus(number, questions) for number in range(num_corpora)]
    return (
        Dataset("redundant.jsonl.gz", "aa", [own for own, _ in made], len(made)),
        Dataset("plain.jsonl.gz", "bb", [case for _, asked in made for case in asked], questions),
    )


def _render(request: PromptRequest) -> tuple[list[dict[str, Any]], int]:
    text = "\n".join(document["text"] for document in request.documents)
    messages = [dict(request.messages[0]), {"role": "user", "content": f"{text}\n{request.messages[-1]['content']}"}]
    return messages, len(text.split())


def _trace(num_requests: int = 20, num_warm_up: int = 2) -> PeerTrace:
    corpora = make_corpora(*_datasets(), num_corpora=4, seed=0)
    return make_trace(
        corpora, _render, num_requests=num_requests, num_warm_up=num_warm_up, max_tokens=8, seed=0
    )  # fmt: skip


def test_questions_of_both_sets_are_asked_of_the_passages_that_answer_them() -> None:
    corpora = make_corpora(*_datasets(), num_corpora=4, seed=0)
    for cases in corpora:
        assert len(cases) == 6
        passages = {frozenset(chunk.id for chunk in case.chunks) for case in cases}
        assert len(passages) == 1  # the same passages for all
        for case in cases:
            scores = [chunk.score or 0.0 for chunk in case.chunks]
            assert scores == sorted(scores, reverse=True)  # in an order of the question's own


def test_sets_that_share_no_passages_make_no_workload() -> None:
    with pytest.raises(DataError, match="do not make 9 corpora"):
        make_corpora(*_datasets(), num_corpora=9, seed=0)


def test_popular_corpora_come_more_often_and_requests_repeat() -> None:
    trace = _trace(200)
    assert trace == _trace(200)
    found = figures(trace.requests)
    assert found["num_requests"] == 200
    assert found["num_questions"] + found["num_repeated"] == 200
    counts: dict[str, int] = {}
    for item in trace.requests:
        corpus = item.case.id.partition("/")[0]
        counts[corpus] = counts.get(corpus, 0) + 1
    assert max(counts.values()) > 1.5 * min(counts.values())
    assert all(first.due <= second.due for first, second in zip(trace.requests, trace.requests[1:], strict=False))


def test_warming_up_shows_no_passage_of_the_measured_requests() -> None:
    trace = _trace()
    warm = {chunk.id for item in trace.warm_up for chunk in item.case.chunks}
    assert warm
    assert not warm & {chunk.id for item in trace.requests for chunk in item.case.chunks}


def test_peers_get_the_documents_in_the_prompt_and_we_get_them_apart() -> None:
    item = _trace().requests[0]
    ours = load_request(item, knows_documents=True, model="m", rate=2.0)
    theirs = load_request(item, knows_documents=False, model="m", rate=2.0)
    assert len(ours.body["documents"]) == len(item.case.chunks)
    assert "documents" not in theirs.body
    for chunk in item.case.chunks:
        assert chunk.text in theirs.body["messages"][-1]["content"]
        assert chunk.text not in ours.body["messages"][-1]["content"]
    assert ours.arrival_s == theirs.arrival_s == item.due / 2.0
    assert ours.body["max_tokens"] == theirs.body["max_tokens"] == 8


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    sha256 = write_peer_trace(tmp_path / "t.json.gz", _trace())
    assert read_peer_trace(tmp_path / "t.json.gz") == (_trace(), sha256)
    (tmp_path / "t.json.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="no trace"):
        read_peer_trace(tmp_path / "t.json.gz")


def _records(times: list[float], contains: list[float]) -> list[RequestRecord]:
    return [
        RequestRecord(id=str(place), status="ok", arrival_s=0.0, ttft_ms=time, e2el_ms=time, contains=found)
        for place, (time, found) in enumerate(zip(times, contains, strict=True))
    ]


def test_ratios_and_containment_are_of_the_same_requests() -> None:
    ours = _records([100.0] * 10, [1.0] * 6 + [0.0] * 4)
    theirs = _records([1000.0] * 10, [1.0] * 4 + [0.0] * 6)
    lost = [*theirs[:9], RequestRecord(id="9", status="failed", arrival_s=0.0, reason="timeout")]
    questions = {str(place): f"q{place // 2}" for place in range(10)}  # each asked twice
    found = compare_servers("peer", [ours, ours], [theirs, lost], (ours[:2], theirs[:2]), questions, seed=0)
    assert (found.num_requests, found.num_questions) == (19, 5)
    assert (found.ttft_p50.value, found.ttft_p50.low, found.ttft_p95.high) == (10.0, 10.0, 10.0)
    assert found.low_ttft_p50 == 10.0
    assert found.contains_difference == pytest.approx(0.2)
    assert found.contains_low <= found.contains_difference <= found.contains_high


def test_ratio_intervals_hold_the_ratio_and_narrow_with_more_requests() -> None:
    rng = np.random.default_rng(0)
    few, many = (np.stack([rng.gamma(4, 25, size), rng.gamma(4, 250, size)], axis=1) for size in (20, 2000))
    wide, narrow = (ratio_of_percentiles(times, 50, seed=0) for times in (few, many))
    assert wide.low <= wide.value <= wide.high
    assert narrow.high - narrow.low < (wide.high - wide.low) / 3
    assert narrow.value == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(
    ("ours_ms", "ours_contain", "num_failed", "broken"),
    [(100.0, 1.0, 0, []), (300.0, 1.0, 0, ["P50", "P95"]), (100.0, 0.0, 0, ["contain"]), (100.0, 1.0, 1, ["failed"])],
)
def test_each_requirement_breaks_alone(ours_ms: float, ours_contain: float, num_failed: int, broken: list[str]) -> None:
    ours, theirs = _records([ours_ms] * 8, [ours_contain] * 8), _records([1000.0] * 8, [0.5] * 8)
    found = compare_servers("p", [ours], [theirs], (ours, theirs), {str(n): str(n) for n in range(8)}, seed=0)
    unmet = [item.text for item in requirements([found], num_failed) if not item.is_met]
    assert len(unmet) == len(broken)
    assert all(word in text for word, text in zip(broken, unmet, strict=True))


def _alone(server: str, seconds: float) -> StageRun:
    return StageRun(server=server, stage="alone", identity={}, start_s=10.0, records=_records([seconds * 1e3], [1.0]))


def test_the_rate_follows_the_slowest_and_the_number_of_requests_the_time() -> None:
    alone = [_alone("fast", 0.5), _alone("slow", 4.0)]
    plan = make_plan(alone, Options(utilisation=0.8, minutes=20.0), 0.0)
    assert (plan.rate, plan.utilisation) == (0.2, 0.8)
    assert plan.num_requests == int(((1200 - 40) / 4 - 15) * 0.2)
    assert make_plan(alone, Options(minutes=500.0), 0.0).num_requests == 60
    with pytest.raises(EvalError, match="no server answered"):
        make_plan([], Options(), 0.0)


def _fake(name: str, delay_s: float) -> Peer:
    return Peer(
        name,
        {"delay_s": delay_s},
        command=lambda port: [sys.executable, "-c", _SERVER, str(port), str(delay_s)],
        version=lambda: "1.0",
    )


def _run(work: Path, peers: list[Peer], options: Options) -> Any:
    work.mkdir(exist_ok=True)
    sha256 = write_peer_trace(work / "trace.json.gz", _trace())
    bench = Bench(Console(quiet=True), _trace(), sha256, work)
    plan, order = run_bench(bench, peers, options, time.monotonic())
    return make_report(bench, peers, plan, order, _datasets(), options, peers_manifest(_datasets()[0], options))


def test_servers_are_measured_in_both_orders_kept_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The real gateway has tests of its own; here another server stands at its place.
    monkeypatch.setattr(bench_peers, "OURS", "quick")
    monkeypatch.setattr("eval.benches.peers_servers.OURS", "")
    peers = [_fake("quick", 0.0), _fake("slow", 0.3), Peer("absent", {}, missing="not here")]
    options = Options(rate=50.0, max_requests=12)
    report = _run(tmp_path / "work", peers, options)
    assert report.order == [["quick", "slow"], ["slow", "quick"]]
    assert [arm.missing for arm in report.arms] == [None, None, "not here"]
    quick, slow = report.arms[:2]
    assert quick.both.completed == slow.both.completed == 24
    assert slow.peak_memory_mib > 1
    (compared,) = report.comparisons
    assert compared.num_requests == 24
    assert compared.ttft_p50.value > 1.5
    result = tmp_path / "peers.json"
    result.write_bytes(encode_report(report))
    done = CliRunner().invoke(eval_group, ["report", str(result), "--markdown", str(tmp_path / "peers.md")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "peers.md").read_text(encoding="utf-8")
    for text in ("absent was not measured: not here", "TTFT P95 ratio", "word for word", "Manifest"):
        assert text in page
    table = result_table(report).splitlines()
    assert table[2].startswith("| quick 1.0 |")
    assert table[2].count("|") == table[0].count("|") == table[4].count("|")
    assert str(tmp_path) not in page + result.read_text(encoding="utf-8")

    def refuse(*arguments: Any) -> None:
        raise AssertionError("was measured again")

    monkeypatch.setattr(Bench, "_measure", refuse)
    again = _run(tmp_path / "work", peers, options)
    assert again.arms == report.arms


def test_a_server_that_does_not_start_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "OURS", "quick")
    broken = replace(_fake("broken", 0.0), command=lambda port: [sys.executable, "-c", "raise SystemExit('no luck')"])
    report = _run(tmp_path / "work", [_fake("quick", 0.0), broken], Options(rate=50.0, max_requests=12))
    assert "broken ended with exit status 1" in report.arms[1].missing
    assert "no luck" in report.arms[1].missing
    assert report.order == [["quick"], ["quick"]]


def test_peers_without_environment_say_what_is_missing(tmp_path: Path) -> None:
    ours, *peers = make_peers(tmp_path, tmp_path / "model.gguf")
    assert ours.name == OURS
    assert ours.missing is None
    assert len(peers) == 3
    for peer in peers:
        assert "make_*.sh" in (peer.missing or "")
        assert peer.settings["context"] == 8192
        assert "8192" in " ".join(peer.command(1)) or str(8192 * peer.settings["slots"]) in peer.command(1)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_memory_is_that_of_the_processes_below() -> None:
    assert descendants_mib(os.getpid()) == pytest.approx(0.0, abs=50.0)
    assert descendants_mib(os.getppid()) > 5.0


_FAKE_OPENVINO = '''
"""Stands in for openvino_genai: answers with one letter a step."""
import enum
class Reason(enum.Enum):
    NONE, STOP, LENGTH = range(3)
class Status(enum.Enum):
    RUNNING, FINISHED, CANCEL = range(3)
class Config:
    stop_token_ids = {0}
GenerationConfig = Config
class SchedulerConfig: pass
class Output:
    def __init__(self, ids, reason): self.generated_ids, self.finish_reason = ids, reason
class Handle:
    def __init__(self, config): self.left, self.out, self.status = config.max_new_tokens, [], Status.RUNNING
    def can_read(self): return bool(self.out)
    def read(self): return {0: self.out.pop(0)}
    def get_status(self): return self.status
    def cancel(self): self.status = Status.CANCEL
class Ids:
    def __init__(self, text): self.input_ids, self.shape = self, (1, len(text.split()))
class Tokenizer:
    def apply_chat_template(self, messages, add): return " ".join(m["content"] for m in messages)
    def encode(self, text, add_special_tokens): return Ids(text)
    def decode(self, ids): return "".join(chr(id_) for id_ in ids)
class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, properties, tokenizer_properties):
        assert scheduler.enable_prefix_caching
        self.handles = []
    def get_tokenizer(self): return Tokenizer()
    def get_config(self): return Config()
    def add_request(self, number, ids, config):
        if ids.shape[1] == 3: raise RuntimeError("three words")
        self.handles.append(Handle(config))
        return self.handles[-1]
    def step(self):
        for handle in self.handles:
            if handle.left:
                handle.left -= 1
                handle.out.append(Output([97 + handle.left], Reason.NONE if handle.left else Reason.LENGTH))
'''


def test_the_openvino_server_streams_counts_and_refuses(tmp_path: Path) -> None:
    from eval.launcher import free_port, started_server

    (tmp_path / "openvino_genai.py").write_text(_FAKE_OPENVINO, encoding="utf-8")
    script = Path(bench_peers.__file__).with_name("peers") / "openvino_server.py"
    port = free_port()
    command = [sys.executable, str(script), "m.gguf", "--port", str(port), "--max-model-len", "20"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with (
        started_server(command, f"http://127.0.0.1:{port}", ready_path="/health", environment=environment) as url,
        httpx.Client(base_url=url, timeout=20, trust_env=False) as http,
    ):
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 20

        def ask(text: str, max_tokens: int = 4) -> httpx.Response:
            messages = [{"role": "user", "content": text}]
            return http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": max_tokens})

        lines = [line.removeprefix("data: ") for line in ask("one two").text.splitlines() if line]
        *events, done = lines
        chunks = [json.loads(event) for event in events]
        assert done == "[DONE]"
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == "dcba"
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert chunks[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 4}
        assert "three words" in ask("one two three").text
        refused = ask("one two", max_tokens=19)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_committed_result_is_whole() -> None:
    file = Path(bench_peers.__file__).parents[1] / "results" / "peers.json"
    if not file.is_file():
        pytest.skip("the bench of peers has no committed result yet")
    report = msgspec.json.decode(file.read_bytes(), type=bench_peers.PeersReport)
    assert report.arms[0].name == OURS
    assert [arm.missing for arm in report.arms] == [None] * 4
    assert all(item.is_met for item in report.requirements)
    page = (file.parents[2] / "RESULTS.md").read_text(encoding="utf-8")
    assert between(MARKS, result_table(report)) in page
