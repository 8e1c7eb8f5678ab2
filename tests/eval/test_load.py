"""Load tests over real sockets: who is counted how, what becomes of refusals, and that arrivals follow the clock."""

import asyncio
import gzip
import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from factories_app import ACME_KEY, EchoBackend, make_app, make_settings, served
from factories_eval import FakeGateway, make_case, make_chunk, rag_case, running, write_cases

from app.backends.base import BackendRequest
from engine.outputs import RequestOutput
from eval import plots
from eval.arrivals import burst_arrivals, poisson_arrivals, trace_arrivals
from eval.cli import eval_group
from eval.exports import aiperf_document, guidellm_document
from eval.load import LoadRun, ServerSamples, run_load
from eval.load_records import LoadReport, RequestRecord, vllm_fields
from eval.load_report import stage_rows
from eval.load_summary import distribution, make_load_report, meets, parse_objectives
from eval.manifest import make_machine_manifest
from eval.streaming_client import StreamingClient, refusal_reason
from eval.traces import TraceLine
from eval.workload import LoadRequest, RequestOptions, case_body, case_requests, trace_text


def _record(id: str = "a", **fields: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "status": "ok", "arrival_s": 0.0, "input_tokens": 100, "prompt_tokens": 100, "output_tokens": 5,
        "ttft_ms": 100.0, "e2el_ms": 300.0, "itl_ms": [50.0] * 4,
    }  # fmt: skip
    return RequestRecord(id=id, **(defaults | fields))


def _report(records: list[RequestRecord], samples: ServerSamples | None = None, **options: Any) -> LoadReport:
    run = LoadRun(records, samples or ServerSamples(), duration_s=10.0)
    return make_load_report("test", run, make_machine_manifest(settings={}, seed=0), **options)


def test_three_definitions_of_one_run() -> None:
    record = _record()
    assert record.tpot_ms == 50.0  # vLLM: (300 - 100) / (5 - 1)
    report = _report([record])
    document = guidellm_document(report, [record])["benchmarks"][0]["metrics"]
    assert document["time_per_output_token_ms"]["successful"]["mean"] == 60.0  # guidellm: with the first token
    assert document["inter_token_latency_ms"]["successful"]["mean"] == 50.0
    assert "includes the first token" in report.definitions["tpot"]
    assert {"ttft", "tpot", "itl", "e2el", "goodput"} <= report.definitions.keys()


def test_one_output_token_has_no_tpot_and_misses_none() -> None:
    record = _record(output_tokens=1, itl_ms=[])
    assert record.tpot_ms is None
    assert meets(record, {"tpot": 1.0, "ttft": 100.0})


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    records = [_record("a"), _record("b", ttft_ms=900.0), _record("c", e2el_ms=5000.0), _record("d", status="refused")]
    report = _report(records, objectives=parse_objectives(["ttft:500", "e2el:1000"]))
    assert (report.request_goodput, report.slo_attainment) == (0.1, 0.25)


@pytest.mark.parametrize("text", ["ttft", "itl:5", "ttft:-1", "ttft:soon"])
def test_malformed_objectives_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"objective|could not convert"):
        parse_objectives([text])


def test_failures_stay_out_of_latencies_and_stand_beside_them() -> None:
    refused = _record("b", status="refused", reason="429 rate_limit_exceeded", ttft_ms=None, bucket="long")
    failed = _record("c", status="failed", reason="timeout", ttft_ms=None, e2el_ms=60_000.0)
    report = _report([_record("a"), refused, failed])
    assert report.overall.e2el_ms is not None
    assert (report.overall.e2el_ms.count, report.overall.e2el_ms.max) == (1, 300.0)
    assert report.overall.refused == {"429 rate_limit_exceeded": 1}
    assert report.overall.failed == {"timeout": 1}
    assert (report.completed, report.failed) == (1, 2)
    assert [bucket.bucket for bucket in report.buckets] == ["short", "long"]


def test_hit_rate_counts_each_request_once_whatever_the_server_counted() -> None:
    samples = ServerSamples()
    samples.add('vllm:prefix_cache_queries_total{engine="0"} 30000\nvllm:prefix_cache_hits_total 80\n', 0.0)
    records = [_record("a", cached_tokens=80), _record("b", prompt_tokens=300, cached_tokens=0)]
    assert _report(records, samples).overall.hit_rate == 0.2


