"""OpenTelemetry spans of requests: one server span each, below it the stages, the engine and the replicas called.

    chat default                         server   gen_ai.*, http.*, firsttoken.*
      gateway read_body, admission, …    internal
      reduce access … select, pack       internal, with tokens before and after
      engine queue, prefill, decode      internal
      chat upstream-model                client   one a try; its context goes to the replica as traceparent

Stages become spans when the request is over, from the same laps as the waterfall: while tokens flow nothing is made.
Imported only where tracing is on. Errors are told by type and status, never by message: a message may quote a prompt.
"""

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit

import msgspec
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPResponseStartEvent, HTTPScope, Receive, Scope, Send
from opentelemetry import propagate
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.util.types import AttributeValue

from app.errors import ConfigError, ErrorAnswer, answer_of
from app.generation import Generation
from app.http_io import at_response_start
from app.metric_labels import CODES
from app.probes import PROBES
from app.trace_context import SCOPE_KEY, UpstreamCall
from app.tracing_names import OPT_IN, TABLES, SpanNames
from app.tracing_settings import TracingSettings
from app.waterfall import Interval, Timeline

CLOSE_TIMEOUT_S = 5.0
OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
COMPLETIONS = frozenset(("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"))
PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
"""Of ``OTEL_EXPORTER_OTLP_PROTOCOL``, as installed exporters are called; gRPC's is not among our dependencies."""
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_GROUPS = {
    **dict.fromkeys(("access", "clean", "dedup", "rank", "history", "select", "pack"), "reduce"),
    **dict.fromkeys(("engine_transport", "transfer", "queue", "prefill"), "engine"),
}
_HIDDEN = ("other", "upstream")
"""Laps without a span of their own; the replica's is the client span."""


class Tracing:
    """The tracer of one gateway, from its start to its end."""

    def __init__(
        self,
        settings: TracingSettings,
        *,
        provider_name: str,
        response_model: str,
        version: str,
        exporters: Sequence[SpanExporter] | None = None,
    ) -> None:
        """``exporters`` get each span as it ends; without them those that the environment names get batches.

        Raises ``ConfigError`` for an exporter that is not installed.
        """
        self.settings = settings
        opted = OPT_IN in os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
        self.names: SpanNames = TABLES["latest" if opted else settings.names]
        self.provider_name = provider_name
        self.response_model = response_model
        self._provider = TracerProvider(resource=_resource(version), shutdown_on_exit=False)
        if exporters is None:
            for exporter in _named_exporters():
                self._provider.add_span_processor(BatchSpanProcessor(exporter))
        for exporter in exporters or ():
            self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("firsttoken", version)

    def begin(self, scope: HTTPScope) -> "RequestTrace":
        """The server span of a request, as a child of the client's where that told one."""
        carrier: dict[str, str] = {}
        for name, value in scope["headers"]:
            key = name.decode("latin-1").lower()
            carrier[key] = f"{carrier[key]},{value.decode('latin-1')}" if key in carrier else value.decode("latin-1")
        return RequestTrace(self, scope, propagate.extract(carrier))

    async def close(self) -> None:
        """Sends what is left; an endpoint that does not answer holds up nothing for long."""
        # Not in the loop's executor, whose threads are waited for at the end.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_TIMEOUT_S)


