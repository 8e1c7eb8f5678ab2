"""The stages of the time to the first token: they sum to it, whatever clocks say, and are told to those who ask."""

import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from factories_app import EchoBackend, bearer, make_app, make_body, make_documents, make_settings, served
from factories_storage import make_storage_settings
from factories_upstream import gateway_on, running_upstream
from hypothesis import given
from hypothesis import strategies as st
from litestar.testing import AsyncTestClient
from prometheus_client.parser import text_string_to_metric_families

from app.auth import Authenticator
from app.receipts import ReceiptStore, with_waterfall
from app.storage.service import Storage
from app.waterfall import STAGES, StagePart, TimedJob, Timeline, WaterfallReport
from engine.outputs import RequestTimings

URL = "/v1/chat/completions"
SUM = "firsttoken_ttft_stage_seconds_sum"


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total_us(report: dict[str, Any]) -> int:
    return sum(round(part["ms"] * 1000) for part in report["stages"])


@given(
    laps=st.lists(st.tuples(st.sampled_from(STAGES), st.floats(-1.0, 50.0)), max_size=20),
    until=st.floats(0.0, 60.0),
)
def test_the_parts_sum_to_the_whole_and_none_is_negative(laps: list[tuple[Any, float]], until: float) -> None:
    timeline = Timeline(1000.0)
    for stage, end_s in laps:
        timeline.lap(stage, 1000.0 + end_s)
    waterfall = timeline.waterfall(1000.0 + until)
    parts = waterfall.by_stage()
    assert sum(parts.values()) == waterfall.ttft_us == round(until * 1e6)
    assert all(us > 0 for us in parts.values())


def test_an_engine_that_claims_more_time_than_there_was_gets_what_there_was() -> None:
    timeline = Timeline(time.perf_counter())
    timings = RequestTimings(queue_ms=1e6, prefill_ms=2e6, decode_ms=0, num_chunks=1, num_preemptions=0)
    timeline.lap_engine(timings)
    now = time.perf_counter()
    parts = timeline.waterfall(now).by_stage()
    assert set(parts) <= {"queue", "other"}
    assert sum(parts.values()) == round((now - timeline.arrived_s) * 1e6)