def test_stages_and_what_is_outside_the_gateway_sum_to_the_mean_ttft() -> None:
    records = [
        _record("a", stages_ms={"rank": 20.0, "prefill": 70.0}),
        _record("b", ttft_ms=200.0, stages_ms={"prefill": 150.0, "queue": 30.0}),
        _record("c", ttft_ms=999.0),
    ]
    report = _report(records)
    found = report.overall.stages_ms
    assert found == {"rank": 10.0, "prefill": 110.0, "queue": 15.0, "outside the gateway": 15.0}
    assert sum(found.values()) == 150.0  # of those that told them
    assert stage_rows(report)[0][0] == "prefill"
    drawn = plots._parts(report.buckets)
    assert sum(values[0] for name, values in drawn.items() if name != "first to last token") == 150.0
    assert _report([_record("c")]).overall.stages_ms == {}


def test_a_gateways_stages_come_into_the_records_of_a_load_test() -> None:
    body = case_body(make_case([make_chunk("a", "Blue birds sing. " * 30)], question="Which?"), RequestOptions())

    async def send(url: str) -> RequestRecord:
        client = StreamingClient(url, ACME_KEY)
        try:
            request = LoadRequest(id="a", arrival_s=0.0, body=body)
            return (await client.send(request, time.perf_counter(), time.perf_counter)).record
        finally:
            await client.aclose()

    with served(make_app(make_settings(), EchoBackend(step_s=0.02))) as url:
        record = asyncio.run(send(url))
    assert record.status == "ok"
    assert {"access", "pack", "prefill"} <= record.stages_ms.keys()
    assert record.ttft_ms is not None
    assert 0 < sum(record.stages_ms.values()) <= record.ttft_ms


def test_the_watermark_is_the_highest_sample() -> None:
    samples = ServerSamples()
    for usage in ("0.25", "0.75", "0.5"):
        page = f'# HELP\nfirsttoken_kv_cache_usage_perc{{model_name="m"}} {usage}\nfirsttoken_num_preemptions_total 2\n'
        samples.add(page, 1.0)
    assert samples.kv_usage_max == 0.75
    assert _report([_record()], samples).num_preemptions == 0.0


def test_percentiles_are_linear_between_neighbours() -> None:
    found = distribution([float(value) for value in range(1, 102)])
    assert found is not None
    assert (found.p50, found.p95, found.p99, found.count) == (51.0, 96.0, 100.0, 101)
    assert distribution([None]) is None


def test_poisson_arrivals_have_the_rate_and_the_seed_decides() -> None:
    arrivals = poisson_arrivals(4.0, 4000, seed=1)
    assert arrivals[-1] == pytest.approx(1000.0, rel=0.05)
    assert arrivals == poisson_arrivals(4.0, 4000, seed=1)
    gaps = distribution([b - a for a, b in itertools.pairwise(arrivals)])
    assert gaps is not None
    assert gaps.std / gaps.mean == pytest.approx(1.0, abs=0.05)
    burstier = poisson_arrivals(4.0, 4000, seed=1, burstiness=0.25)
    bursty = distribution([b - a for a, b in itertools.pairwise(burstier)])
    assert bursty is not None
    assert bursty.std / bursty.mean == pytest.approx(2.0, abs=0.15)


def test_bursts_and_traces_come_when_they_say() -> None:
    assert burst_arrivals(2, 5.0, 3) == [0.0, 0.0, 5.0]
    lines = [TraceLine(t=t, input_tokens=1, output_tokens=1) for t in (10.0, 12.0, 16.0)]
    assert trace_arrivals(lines, 0.5) == [0.0, 1.0, 3.0]
    with pytest.raises(ValueError, match="time_scale must be positive, got 0"):
        trace_arrivals(lines, 0.0)


def test_every_case_comes_once_before_one_comes_again() -> None:
    cases = [make_case(id=str(number)) for number in range(5)]
    requests = case_requests(cases, [0.0] * 15, RequestOptions(), seed=3)
    ids = [request.case.id for request in requests if request.case is not None]
    assert all(sorted(ids[start : start + 5]) == list("01234") for start in (0, 5, 10))
    assert ids[:5] != ids[5:10]