class RequestTrace:
    """The server span of one request; ``finish`` is called once."""

    def __init__(self, tracing: Tracing, scope: HTTPScope, context: Any) -> None:
        self._tracing = tracing
        self._started_s = time.perf_counter()
        self._start_ns = time.time_ns()
        self._path: str = scope["path"]
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        attributes: dict[str, AttributeValue] = {"http.request.method": method, "url.scheme": scope["scheme"]}
        if (server := scope.get("server")) is not None:
            address, port = server
            attributes["server.address"] = address
            if port is not None:
                attributes["server.port"] = port
        self._method = method
        self.span: Span = tracing.tracer.start_span(
            method, context, SpanKind.SERVER, attributes, start_time=self._start_ns
        )
        self._context = set_span_in_context(self.span, context)
        self.wants_text = tracing.settings.content and self.span.is_recording()
        self.timeline: Timeline | None = None
        self._generation: Generation | None = None
        self._status = 0

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return format_trace_id(self.span.get_span_context().trace_id)

    def attach(self, timeline: Timeline) -> None:
        """The request's laps, which become spans at its end."""
        self.timeline = timeline

    def call(self, replica_url: str, model: str) -> UpstreamCall:
        """A client span for one try at a replica."""
        names, parts = self._tracing.names, urlsplit(replica_url)
        attributes: dict[str, AttributeValue] = {
            names.operation: "chat",
            names.provider: self._tracing.provider_name,
            names.request_model: model,
            "server.address": parts.hostname or "",
            "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        }
        span = self._tracing.tracer.start_span(f"chat {model}", self._context, SpanKind.CLIENT, attributes)
        carrier: dict[str, str] = {}
        propagate.inject(carrier, set_span_in_context(span, self._context))
        return _ReplicaCall(span, carrier)

    def on_end(self, generation: Generation) -> None:
        """A generation is over: what it was and what it cost."""
        self._generation = generation
        if generation.outcome == "error":
            self.span.set_status(Status(StatusCode.ERROR))
            self.span.set_attribute("error.type", "generation_failed")
        elif generation.outcome == "abort":
            self.span.set_attribute("error.type", "client_closed_request")

    def on_error(self, answer: ErrorAnswer) -> None:
        """An error was told to the client. Only one of ours makes the span an error, as the conventions say."""
        self.span.set_attribute("error.type", answer.code if answer.code in CODES else str(answer.status))
        if answer.status >= 500:
            self.span.set_status(Status(StatusCode.ERROR))

    def on_status(self, status: int) -> None:
        """The answer has begun."""
        self._status = status

    def finish(self, route: str | None) -> None:
        """Ends the span; ``route`` is the template of the path, ``None`` for one that is not served."""
        if self.span.is_recording():
            self._describe(route)
        self.span.end()

    def _describe(self, route: str | None) -> None:
        names, generation = self._tracing.names, self._generation
        attributes: dict[str, AttributeValue | None] = {"http.response.status_code": self._status or None}
        if route is not None:
            attributes["http.route"] = route
        name = self._method if route is None else f"{self._method} {route}"
        if route in COMPLETIONS or route in OPERATIONS:
            operation = OPERATIONS.get(self._path, "chat")
            attributes[names.operation] = name = operation
            attributes[names.provider] = self._tracing.provider_name
        if generation is not None:
            model = generation.compaction.request.body.model or self._tracing.response_model
            name = f"{name} {model}"
            attributes |= _generation_attributes(generation, names, model, self._tracing.response_model)
            if self._tracing.settings.content:
                attributes |= _content_attributes(generation, names)
        self.span.update_name(name)
        self.span.set_attributes({key: value for key, value in attributes.items() if value is not None})
        if self.timeline is not None:
            self._add_stages(self.timeline)

    def _add_stages(self, timeline: Timeline) -> None:
        generation = self._generation
        ended_s = time.perf_counter()
        first_s = ended_s
        if generation is not None:
            ended_s = timeline.arrived_s + generation.elapsed_s
            first_s = timeline.arrived_s + (generation.first_text_s or generation.elapsed_s)
        origin_ns = self._start_ns + round((timeline.arrived_s - self._started_s) * 1e9)
        reports = {} if generation is None else {stage.stage: stage for stage in generation.compaction.result.stages}
        for interval in timeline.waterfall(first_s).intervals:
            if interval.stage in _HIDDEN:
                continue
            attributes: dict[str, AttributeValue] = {"firsttoken.stage": interval.stage}
            if (report := reports.get(interval.stage)) is not None:
                attributes["firsttoken.tokens_before"] = report.tokens_before
                attributes["firsttoken.tokens_after"] = report.tokens_after
                attributes["firsttoken.degraded"] = report.degraded is not None
            self._add(f"{_GROUPS.get(interval.stage, 'gateway')} {interval.stage}", interval, origin_ns, attributes)
        if generation is not None and generation.first_text_s is not None and ended_s > first_s:
            start_us, end_us = (round((moment - timeline.arrived_s) * 1e6) for moment in (first_s, ended_s))
            tokens = {"firsttoken.output_tokens": generation.num_output_tokens}
            self._add("engine decode", Interval("first_token", start_us, end_us), origin_ns, tokens)

    def _add(self, name: str, interval: Interval, origin_ns: int, attributes: Mapping[str, AttributeValue]) -> None:
        start_ns = origin_ns + interval.start_us * 1000
        span = self._tracing.tracer.start_span(name, self._context, SpanKind.INTERNAL, attributes, start_time=start_ns)
        span.end(origin_ns + interval.end_us * 1000)


class _ReplicaCall:
    """The client span of one try."""

    def __init__(self, span: Span, headers: dict[str, str]) -> None:
        self._span = span
        self.headers: Mapping[str, str] = headers

    def end(self, error: BaseException | None = None) -> None:
        """Ends the span; of an error only its type and status are told."""
        if not self._span.is_recording():
            return
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR))
            self._span.set_attribute("error.type", type(error).__name__)
            status = getattr(error, "upstream_status", None)
            if status is not None:
                self._span.set_attribute("http.response.status_code", status)
        self._span.end()


