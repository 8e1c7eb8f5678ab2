"""``POST /v1/messages``, ``/v1/responses`` and ``/v1/completions``: other shapes of the same pipeline."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from litestar import Controller, Response, post

from app.chat_service import INLINE_BODY_BYTES, LARGE_BODY_BYTES
from app.completion_request import decode_object
from app.controllers.chat import answer_headers, whole_answer
from app.error_answers import answer_anthropic_error
from app.gateway import Gateway
from app.http_io import GatewayRequest, gateway_of, json_response, read_arrival, unless_disconnected
from app.shapes.anthropic import MessagesShape
from app.shapes.anthropic_request import chat_body_of
from app.shapes.base import Shape
from app.shapes.responses import ResponsesShape
from app.shapes.text_completions import CompletionsShape
from app.streaming import EventStream, answer_events


async def answer_in_shape(request: GatewayRequest, make: Callable[[Mapping[str, Any]], Shape]) -> Response[Any]:
    """Reduces and answers a request of another shape. Errors before the first token have their HTTP status."""
    gateway = gateway_of(request)
    with gateway.drain.interruptible():
        arrival = await read_arrival(request)
        shape, body = await _in_thread(gateway, len(arrival.body), _translate, arrival.body, make)
        arrival = replace(arrival, body=body)
        generation = await unless_disconnected(request.receive, gateway.chat_service.complete(arrival))
        compaction = generation.compaction
        model = compaction.request.body.model or gateway.served_model.name
        if isinstance(shape, MessagesShape):
            shape.prompt_tokens = compaction.result.prompt_tokens
        if compaction.request.body.stream:
            headers = await answer_headers(gateway, arrival.principal, generation)
            return EventStream(generation, shape.events(answer_events(generation, model)), headers=headers)
        answer = await whole_answer(request, generation, model)
        headers = await answer_headers(gateway, arrival.principal, generation)
        return json_response(shape.whole(msgspec.json.decode(answer)), headers=headers)


def _translate(body: bytes, make: Callable[[Mapping[str, Any]], Shape]) -> tuple[Shape, bytes]:
    shape = make(decode_object(body))
    return shape, msgspec.json.encode(shape.chat_body)


async def _in_thread(gateway: Gateway, num_bytes: int, job: Any, *args: Any) -> Any:
    """A job on a body of this size, where it holds up nobody."""
    if num_bytes <= INLINE_BODY_BYTES:
        return job(*args)
    run = gateway.workers.run_large if num_bytes > LARGE_BODY_BYTES else gateway.workers.run
    return await run(job, *args)


class MessagesController(Controller):
    """Anthropic's Messages API."""

    exception_handlers = {Exception: answer_anthropic_error}  # noqa: RUF012 (the base class declares it so)

    @post("/v1/messages", status_code=200)
    async def create(self, request: GatewayRequest) -> Response[Any]:
        """A message, whole or as a stream."""
        return await answer_in_shape(request, MessagesShape)

    @post("/v1/messages/count_tokens", status_code=200)
    async def count_tokens(self, request: GatewayRequest) -> Response[bytes]:
        """Prompt tokens of a request as it is, nothing reduced."""
        gateway = gateway_of(request)
        with gateway.drain.interruptible():
            arrival = await read_arrival(request)
            num_tokens = await gateway.workers.run(_count_tokens, gateway, arrival.body)
        return json_response({"input_tokens": num_tokens})


def _count_tokens(gateway: Gateway, body: bytes) -> int:
    chat = chat_body_of(decode_object(body), needs_max_tokens=False)
    if chat.get("model") is not None:
        gateway.served_model.check(chat["model"])
    return gateway.chat_service.count_prompt(chat["messages"], chat.get("tools") or ())


class ResponsesController(Controller):
    """OpenAI's Responses API."""

    @post("/v1/responses", status_code=200)
    async def create(self, request: GatewayRequest) -> Response[Any]:
        """A response, whole or as a stream; nothing is stored."""
        return await answer_in_shape(request, ResponsesShape)


class CompletionsController(Controller):
    """OpenAI's old completions."""

    @post("/v1/completions", status_code=200)
    async def create(self, request: GatewayRequest) -> Response[Any]:
        """A text completion, whole or as a stream."""
        return await answer_in_shape(request, CompletionsShape)