def test_another_server_gets_the_documents_in_the_message() -> None:
    case = make_case([make_chunk("a", "Blue.", title="Birds")], question="Which?")
    ours = case_body(case, RequestOptions(policy="tight"))
    theirs = case_body(case, RequestOptions(target="openai", policy="tight"))
    assert ours["documents"][0]["text"] == "Blue."
    assert ours["firsttoken"] == {"policy": "tight", "waterfall": True}
    assert theirs["messages"][-1]["content"] == "<documents>\n[1] Birds\nBlue.\n</documents>\n\nWhich?"
    assert {"documents", "firsttoken"}.isdisjoint(theirs)
    assert ours["messages"][0] == theirs["messages"][0]


def test_equal_blocks_become_equal_beginnings_and_nothing_more() -> None:
    def text(blocks: list[int], unique: str) -> list[str]:
        line = TraceLine(t=0.0, input_tokens=100, output_tokens=1, prefix_blocks=blocks, block_tokens=32)
        return trace_text(line, tokens_per_word=2.0, unique=unique).split()

    first, second = text([1, 2, 3, 4], "a"), text([1, 2, 7, 8], "b")
    assert len(first) == 50
    assert first[:32] == second[:32]
    assert first[32:48] != second[32:48]


async def _run(url: str, requests: list[LoadRequest], key: str = ACME_KEY) -> LoadRun:
    client = StreamingClient(url, key)
    try:
        return await run_load(client, requests)
    finally:
        await client.aclose()


def _requests(num_requests: int, gap_s: float = 0.0, **body: Any) -> list[LoadRequest]:
    case = make_case([make_chunk("a", "The heron is blue.")], answers=["Hello"])
    whole = case_body(case, RequestOptions(max_tokens=16)) | body
    return [LoadRequest(str(number), number * gap_s, whole, case) for number in range(num_requests)]


class CountingBackend(EchoBackend):
    """Remembers how many requests ran at once."""

    peak = 0

    async def generate(self, request: BackendRequest) -> AsyncIterator[RequestOutput]:
        async for output in super().generate(request):
            self.peak = max(self.peak, self.num_running)
            yield output


def test_a_slow_server_does_not_hold_back_the_arrivals() -> None:
    backend = CountingBackend(step_s=0.05)
    with served(make_app(backend=backend)) as url:
        run = asyncio.run(_run(url, _requests(12, gap_s=0.01)))
    assert [record.status for record in run.records] == ["ok"] * 12
    assert max(record.arrival_s for record in run.records) == pytest.approx(0.11)
    assert backend.peak > 1  # a closed loop of one client has one request at a time


def test_a_record_tells_what_the_server_and_the_client_saw() -> None:
    with served(make_app(backend=EchoBackend(step_s=0.02))) as url:
        record = asyncio.run(_run(url, _requests(1))).records[0]
    assert record.ttft_ms is not None
    assert record.first_chunk_ms is not None
    assert record.first_chunk_ms <= record.ttft_ms <= record.e2el_ms
    assert (record.output_tokens, len(record.itl_ms), record.finish_reason) == (4, 3, "stop")
    assert (record.queue_ms, record.prefill_ms, record.contains) == (1.0, 5.0, 1.0)
    assert record.reduce_ms is not None
    assert record.input_tokens >= record.prompt_tokens > 0


def test_refusals_have_their_reason() -> None:
    limited = make_settings(acme={"requests_per_minute": 2})
    with served(make_app(limited)) as url:
        records = asyncio.run(_run(url, _requests(5))).records
    reasons = sorted(record.reason or "ok" for record in records)
    assert reasons == ["429 rate_limit_exceeded"] * 3 + ["ok"] * 2


def test_a_stream_that_breaks_off_has_failed() -> None:
    with served(make_app(backend=EchoBackend(fail_after=2))) as url:
        record = asyncio.run(_run(url, _requests(1))).records[0]
    assert (record.status, record.reason) == ("failed", "out_of_memory")  # the backend's words: allocation failed


def test_a_server_that_is_not_there_is_a_failure_and_no_crash() -> None:
    record = asyncio.run(_run("http://127.0.0.1:9", _requests(1))).records[0]
    assert (record.status, record.reason) == ("failed", "connection: ConnectError")