def test_a_job_in_a_thread_is_waiting_work_and_the_way_back() -> None:
    timeline = Timeline(10.0)
    job = TimedJob()
    assert job(lambda value: value + 1, 1) == 2
    job.started_s, job.ended_s = 12.0, 17.0
    timeline.lap_job(job, "receipt", [("access", 1.0), ("rank", 3.0)])
    assert list(timeline.waterfall(17.0).intervals) == [
        ("worker_wait", 0, 2_000_000),
        ("access", 2_000_000, 3_000_000),
        ("rank", 3_000_000, 6_000_000),
        ("receipt", 6_000_000, 7_000_000),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_tells_the_stages_to_who_asks_and_they_sum_to_its_first_token(stream: bool) -> None:
    body = make_body(documents=make_documents(30), firsttoken={"waterfall": True})
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with AsyncTestClient(make_app()) as http:
        response = await http.post(URL, json=body, headers=bearer())
    if stream:
        [*_, last] = [line for line in response.text.split("\n\n") if '"firsttoken"' in line]
        own = msgspec.json.decode(last.removeprefix("data: "))["firsttoken"]
    else:
        own = response.json()["firsttoken"]
    report = own["waterfall"]
    assert total_us(report) == round(report["ttft_ms"] * 1000) == round(own["timings_ms"]["first_token"] * 1000)
    names = [part["stage"] for part in report["stages"]]
    assert len(names) == len(set(names))
    assert {"access", "dedup", "rank", "select", "pack", "receipt"} <= set(names) <= set(STAGES)


async def test_nobody_is_told_who_has_not_asked() -> None:
    async with AsyncTestClient(make_app()) as http:
        answer = (await http.post(URL, json=make_body(), headers=bearer())).json()
        receipt = (await http.get(f"/v1/receipts/{answer['firsttoken']['receipt_id']}", headers=bearer())).json()
    assert "waterfall" not in answer["firsttoken"]
    assert "waterfall" not in receipt


async def test_the_receipt_of_who_asked_has_what_the_answer_had() -> None:
    async with AsyncTestClient(make_app()) as http:
        answer = (await http.post(URL, json=make_body(firsttoken={"waterfall": True}), headers=bearer())).json()
        receipt = (await http.get(f"/v1/receipts/{answer['firsttoken']['receipt_id']}", headers=bearer())).json()
    assert receipt["waterfall"] == answer["firsttoken"]["waterfall"]


async def test_the_database_keeps_the_later_record_whether_the_first_is_written_or_waits(tmp_path: Path) -> None:
    settings = make_storage_settings(tmp_path, storage={"flush_interval_s": 3600.0})
    principal = Authenticator(settings).authenticate("Bearer sk-acme-demo")
    report = WaterfallReport(ttft_ms=1.5, stages=[StagePart(stage="prefill", ms=1.5)])
    storage = Storage(settings, memory=(memory := ReceiptStore(settings.receipts)))
    await storage.open()
    try:
        for receipt_id, is_written in (("rcpt_a", True), ("rcpt_b", False)):
            storage.receipts.put(receipt_id, principal, b'{"n":1}')
            if is_written:
                await storage.flush()
            storage.receipts.put(receipt_id, principal, with_waterfall(b'{"n":1}', report))
            await storage.flush()
            found = await storage.receipts.find(receipt_id)
            assert found is not None
            assert msgspec.json.decode(found.document)["waterfall"]["ttft_ms"] == 1.5
        assert len(memory) == 2
        assert memory.num_bytes == 2 * len(with_waterfall(b'{"n":1}', report))
    finally:
        await storage.close()


async def test_the_metric_sums_over_all_stages_to_the_time_to_the_first_token() -> None:
    async with AsyncTestClient(make_app()) as http:
        for number in (0, 20, 60):
            body = make_body(documents=make_documents(number + 1), firsttoken={"bypass": number == 60})
            assert (await http.post(URL, json=body, headers=bearer())).status_code in (200, 400)
        found = samples((await http.get("/metrics")).text)
    ttft = {labels["length_bucket"]: value for labels, value in found["firsttoken_time_to_first_token_seconds_sum"]}
    for bucket in ("short", "medium", "long", "very_long"):
        parts = [value for labels, value in found[SUM] if labels["length_bucket"] == bucket]
        assert len(parts) == len(STAGES)
        assert sum(parts) == pytest.approx(ttft.get(bucket, 0.0), abs=1e-5)
    assert len(ttft) > 1


def test_a_replica_is_one_stage_from_sending_to_its_first_text() -> None:
    body = make_body(stream=True, stream_options={"include_usage": True}, firsttoken={"waterfall": True})
    with running_upstream() as upstream, gateway_on(upstream) as url:
        upstream.control(delay_s=0.05)
        text = httpx.post(f"{url}{URL}", json=body, headers=bearer()).text
    [*_, last] = [line for line in text.split("\n\n") if '"firsttoken"' in line]
    report = msgspec.json.decode(last.removeprefix("data: "))["firsttoken"]["waterfall"]
    parts = {part["stage"]: part["ms"] for part in report["stages"]}
    assert total_us(report) == round(report["ttft_ms"] * 1000)
    assert parts["upstream"] >= 100  # the role and the first text, 50 ms each
    assert "prefill" not in parts


def test_waiting_for_a_slow_body_is_a_stage_of_its_own() -> None:
    body = msgspec.json.encode(make_body(firsttoken={"waterfall": True}))

    def slowly() -> Any:
        yield body[:10]
        time.sleep(0.2)
        yield body[10:]

    with served(make_app(make_settings(), EchoBackend())) as url:
        answer = httpx.post(f"{url}{URL}", content=slowly(), headers=bearer()).json()
    parts = {part["stage"]: part["ms"] for part in answer["firsttoken"]["waterfall"]["stages"]}
    assert parts["read_body"] >= 150
