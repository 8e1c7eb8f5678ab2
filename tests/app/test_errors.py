"""The table: every error of ours has an OpenAI-shaped answer."""

import msgspec
import pytest
from litestar.exceptions import ClientException, MethodNotAllowedException
from litestar.exceptions import NotFoundException as UnknownRoute

from app import errors
from app.errors import ContextLengthError, ErrorAnswer, RateLimitError, answer_of
from engine.errors import (
    AdmissionError,
    EngineDeadError,
    EngineError,
    OutputTooLongError,
    PromptTooLongError,
    QueueFullError,
)
from reducer.errors import BudgetExceededError, InvalidPromptError
from reducer.prompt import Budget


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (errors.InvalidRequestError("x", param="n"), 400, "invalid_request_error", None, "n"),
        (InvalidPromptError("documents[3].id must"), 400, "invalid_request_error", "invalid_value", "documents[3].id"),
        (InvalidPromptError("no user"), 400, "invalid_request_error", "invalid_value", "messages"),
        (ContextLengthError(10, 20), 400, "invalid_request_error", "context_length_exceeded", "messages"),
        (PromptTooLongError(20, 10), 400, "invalid_request_error", "context_length_exceeded", "messages"),
        (BudgetExceededError(20, 10, "tenant"), 400, "invalid_request_error", "context_length_exceeded", "messages"),
        (RecursionError(), 400, "invalid_request_error", "invalid_json", None),
        (errors.AuthenticationError("x"), 401, "authentication_error", "invalid_api_key", None),
        (errors.NotFoundError("x", code="model_not_found"), 404, "invalid_request_error", "model_not_found", None),
        (UnknownRoute(), 404, "invalid_request_error", "unknown_url", None),
        (MethodNotAllowedException(), 405, "invalid_request_error", "method_not_allowed", None),
        (ClientException("odd"), 400, "invalid_request_error", None, None),
        (errors.RequestTooLargeError(5), 413, "invalid_request_error", "request_too_large", None),
        (RateLimitError("x", kind="tokens", retry_after_s=9), 429, "tokens", "rate_limit_exceeded", None),
        (errors.ClientDisconnectedError("x"), 499, "client_closed_request", None, None),
        (errors.GenerationError("x"), 500, "server_error", None, None),
        (EngineDeadError("gone", 3.2), 503, "overloaded", None, None),
        (QueueFullError(7, 2.0), 503, "overloaded", None, None),
        (
            PromptTooLongError(20, 10, is_input_limit=True),
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "messages",
        ),
        (OutputTooLongError(20, 10), 400, "invalid_request_error", "context_length_exceeded", "max_tokens"),
        (AdmissionError("x", reason="deadline", retry_after_s=2.0), 503, "overloaded", None, None),
        (AdmissionError("x", reason="kv_watermark", retry_after_s=2.0), 503, "overloaded", None, None),
        (AdmissionError("x", reason="tenant_queue", retry_after_s=2.0), 429, "tokens", "rate_limit_exceeded", None),
        (errors.OverloadedError("x"), 503, "overloaded", None, None),
        (EngineError("internal detail"), 500, "server_error", None, None),
        (ZeroDivisionError("internal detail"), 500, "server_error", None, None),
    ],
)
def test_every_error_has_its_answer(
    error: Exception, status: int, kind: str, code: str | None, param: str | None
) -> None:
    answer = answer_of(error)
    assert (answer.status, answer.type, answer.code, answer.param) == (status, kind, code, param)
    assert "internal detail" not in answer.message


def test_every_error_class_of_the_gateway_is_in_the_table() -> None:
    own = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.GatewayError)}
    assert own - set(errors.TABLE) == {errors.GatewayError, errors.ConfigError}


@pytest.mark.parametrize(
    "error",
    [
        EngineDeadError("x", 3.2),
        QueueFullError(1, 4.0),
        AdmissionError("x", reason="tenant_queue", retry_after_s=3.5),
        RateLimitError("x", kind="tokens", retry_after_s=3.01),
    ],
)
def test_what_may_be_tried_again_says_when_in_whole_seconds_rounded_up(error: Exception) -> None:
    assert answer_of(error).headers == {"Retry-After": "4"}


def test_context_length_opens_with_the_sentence_that_clients_look_for() -> None:
    assert str(ContextLengthError(8192, 9000)) == (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens "
        "that must not be cut, and the answer needs at least 1 more. Please reduce the length of the messages."
    )


def test_a_limit_below_the_window_is_named_beside_it() -> None:
    assert str(ContextLengthError(8192, 34, Budget(20, "request"), is_lower_bound=True)) == (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in at least 34 tokens "
        "that must not be cut, and the limit set by the request is 20. Please reduce the length of the messages."
    )


def test_a_body_has_the_four_openai_fields() -> None:
    body = msgspec.json.decode(ErrorAnswer(400, "invalid_request_error", "bad", "n").body())
    assert body == {"error": {"message": "bad", "type": "invalid_request_error", "param": "n", "code": None}}
