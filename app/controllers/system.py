"""Health, readiness, metrics and version: for load balancers and dashboards, without a key."""

from importlib.metadata import version
from typing import Any

from litestar import Controller, HttpMethod, Response, get, route

from app.errors import ErrorAnswer
from app.http_io import GatewayRequest, gateway_of, json_response
from app.observability import CONTENT_TYPE

VERSION = version("firsttoken")

PROBES = [HttpMethod.GET, HttpMethod.HEAD]
"""Some load balancers ask with HEAD; the answer is the same without its body."""


class SystemController(Controller):
    """Liveness says that this process answers; health and readiness say that a completion would be served."""

    @route(["/livez", "/ping", "/health/liveliness", "/health/liveness"], http_method=PROBES)
    async def live(self) -> Response[bytes]:
        """Always 200."""
        return json_response({"status": "alive"})

    @route("/health", http_method=PROBES)
    async def health(self, request: GatewayRequest) -> Response[bytes]:
        """200 and an empty body while the engine is alive, else 503."""
        if gateway_of(request).backend.is_alive:
            return Response(b"", media_type="text/plain")
        headers = {"Retry-After": "5"}
        answer = ErrorAnswer(503, "overloaded", "The engine is not available.")
        return Response(answer.body(), status_code=503, media_type="application/json", headers=headers)

    @route(["/ready", "/readyz", "/health/readiness"], http_method=PROBES)
    async def ready(self, request: GatewayRequest) -> Response[bytes]:
        """200 once engine and encoder are loaded and as long as the engine is alive, else 503."""
        gateway = gateway_of(request)
        content: dict[str, Any] = {
            "status": "ready" if gateway.is_ready else "not ready",
            "engine": "alive" if gateway.backend.is_alive else "dead",
            "encoder": gateway.encoder_state,
        }
        return json_response(content, status_code=200 if gateway.is_ready else 503)

    @get("/metrics")
    async def metrics(self, request: GatewayRequest) -> Response[bytes]:
        """Metrics in Prometheus' text format."""
        return Response(await gateway_of(request).render_metrics(), headers={"content-type": CONTENT_TYPE})

    @get("/version")
    async def show_version(self) -> Response[bytes]:
        """The version of firsttoken."""
        return json_response({"version": VERSION})
