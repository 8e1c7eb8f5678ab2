"""Errors from before an answer begins: counted, logged, and told in the shape of the API they came through."""

from typing import Any

import structlog
from litestar import Response

from app.errors import ErrorAnswer, answer_of
from app.http_io import GatewayRequest, gateway_of, log_fields
from app.metric_labels import code_label, param_label, status_label
from app.shapes.anthropic import error_body
from app.trace_context import SCOPE_KEY


def answer_error(request: GatewayRequest, error: Exception) -> Response[bytes]:
    """The OpenAI-shaped answer to any error that happened before the answer began."""
    answer = _noted(request, error)
    return _response(answer, answer.body())


def answer_anthropic_error(request: GatewayRequest, error: Exception) -> Response[bytes]:
    """The same in Anthropic's shape."""
    answer = _noted(request, error)
    return _response(answer, error_body(answer))


def _response(answer: ErrorAnswer, body: bytes) -> Response[bytes]:
    return Response(body, status_code=answer.status, media_type="application/json", headers=answer.headers or None)


def _noted(request: GatewayRequest, error: Exception) -> ErrorAnswer:
    answer = answer_of(error)
    trace: Any = request.scope.get(SCOPE_KEY)
    if trace is not None:
        trace.on_error(answer)
    log = structlog.get_logger("firsttoken.errors").bind(**log_fields(request.scope))
    fields = {
        "status": answer.status,
        "code": code_label(answer.code),
        "param": param_label(answer.param),  # below the field's name there may be words of the caller
        "error": type(error).__name__,
    }
    if answer.status == 500:
        log.error("request_failed", exc_info=error, **fields)
    else:
        log.info("request_refused", **fields)
    metrics, model = gateway_of(request).metrics, gateway_of(request).served_model.name
    metrics.request_errors.labels(model, status_label(answer.status), code_label(answer.code)).inc()
    return answer
