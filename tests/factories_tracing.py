"""Applications whose spans stay in memory."""

from typing import Any

from factories_app import make_settings
from litestar import Litestar
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.asgi import create_app
from app.gateway import make_gateway
from app.settings import Settings
from app.tracing import Tracing
from app.tracing_settings import TracingSettings


def traced(
    settings: Settings | None = None, backend: Any = None, **tracing: Any
) -> tuple[Litestar, InMemorySpanExporter]:
    """An application whose spans stay in memory."""
    exporter = InMemorySpanExporter()
    gateway = make_gateway(settings or make_settings(), backend)
    gateway.tracing = Tracing(
        TracingSettings(enabled=True, **tracing),
        provider_name="firsttoken",
        response_model="bytes",
        version="1",
        exporters=[exporter],
    )
    return create_app(gateway.settings, gateway=gateway), exporter
