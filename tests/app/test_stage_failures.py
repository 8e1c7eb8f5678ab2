"""A stage that fails inside a request: the answer that is given nevertheless, and the one that is refused."""

from typing import Any

import pytest
from factories_app import EchoBackend, bearer, make_app, make_body, make_documents, make_settings
from litestar.testing import AsyncTestClient

from app.settings import PolicySettings
from reducer.config import FailureConfig, ReducerConfig

pytestmark = pytest.mark.stages_fail

CHAT = "/v1/chat/completions"
SECRET = "heron"
PLACES = {"clean": "clean", "dedup": "deduplicate", "rank": "rank", "history": "reduce_history", "select": "shortlist"}
BODY = make_body(documents=make_documents(8), firsttoken={"max_input_tokens": 900})


def boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError(f"cannot read {SECRET}")


def client(backend: EchoBackend, **failure: Any) -> AsyncTestClient[Any]:
    settings = make_settings(
        reducer=ReducerConfig(failure=FailureConfig(**failure)),
        policies={"strict": PolicySettings(reducer={"failure": {"rank": "closed"}})},
    )
    return AsyncTestClient(make_app(settings, backend))


def metric(text: str, name: str, *labels: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith(name) and all(label in line for label in labels)]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


@pytest.mark.parametrize("stage", PLACES)
async def test_an_open_stage_is_left_out_and_answer_receipt_and_metrics_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    monkeypatch.setattr(f"reducer.stages.{PLACES[stage]}", boom)
    backend = EchoBackend()
    async with client(backend) as http:
        answer = await http.post(CHAT, json=BODY, headers=bearer())
        extension = answer.json()["firsttoken"]
        receipt = (await http.get(f"/v1/receipts/{extension['receipt_id']}", headers=bearer())).json()
        metrics = (await http.get("/metrics")).text
    assert answer.status_code == 200
    assert extension["degraded"][stage].startswith(f"{stage} failed (RuntimeError): ")
    assert answer.headers["x-firsttoken-failed-stages"] == stage
    assert extension["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"] <= 900
    assert [entry["stage"] for entry in receipt["stages"] if "failure" in entry] == [stage]
    assert metric(metrics, "firsttoken_stage_failures_total", f'stage="{stage}"', 'mode="open"') == 1.0
    assert SECRET not in str(extension) + str(receipt["stages"]) + caplog.text


@pytest.mark.parametrize("stage", PLACES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_stage_is_503_and_names_itself_and_no_text(
    monkeypatch: pytest.MonkeyPatch, stage: str, stream: bool
) -> None:
    monkeypatch.setattr(f"reducer.stages.{PLACES[stage]}", boom)
    backend = EchoBackend()
    async with client(backend, **{stage: "closed"}) as http:
        answer = await http.post(CHAT, json={**BODY, "stream": stream}, headers=bearer())
        metrics = (await http.get("/metrics")).text
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", "stage_failed")
    assert f"The {stage} stage of the reduction failed" in error["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert SECRET not in answer.text
    assert backend.requests == []
    assert metric(metrics, "firsttoken_stage_failures_total", f'stage="{stage}"', 'mode="closed"') == 1.0
    assert metric(metrics, "firsttoken_request_errors_total", 'code="stage_failed"') == 1.0


async def test_access_that_fails_is_503_and_nothing_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reducer.access.can_read", boom)
    backend = EchoBackend()
    async with client(backend) as http:
        answers = [
            await http.post(CHAT, json=BODY, headers=bearer() | extra) for extra in ({}, {"x-firsttoken-bypass": "1"})
        ]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert "The access stage" in answers[0].json()["error"]["message"]
    assert backend.requests == []


async def test_a_policy_sets_its_own_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reducer.stages.rank", boom)
    async with client(EchoBackend()) as http:
        body = {**BODY, "firsttoken": {"policy": "strict"}}
        answers = [await http.post(CHAT, json=sent, headers=bearer()) for sent in (BODY, body)]
    assert [answer.status_code for answer in answers] == [200, 503]


async def test_what_the_template_refuses_is_no_failure_of_a_stage() -> None:
    async with client(EchoBackend()) as http:
        answer = await http.post(CHAT, json={**BODY, "chat_template_kwargs": {"refuse": True}}, headers=bearer())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


async def test_an_answer_without_a_failure_says_nothing_of_one() -> None:
    async with client(EchoBackend()) as http:
        answer = await http.post(CHAT, json=BODY, headers=bearer())
    assert "x-firsttoken-failed-stages" not in answer.headers
    assert all("failure" not in stage for stage in answer.json()["firsttoken"]["stages"])


async def test_a_message_whose_passages_cannot_be_recognised_goes_on_whole_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(f"cannot read {SECRET}")

    monkeypatch.setattr("reducer.pipeline.recognise_passages", fail)
    monkeypatch.setattr("app.compaction.recognise_passages", fail)
    text = "".join(f"<document>Room {n} holds {n} chairs.</document>\n" for n in range(30)) + "How many?"
    body = make_body(messages=[{"role": "user", "content": text}])
    async with client(EchoBackend()) as http:
        answer = await http.post(CHAT, json=body, headers=bearer())
    assert (answer.status_code, answer.headers["x-firsttoken-failed-stages"]) == (200, "recognise")
    assert "stay as they are" in answer.json()["firsttoken"]["degraded"]["recognise"]
    async with client(EchoBackend(), recognise="closed") as http:
        refused = await http.post(CHAT, json=body, headers=bearer())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stage_failed")
    assert SECRET not in answer.text + refused.text + caplog.text
