"""What the engine process and its client say to each other: msgpack Structs, and exceptions as values.

::

    client                                   engine process
      <------------------------------- EngineReady | EngineFailed      once, after loading the model
      GenerateRequest, AbortRequest ------------------------------>
      <------------------------------- OutputBatch, RequestRefused     after every step, or at once
      <------------------------------- EngineStats                     after steps, at a bounded rate
      ShutdownRequest -------------------------------------------->
"""

from typing import Any

import msgspec

from engine.errors import (
    AdmissionError,
    EngineError,
    ModelError,
    OutputTooLongError,
    PromptTooLongError,
    QueueFullError,
)
from engine.outputs import AbortRequest, EngineStats, GenerateRequest, ModelInfo, RequestOutput


class ShutdownRequest(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Leave after the current step."""


class WireError(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of the engine process; ``to_exception`` makes it one again."""

    kind: str
    message: str
    values: dict[str, int | float | str | bool] = {}
    """Arguments of exceptions that carry more than a text."""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded."""

    info: ModelInfo


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot start or go on; its process ends."""

    error: WireError


class OutputBatch(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """All outputs of one step."""

    outputs: list[RequestOutput]


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The engine did not take a request."""

    request_id: str
    error: WireError


ClientMessage = GenerateRequest | AbortRequest | ShutdownRequest
CoreMessage = EngineReady | EngineFailed | OutputBatch | RequestRefused | EngineStats

encoder = msgspec.msgpack.Encoder()
client_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
core_message_decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)


def to_wire_error(error: BaseException) -> WireError:
    """``error`` as a value. Classes that callers tell apart keep their kind; all others become an EngineError."""
    match error:
        case QueueFullError():
            return _wire_error("queue_full", error, num_waiting=error.num_waiting, retry_after_s=error.retry_after_s)
        case AdmissionError():
            return _wire_error("admission", error, reason=error.reason, retry_after_s=error.retry_after_s)
        case PromptTooLongError():
            return _wire_error(
                "prompt_too_long",
                error,
                num_prompt_tokens=error.num_prompt_tokens,
                max_model_len=error.max_model_len,
                is_input_limit=error.is_input_limit,
            )
        case OutputTooLongError():
            return _wire_error("output_too_long", error, max_tokens=error.max_tokens, room=error.room)
        case ModelError():
            return WireError(kind="model", message=str(error))
        case ValueError():
            return WireError(kind="value", message=str(error))
        case _:
            text = str(error)
            return WireError(kind="engine", message=f"{type(error).__name__}: {text}" if text else type(error).__name__)


def to_exception(error: WireError) -> Exception:
    """The exception that ``to_wire_error`` was given, or an EngineError with its text."""
    values: dict[str, Any] = error.values
    match error.kind:
        case "queue_full":
            return QueueFullError(values["num_waiting"], values["retry_after_s"])
        case "admission":
            return AdmissionError.from_message(error.message, values["reason"], values["retry_after_s"])
        case "prompt_too_long":
            return PromptTooLongError(
                values["num_prompt_tokens"], values["max_model_len"], is_input_limit=values["is_input_limit"]
            )
        case "output_too_long":
            return OutputTooLongError(values["max_tokens"], values["room"])
        case "model":
            return ModelError(error.message)
        case "value":
            return ValueError(error.message)
        case _:
            return EngineError(error.message)


def _wire_error(kind: str, error: Exception, **values: int | float | str | bool) -> WireError:
    return WireError(kind=kind, message=str(error), values=values)