class TracingMiddleware:
    """Puts a span around every request but probes. Wraps the whole application, so unknown paths have one as well."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != ScopeType.HTTP or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        trace = self._tracing.begin(scope)
        scope[SCOPE_KEY] = trace  # type: ignore[literal-required]

        def note_status(message: HTTPResponseStartEvent) -> None:
            trace.on_status(message["status"])

        try:
            await self._app(scope, receive, at_response_start(send, note_status))
        except BaseException as error:
            if isinstance(error, Exception):
                trace.on_error(answer_of(error))
            raise
        finally:
            trace.finish(scope.get("path_template"))


def _generation_attributes(
    generation: Generation, names: SpanNames, model: str, response_model: str
) -> dict[str, AttributeValue | None]:
    compaction, body = generation.compaction, generation.compaction.request.body
    result, principal = compaction.result, compaction.principal
    reasons = [choice.finish_reason for choice in generation.choices if choice.finish_reason is not None]
    found: dict[str | None, AttributeValue | None] = {
        names.request_model: model,
        names.response_model: response_model,
        names.response_id: generation.completion_id,
        names.finish_reasons: reasons or None,
        names.time_to_first_chunk: generation.first_text_s,
        names.input_tokens: generation.num_prompt_tokens,
        names.output_tokens: generation.num_output_tokens,
        names.cached_tokens: generation.num_cached_tokens,
        names.max_tokens: generation.max_tokens,
        names.temperature: body.temperature,
        names.top_p: body.top_p,
        names.top_k: body.top_k,
        names.seed: body.seed,
        names.frequency_penalty: body.frequency_penalty,
        names.presence_penalty: body.presence_penalty,
        names.stream: bool(body.stream),
        names.choice_count: body.n if (body.n or 1) > 1 else None,
        names.output_type: "json" if compaction.request.json_schema is not None else "text",
        "firsttoken.request_id": generation.request_id,
        "firsttoken.receipt_id": compaction.receipt_id,
        "firsttoken.tenant": principal.tenant_id,
        "firsttoken.key_name": principal.key_name,
        "firsttoken.policy": compaction.policy,
        "firsttoken.original_prompt_tokens": result.original_prompt_tokens,
        "firsttoken.prompt_tokens": result.prompt_tokens,
        "firsttoken.denied_documents": result.denied_documents,
        "firsttoken.outcome": generation.outcome,
    }
    return {name: value for name, value in found.items() if name is not None}


def _content_attributes(generation: Generation, names: SpanNames) -> dict[str, AttributeValue | None]:
    """The messages as they went to the model, where denied documents are no part of, and the answers."""
    sent = [{"role": message["role"], "parts": _parts(message)} for message in generation.compaction.result.messages]
    answers = [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "".join(texts)}],
            "finish_reason": choice.finish_reason or "error",
        }
        for choice, texts in zip(generation.choices, generation.captured or (), strict=False)
    ]
    found = {names.input_messages: sent, names.output_messages: answers}
    return {name: msgspec.json.encode(value).decode() for name, value in found.items()}


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "content": content}]
    parts = content if isinstance(content, list) else []
    return [
        {"type": "text", "content": part["text"]} if "text" in part else {"type": part.get("type", "unknown")}
        for part in parts
    ]


def _resource(version: str) -> Resource:
    """``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES``, else our own name."""
    found = Resource.create()
    name = str(found.attributes.get(SERVICE_NAME, ""))
    own: dict[str, AttributeValue] = {SERVICE_VERSION: version}
    if not name or name.startswith("unknown_service"):
        own[SERVICE_NAME] = "firsttoken"
    return Resource(own).merge(found) if SERVICE_NAME not in own else found.merge(Resource(own))


def _protocol() -> str:
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", general)


def _named_exporters() -> list[SpanExporter]:
    """Those of ``OTEL_TRACES_EXPORTER``, which defaults to ``otlp``: over HTTP, in protobuf."""
    found: list[SpanExporter] = []
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        name = name.strip()
        if name in ("", "none"):
            continue
        if name == "otlp":
            name = PROTOCOLS.get(_protocol(), name)
        known = {entry.name: entry for entry in entry_points(group="opentelemetry_traces_exporter")}
        if name not in known:
            raise ConfigError(f"OTEL_TRACES_EXPORTER asks for {name!r}; installed are {', '.join(sorted(known))}")
        found.append(known[name].load()())
    return found
