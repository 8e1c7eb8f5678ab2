"""OpenTelemetry spans: GenAI names, one server span a request, stages below it, W3C context in and out, no text."""

import asyncio
import gzip
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest
from factories_app import (
    OUTSIDER_KEY,
    EchoBackend,
    bearer,
    make_body,
    make_documents,
    make_settings,
    served,
    wait_until,
)
from factories_tracing import traced
from factories_upstream import make_upstream_settings, running_upstream
from litestar import Litestar
from litestar.testing import AsyncTestClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from app.asgi import create_app
from app.errors import ConfigError
from app.gateway import Gateway, make_gateway
from app.tracing_settings import TracingSettings

URL = "/v1/chat/completions"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}


def server_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    [span] = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    return span


def children(exporter: InMemorySpanExporter, kind: SpanKind = SpanKind.INTERNAL) -> dict[str, ReadableSpan]:
    parent = server_span(exporter).get_span_context()
    found = [span for span in exporter.get_finished_spans() if span.kind is kind]
    assert all(span.parent is not None and span.parent.span_id == parent.span_id for span in found)
    return {span.name: span for span in found}


async def post(app: Litestar, body: Any, headers: dict[str, str] | None = None, url: str = URL) -> httpx.Response:
    async with AsyncTestClient(app) as client:
        response: httpx.Response = await client.post(url, json=body, headers=bearer() | (headers or {}))
        return response


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_is_one_server_span_by_the_genai_conventions(stream: bool) -> None:
    app, exporter = traced(backend=EchoBackend())
    body = make_body(documents=make_documents(20), temperature=0.5, seed=7, max_tokens=9, stream=stream)
    response = await post(app, body)
    span = server_span(exporter)
    assert span.name == "chat default"
    attributes = dict(span.attributes or {})
    if not stream:
        usage = response.json()["usage"]
        assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert attributes["gen_ai.response.id"] == response.json()["id"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "firsttoken",
        "gen_ai.request.model": "default",
        "gen_ai.response.model": "bytes",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.stream": stream,
        "gen_ai.output.type": "text",
        "http.request.method": "POST",
        "http.route": URL,
        "http.response.status_code": 200,
        "firsttoken.tenant": "acme",
        "firsttoken.receipt_id": response.headers["x-firsttoken-receipt"],
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "firsttoken"


async def test_stages_of_reducer_and_engine_are_spans_inside_it_one_after_the_other() -> None:
    app, exporter = traced(backend=EchoBackend(step_s=0.01))
    await post(app, make_body(documents=make_documents(20)))
    found, server = children(exporter), server_span(exporter)
    reducer = [f"reduce {stage}" for stage in ("access", "clean", "dedup", "rank", "select")]
    assert {*reducer, "gateway read_body", "gateway admission", "engine queue", "engine prefill", "engine decode"} <= (
        found.keys() | {"gateway read_body", "gateway admission"}
    )
    assert (found["reduce rank"].attributes or {})["firsttoken.tokens_before"] > 0
    stages = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    ends = 0
    for span in (span for span in stages if span.kind is SpanKind.INTERNAL):
        assert span.start_time is not None
        assert span.end_time is not None
        assert ends <= span.start_time <= span.end_time
        ends = span.end_time
    assert server.start_time is not None
    assert server.end_time is not None
    assert server.start_time <= (stages[1].start_time or 0)
    assert ends <= server.end_time + 1_000_000
    decode = found["engine decode"]
    assert (decode.end_time or 0) - (decode.start_time or 0) >= 25_000_000


async def test_the_clients_trace_is_the_parent_and_is_in_the_log() -> None:
    app, exporter = traced(backend=EchoBackend())
    await post(app, make_body(), TRACEPARENT)
    span = server_span(exporter)
    assert f"{span.get_span_context().trace_id:032x}" == TRACE_ID
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.get_span_context().trace_state.get("vendor") == "1"


@pytest.mark.parametrize(
    ("backend", "fields", "status", "kind", "is_error"),
    [
        (EchoBackend(), {"temperature": 9}, 400, "invalid_value", False),
        (EchoBackend(), {"model": "secret-name"}, 404, "model_not_found", False),
        (EchoBackend(start_error=ZeroDivisionError("xyzzy")), {}, 500, "500", True),
        (EchoBackend(fail_after=0), {}, 500, "500", True),
        (EchoBackend(fail_after=2), {"stream": True}, 200, "generation_failed", True),
    ],
)
async def test_errors_are_told_by_type_and_status_only(
    backend: EchoBackend, fields: dict[str, Any], status: int, kind: str, is_error: bool
) -> None:
    app, exporter = traced(backend=backend)
    response = await post(app, make_body("plugh", **fields))
    span = server_span(exporter)
    assert response.status_code == status
    attributes = dict(span.attributes or {})
    assert (attributes["http.response.status_code"], attributes["error.type"]) == (status, kind)
    assert span.status.status_code is (StatusCode.ERROR if is_error else StatusCode.UNSET)
    everything = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert not any(word in everything for word in ("xyzzy", "plugh", "secret-name"))


async def test_unknown_paths_and_methods_have_bounded_names_and_probes_have_no_span() -> None:
    app, exporter = traced(backend=EchoBackend())
    async with AsyncTestClient(app) as client:
        for path in ("/metrics", "/health", "/livez"):
            await client.get(path)
        assert exporter.get_finished_spans() == ()
        await client.get("/secret/path/17")
        await client.request("BREW", "/v1/models")
        await client.get("/v1/receipts/rcpt_abc", headers=bearer())
    names = [span.name for span in exporter.get_finished_spans()]
    assert names[0] == "GET"
    assert names[2] == "GET /v1/receipts/{receipt_id}"
    assert "secret" not in "".join(span.to_json() for span in exporter.get_finished_spans())
    assert "BREW" not in "".join(names)


async def test_text_is_told_on_an_explicit_setting_only_and_what_is_denied_never() -> None:
    documents = [
        {"id": "open", "text": "The parrot is called Quetzal.", "acl": ["staff"]},
        {"id": "shut", "text": "The vault opens with zyzzyva.", "acl": ["board"]},
    ]
    for content, stream in ((False, False), (True, False), (True, True)):
        app, exporter = traced(backend=EchoBackend(reply="It is Quetzal indeed"), content=content)
        await post(app, make_body("What is the parrot called?", documents=documents, stream=stream))
        everything = "".join(span.to_json() for span in exporter.get_finished_spans())
        assert "zyzzyva" not in everything
        assert ("Quetzal" in everything) is content
        attributes = dict(server_span(exporter).attributes or {})
        if not content:
            assert "gen_ai.input.messages" not in attributes
            continue
        sent = msgspec.json.decode(str(attributes["gen_ai.input.messages"]))
        answered = msgspec.json.decode(str(attributes["gen_ai.output.messages"]))
        assert "Quetzal" in sent[-1]["parts"][0]["content"]
        assert answered == [
            {
                "role": "assistant",
                "parts": [{"type": "text", "content": "It is Quetzal indeed"}],
                "finish_reason": "stop",
            }
        ]


async def test_the_names_of_the_older_conventions_can_be_had_and_the_environment_opts_in_to_the_latest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, exporter = traced(backend=EchoBackend(), names="1.36")
    await post(app, make_body())
    attributes = dict(server_span(exporter).attributes or {})
    assert attributes["gen_ai.system"] == "firsttoken"
    assert "gen_ai.provider.name" not in attributes
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http,gen_ai_latest_experimental")
    app, exporter = traced(backend=EchoBackend(), names="1.36")
    await post(app, make_body())
    assert dict(server_span(exporter).attributes or {})["gen_ai.provider.name"] == "firsttoken"


def test_each_try_at_a_replica_is_a_client_span_whose_context_goes_with_it() -> None:
    with running_upstream() as upstream:
        app, exporter = traced(make_upstream_settings(upstream))
        with served(app) as url:
            httpx.post(f"{url}{URL}", json=make_body(stream=True), headers=bearer() | TRACEPARENT)
            upstream.control(status=500, body={"error": {"message": "xyzzy"}})
            assert httpx.post(f"{url}{URL}", json=make_body(), headers=bearer()).status_code >= 500
        first, second = upstream.log()[0]["headers"], upstream.log()[-1]["headers"]
    calls = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.CLIENT]
    servers = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    good, bad = calls[0], calls[-1]
    attributes = dict(good.attributes or {})
    assert good.name == "chat upstream-model"
    assert (attributes["server.address"], attributes["server.port"]) == ("127.0.0.1", int(upstream.url.split(":")[-1]))
    assert good.parent is not None
    assert good.parent.span_id == servers[0].get_span_context().span_id
    assert first["traceparent"] == f"00-{TRACE_ID}-{good.get_span_context().span_id:016x}-01"
    assert first["tracestate"] == "vendor=1"
    assert second["traceparent"].split("-")[2] == f"{bad.get_span_context().span_id:016x}"
    assert bad.status.status_code is StatusCode.ERROR
    assert dict(bad.attributes or {})["http.response.status_code"] == 500
    assert "xyzzy" not in "".join(span.to_json() for span in exporter.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_text_of_a_replica_is_told_on_the_setting_too(stream: bool) -> None:
    with running_upstream() as upstream:
        app, exporter = traced(make_upstream_settings(upstream), content=True)
        upstream.control(reply="one two three four five six seven")
        with served(app) as url:
            httpx.post(f"{url}{URL}", json=make_body(stream=stream), headers=bearer())
    told = str(dict(server_span(exporter).attributes or {})["gen_ai.output.messages"])
    assert msgspec.json.decode(told)[0]["parts"][0]["content"] == "one two three four five six seven"


def test_without_spans_the_clients_context_passes_on_as_it_came() -> None:
    with running_upstream() as upstream, served(create_app(make_upstream_settings(upstream))) as url:
        for headers in (TRACEPARENT, {}, {"traceparent": "00-nonsense"}):
            httpx.post(f"{url}{URL}", json=make_body(), headers=bearer() | headers)
        sent = [entry["headers"] for entry in upstream.log()]
    assert {name: sent[0][name] for name in TRACEPARENT} == TRACEPARENT
    assert "traceparent" not in sent[1]
    assert "traceparent" not in sent[2]


async def test_a_client_that_leaves_ends_the_span() -> None:
    backend = EchoBackend(reply="a b c d e f g h", step_s=0.05)
    app, exporter = traced(backend=backend)
    with served(app) as url:
        body = make_body(stream=True)
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{url}{URL}", json=body, headers=bearer()) as response,
        ):
            async for _ in response.aiter_lines():
                break
        assert await asyncio.to_thread(wait_until, lambda: len(exporter.get_finished_spans()) > 0)
    assert dict(server_span(exporter).attributes or {})["error.type"] == "client_closed_request"


