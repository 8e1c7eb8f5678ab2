"""Builds the ASGI application: routes, error answers, request ids, and the gateway's life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar import Litestar
from litestar.datastructures import State

from app.backends.base import Backend
from app.config_file import load_settings
from app.controllers.admin import AdminTenantsController
from app.controllers.admin_config import AdminConfigController
from app.controllers.admin_records import AdminRecordsController
from app.controllers.chat import ChatController
from app.controllers.compact import CompactController
from app.controllers.embeddings import EmbeddingsController
from app.controllers.models import ModelsController
from app.controllers.receipts import ReceiptsController
from app.controllers.shapes import CompletionsController, MessagesController, ResponsesController
from app.controllers.system import SystemController
from app.error_answers import answer_error
from app.gateway import Gateway, make_gateway
from app.http_io import RequestIdMiddleware
from app.request_log import RequestLogMiddleware
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

    app = Litestar(
        route_handlers=[
            AdminConfigController,
            AdminRecordsController,
            AdminTenantsController,
            ChatController,
            CompactController,
            ModelsController,
            ReceiptsController,
            SystemController,
            MessagesController,
            ResponsesController,
            CompletionsController,
            EmbeddingsController,
        ],
        exception_handlers={Exception: answer_error},
        lifespan=[lifespan],
        state=State({"gateway": gateway}),
        request_max_body_size=None,  # ``read_body`` keeps the limit and answers in OpenAI's shape
        openapi_config=None,
        logging_config=None,
        debug=False,
    )
    # Around the router, so that unknown paths are known as well; Litestar's own middlewares begin behind it.
    app.asgi_handler = RequestLogMiddleware(RequestIdMiddleware(app.asgi_handler))
    if gateway.tracing is not None:
        from app.tracing import TracingMiddleware

        app.asgi_handler = TracingMiddleware(app.asgi_handler, gateway.tracing)
    return app
