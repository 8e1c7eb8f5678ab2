"""Builds the ASGI application: routes, error answers, request ids, and the gateway's life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from litestar import Litestar, Response
from litestar.datastructures import State

from app.backends.base import Backend
from app.config_file import load_settings
from app.controllers.chat import ChatController
from app.controllers.compact import CompactController
from app.controllers.models import ModelsController
from app.controllers.receipts import ReceiptsController
from app.controllers.system import SystemController
from app.errors import answer_of
from app.gateway import Gateway, make_gateway
from app.http_io import GatewayRequest, add_request_id, gateway_of, request_id_of
from app.settings import Settings


def create_app(
    settings: Settings | None = None, backend: Backend | None = None, *, gateway: Gateway | None = None
) -> Litestar:
    """The application.

    Without ``settings`` they are read from file and environment. ``backend`` stands in for the embedded engine.
    ``gateway`` is one that the caller made from both; it is started here unless it runs already.
    """
    if gateway is None:
        gateway = make_gateway(load_settings().settings if settings is None else settings, backend)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        try:
            await gateway.start()
            yield
        finally:
            await gateway.close()

    return Litestar(
        route_handlers=[ChatController, CompactController, ModelsController, ReceiptsController, SystemController],
        exception_handlers={Exception: answer_error},
        before_send=[add_request_id],
        lifespan=[lifespan],
        state=State({"gateway": gateway}),
        request_max_body_size=None,  # ``read_body`` keeps the limit and answers in OpenAI's shape
        openapi_config=None,
        logging_config=None,
        debug=False,
    )


def answer_error(request: GatewayRequest, error: Exception) -> Response[bytes]:
    """The OpenAI-shaped answer to any error that happened before the answer began."""
    answer = answer_of(error)
    log = structlog.get_logger("firsttoken.errors").bind(request_id=request_id_of(request.scope))
    fields = {"status": answer.status, "code": answer.code, "param": answer.param, "error": type(error).__name__}
    if answer.status == 500:
        log.error("request_failed", exc_info=error, **fields)
    else:
        log.info("request_refused", **fields)
    metrics, model = gateway_of(request).metrics, gateway_of(request).served_model.name
    metrics.request_errors.labels(model, str(answer.status), answer.code or "none").inc()
    return Response(
        answer.body(), status_code=answer.status, media_type="application/json", headers=answer.headers or None
    )