def test_the_tracer_is_not_imported_while_spans_are_off() -> None:
    code = (
        "import sys, app.asgi, app.gateway, app.commands.serve\n"
        "from app.settings import Settings\n"
        "app.gateway.make_gateway(Settings())\n"
        "sys.exit(any(name in sys.modules for name in ('app.tracing', 'opentelemetry.sdk.trace')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_missing_package_and_an_unknown_exporter_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings(tracing=TracingSettings(enabled=True))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "carrier-pigeon")
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        make_gateway(settings, EchoBackend())
    monkeypatch.setitem(sys.modules, "app.tracing", None)
    with pytest.raises(ConfigError, match=r"firsttoken\[otel\]"):
        make_gateway(settings, EchoBackend())


@dataclass
class Receiver:
    """An OTLP endpoint over HTTP."""

    url: str = ""
    requests: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = field(default_factory=list)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            message = ExportTraceServiceRequest.FromString(body)
            found.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, message))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


async def test_spans_go_out_as_otlp_as_the_standard_variables_say(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=search")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "gateway-of-tests")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    gateway: Gateway = make_gateway(make_settings(tracing=TracingSettings(enabled=True)), EchoBackend())
    await post(create_app(gateway.settings, gateway=gateway), make_body(documents=make_documents(20)), TRACEPARENT)
    assert {path for path, _, _ in receiver.requests} == {"/v1/traces"}
    assert receiver.requests[0][1]["x-team"] == "search"
    resources = [spans for _, _, message in receiver.requests for spans in message.resource_spans]
    names = {item.key: item.value.string_value for item in resources[0].resource.attributes}
    assert names["service.name"] == "gateway-of-tests"
    spans = {span.name: span for item in resources for scope in item.scope_spans for span in scope.spans}
    server = spans["chat default"]
    assert server.trace_id.hex() == TRACE_ID
    assert server.parent_span_id.hex() == PARENT_ID
    attributes = {item.key: item.value for item in server.attributes}
    assert attributes["gen_ai.operation.name"].string_value == "chat"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    assert spans["reduce rank"].parent_span_id == server.span_id


async def test_a_sampler_of_the_environment_is_obeyed(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    gateway = make_gateway(make_settings(tracing=TracingSettings(enabled=True)), EchoBackend())
    response = await post(create_app(gateway.settings, gateway=gateway), make_body())
    assert response.status_code == 200
    assert receiver.requests == []


async def test_a_refusal_names_nobody_and_an_outsiders_request_says_how_many_documents_were_denied() -> None:
    app, exporter = traced(backend=EchoBackend())
    body = make_body(documents=[{"id": "a", "text": "zyzzyva", "acl": ["board"]}])
    await post(app, body, bearer(OUTSIDER_KEY))
    assert dict(server_span(exporter).attributes or {})["firsttoken.denied_documents"] == 1
    app, exporter = traced(backend=EchoBackend())
    await post(app, body, {"Authorization": "Bearer sk-wrong"})
    assert "firsttoken.tenant" not in dict(server_span(exporter).attributes or {})
