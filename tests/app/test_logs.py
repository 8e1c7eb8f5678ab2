"""Logs: one line with ids and figures a request, and no word of a prompt anywhere but in its own answer."""

import asyncio
import gc
import io
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import structlog
from factories_app import EchoBackend, bearer, make_app, make_body, make_settings, served
from factories_tracing import traced
from factories_upstream import make_upstream_settings, running_upstream
from litestar.testing import AsyncTestClient

from app.asgi import create_app
from app.logs import configure_logging
from app.settings import LoggingSettings

URL = "/v1/chat/completions"
TRACEPARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
PLACES = ("system", "user", "assistant", "tool", "document", "denied", "title", "source", "meta", "schema", "answer")
MARK = "zyzzyva{}zq"


@pytest.fixture(params=["json", "console"])
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """What the gateway logs while a test runs."""
    yield from logging_to(LoggingSettings(format=request.param, level="debug"))


@pytest.fixture
def json_log() -> Iterator[io.StringIO]:
    yield from logging_to(LoggingSettings())


def logging_to(settings: LoggingSettings) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    configure_logging(settings, stream)
    yield stream
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def mark(place: str) -> str:
    return MARK.format(place)


def marked_body(**fields: Any) -> dict[str, Any]:
    """A request with a mark in every place that can hold text."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": f'"{mark("tool")}"'}}
    function = {"name": "look", "description": mark("tool"), "parameters": {"title": mark("schema")}}
    document = {"title": mark("title"), "source": mark("source"), "metadata": {mark("meta"): mark("meta")}}
    return {
        "model": "default",
        "messages": [
            {"role": "system", "content": f"You are {mark('system')}."},
            {"role": "user", "content": [{"type": "text", "text": f"First {mark('user')}."}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": f"It says {mark('tool')}."},
            {"role": "assistant", "content": f"Then {mark('assistant')}."},
            {"role": "user", "content": f"What is {mark('user')}?"},
        ],
        "documents": [
            {"id": mark("meta"), "text": f"All about {mark('document')}. " * 9, **document},
            {"id": "shut", "text": f"Never {mark('denied')}.", "acl": ["board"], **document},
        ],
        "tools": [{"type": "function", "function": function}],
        "metadata": {mark("meta"): mark("meta")},
        "user": mark("meta"),
        **fields,
    }


def broken(body: dict[str, Any]) -> list[bytes]:
    """Bodies that are refused, each with all the marks."""
    encoded = msgspec.json.encode(body)
    changes: list[dict[str, Any]] = [
        {"temperature": 9},
        {"max_tokens": mark("meta")},
        {"messages": []},
        {"messages": [{"role": mark("meta"), "content": mark("user")}]},
        {"messages": [{"role": "user", "content": {"text": mark("user")}}]},
        {"documents": [{"id": 7, "text": mark("document")}]},
        {"documents": [{"id": "a", "text": mark("document")}, {"id": "a", "text": mark("document")}]},
        {"firsttoken": {mark("meta"): 1}},
        {"firsttoken": {"policy": mark("meta")}},
        {"firsttoken": {"max_input_tokens": 3}},
        {"model": mark("meta")},
        {"response_format": {"type": mark("schema")}},
        {"logit_bias": {mark("meta"): 1}},
    ]
    return [
        encoded[:-20],
        encoded + b"}",
        b'"' + encoded[:50],
        *(msgspec.json.encode(body | change) for change in changes),
    ]


def assert_silent(text: str, places: tuple[str, ...] = PLACES) -> None:
    assert [place for place in places if mark(place) in text] == []


async def test_no_log_metric_or_span_has_a_word_of_a_prompt(log: io.StringIO) -> None:
    text = mark("answer")
    told: list[str] = []
    for backend in (
        EchoBackend(reply=f"{text} {text}"),
        EchoBackend(reply=f"{text} {text}", fail_after=1),
        EchoBackend(start_error=KeyError(mark("user"))),
        EchoBackend(start_error=ValueError(mark("document"))),
    ):
        app, exporter = traced(backend=backend)
        async with AsyncTestClient(app) as http:
            for body in (marked_body(), marked_body(stream=True)):
                for path in (URL, "/v1/compact", "/v1/responses", "/v1/messages", "/v1/completions"):
                    await http.post(path, json=body, headers=bearer())
            for content in broken(marked_body()):
                refused = await http.post(URL, content=content, headers=bearer() | {"content-type": "application/json"})
                assert 400 <= refused.status_code < 500
                assert_silent(refused.text, ("system", "user", "assistant", "tool", "document", "denied", "title"))
            told.append((await http.get("/metrics")).text)
        told += [span.to_json() for span in exporter.get_finished_spans()]
        assert exporter.get_finished_spans()
    assert log.getvalue()
    assert_silent(log.getvalue())
    assert_silent("".join(told))


def test_what_an_upstream_says_is_not_logged(log: io.StringIO) -> None:
    with running_upstream() as upstream:
        app, exporter = traced(make_upstream_settings(upstream))
        with served(app) as url:
            for status in (400, 404, 422, 429, 500, 503):
                error = {"message": mark("user"), "type": mark("user"), "code": mark("user"), "param": mark("user")}
                upstream.control(status=status, body={"error": error})
                for stream in (False, True):
                    body = marked_body(stream=stream, messages=marked_body()["messages"][-1:])
                    assert httpx.post(f"{url}{URL}", json=body, headers=bearer()).status_code >= 400
            upstream.control(reply=mark("answer"), error_after=2)
            httpx.post(f"{url}{URL}", json=marked_body(stream=True), headers=bearer())
            metrics = httpx.get(f"{url}/metrics").text
    assert_silent(log.getvalue())
    assert_silent(metrics + "".join(span.to_json() for span in exporter.get_finished_spans()))


async def test_an_exception_is_told_by_kind_and_place_its_causes_too(json_log: io.StringIO) -> None:
    try:
        try:
            raise KeyError(mark("user"))
        except KeyError as error:
            raise RuntimeError(mark("system")) from error
    except RuntimeError:
        logging.getLogger("somebody").exception("it failed")
    [line] = [msgspec.json.decode(line) for line in json_log.getvalue().splitlines()]
    assert line["exception"].startswith("RuntimeError at tests/app/test_logs.py:")
    assert " from KeyError at tests/app/test_logs.py:" in line["exception"]
    assert_silent(json_log.getvalue())


async def test_a_task_that_nobody_waited_for_is_told_without_its_words(json_log: io.StringIO) -> None:
    async def fail() -> None:
        raise ValueError(mark("document"))

    task = asyncio.get_running_loop().create_task(fail())
    await asyncio.sleep(0)
    del task
    gc.collect()
    [line] = [msgspec.json.decode(line) for line in json_log.getvalue().splitlines()]
    assert line["event"] == "Task exception was never retrieved"
    assert_silent(json_log.getvalue())


def test_messages_of_exceptions_are_logged_where_the_operator_wants_them() -> None:
    for stream in logging_to(LoggingSettings(exception_text=True)):
        try:
            raise KeyError("the words")
        except KeyError:
            logging.getLogger("somebody").exception("it failed")
        assert "the words" in stream.getvalue()


async def test_each_request_has_a_line_that_says_who_what_how_long_and_how_it_ended(json_log: io.StringIO) -> None:
    ids = bearer() | TRACEPARENT | {"x-request-id": "abc"}
    async with AsyncTestClient(make_app()) as http:
        answer = (await http.post(URL, json=make_body(), headers=ids)).json()
        await http.post(URL, json=make_body(temperature=9), headers=ids)
    lines = [msgspec.json.decode(line) for line in json_log.getvalue().splitlines()]
    [done] = [line for line in lines if line["event"] == "completion"]
    [refused] = [line for line in lines if line["event"] == "request_refused"]
    for line in (done, refused):
        assert (line["request_id"], line["tenant"], line["key"]) == ("abc", "acme", "demo")
        assert line["trace_id"] == TRACEPARENT["traceparent"].split("-")[1]
    assert done["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert (done["completion_tokens"], done["outcome"], done["cached_tokens"]) == (4, "stop", 0)
    assert done["receipt_id"] == answer["firsttoken"]["receipt_id"]
    assert 0 < done["ttft_ms"] <= done["total_ms"]
    assert {"queue_ms", "prefill_ms"} <= done.keys()
    assert (refused["status"], refused["code"], refused["param"]) == (400, "invalid_value", "temperature")


def test_a_stream_that_its_client_leaves_has_its_line_as_well(json_log: io.StringIO) -> None:
    app = create_app(make_settings(), EchoBackend(reply="a b c d e f", step_s=0.05))
    with served(app) as url, httpx.stream("POST", f"{url}{URL}", json=make_body(stream=True), headers=bearer()) as got:
        next(got.iter_bytes())
    lines = [msgspec.json.decode(line) for line in json_log.getvalue().splitlines()]
    assert [line["outcome"] for line in lines if line["event"] == "completion"] == ["abort"]