@pytest.mark.parametrize(
    ("status", "content", "reason"),
    [
        (503, b'{"error": {"message": "busy", "type": "overloaded", "code": null}}', "503 overloaded"),
        (500, b'{"error": {"message": "CUDA out of memory", "type": "x", "code": 500}}', "out_of_memory"),
        (502, b"<html>bad gateway</html>", "502"),
        (400, b'{"object": "error", "message": "no"}', "400"),
    ],
)
def test_reasons_of_servers_of_all_kinds(status: int, content: bytes, reason: str) -> None:
    assert refusal_reason(status, content) == reason


def _load(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(eval_group, ["load", "--url", url, "--api-key", ACME_KEY, *arguments])


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    return write_cases(tmp_path / "made.jsonl.gz", [rag_case(f"q-{place}", gold_at=place) for place in range(4)])


def test_command_writes_a_result_that_every_reader_finds_its_names_in(
    cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    output = tmp_path / "load.json"
    with running(FakeGateway()) as url:
        result = _load(
            url, "--data", str(cases), "--rate", "200", "--num-requests", "8", "--goodput", "ttft:60000",
            "--output", str(output),
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "tpot: ms per output token after the first" in result.output
    flat = json.loads(output.read_bytes())
    assert {"request_throughput", "p99_ttft_ms", "median_tpot_ms", "mean_itl_ms", "std_e2el_ms"} <= flat.keys()
    assert (flat["completed"], flat["failed"], flat["total_output_tokens"]) == (8, 0, 8 * 3 - 2)
    assert flat["overall"]["contains"] == 0.75  # the gateway keeps three of ten passages
    known = {name: value for name, value in flat.items() if name in LoadReport.__struct_fields__}
    report = msgspec.convert(known, LoadReport)
    lines = gzip.decompress((tmp_path / flat["requests_file"]).read_bytes()).splitlines()
    records = [msgspec.json.decode(line, type=RequestRecord) for line in lines]
    assert vllm_fields(report)["completed"] == len(records)
    guidellm = json.loads((tmp_path / "load.guidellm.json").read_bytes())["benchmarks"][0]["metrics"]
    assert guidellm["request_totals"] == {"successful": 8, "errored": 0, "incomplete": 0, "total": 8}
    assert set(guidellm["time_to_first_token_ms"]["successful"]) >= {"mean", "median", "std_dev", "percentiles"}
    aiperf = json.loads((tmp_path / "load.aiperf.json").read_bytes())
    assert aiperf["schema_version"] == "1.4"
    assert aiperf["time_to_first_token"]["unit"] == "ms"
    assert set(aiperf["request_latency"]) >= {"avg", "p1", "p50", "p99", "count", "sum"}
    assert aiperf == json.loads(json.dumps(aiperf_document(report, records)))


def test_a_trace_is_replayed_with_its_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        TraceLine(t=n * 0.01, input_tokens=40 * n, output_tokens=2, prefix_blocks=[0, n], block_tokens=32)
        for n in (1, 2, 3)
    ]
    trace.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    gateway = FakeGateway(window=100_000)
    with running(gateway) as url:
        result = _load(url, "--trace", str(trace), "--target", "openai", "--time-scale", "0.5")
    assert result.exit_code == 0, result.output
    sent = [body["messages"][-1]["content"].split() for _, body, _ in gateway.requests[-3:]]
    assert sorted(len(words) for words in sent) == [40, 80, 120]  # the server counts words
    first, second = sent[0], sent[1]
    assert first[:32] == second[:32]


def test_refused_requests_are_exit_status_one(cases: Path) -> None:
    with running(FakeGateway(status=503)) as url:
        result = _load(url, "--data", str(cases), "--rate", "500", "--num-requests", "3")
        allowed = _load(url, "--data", str(cases), "--rate", "500", "--num-requests", "3", "--max-failed", "1")
    assert (result.exit_code, allowed.exit_code) == (1, 0)
    assert "3 requests have no latency: 3 x 503" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "exactly one of --data and --trace"),
        (("--data", "{cases}", "--bursts", "0:5"), "at least one request"),
        (("--data", "{cases}", "--goodput", "itl:5"), "objective"),
        (("--data", "{cases}", "--output", "missing/a.json"), "does not exist"),
    ],
)
def test_wrong_usage_is_named(cases: Path, arguments: tuple[str, ...], problem: str) -> None:
    result = _load("http://127.0.0.1:9", *(argument.format(cases=cases) for argument in arguments))
    assert result.exit_code == 2
    assert problem in " ".join(result.output.split())
