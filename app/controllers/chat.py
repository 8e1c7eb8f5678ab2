"""``POST /v1/chat/completions``."""

from typing import Any

import msgspec
from litestar import Controller, Response, post

from app.answers import chat_completion, reduction_headers
from app.auth import Principal
from app.gateway import Gateway
from app.generation import Generation
from app.http_io import GatewayRequest, gateway_of, read_arrival, unless_disconnected
from app.rate_limit_headers import rate_limit_headers
from app.relay import Relay
from app.streaming import EventStream, answer_events


class ChatController(Controller):
    """Reduce, generate, answer."""

    @post("/v1/chat/completions", status_code=200)
    async def create(self, request: GatewayRequest) -> Response[Any]:
        """A chat completion, whole or as a stream. Errors before the first token have their HTTP status."""
        with gateway_of(request).drain.interruptible():
            return await self._answer(request)

    async def _answer(self, request: GatewayRequest) -> Response[Any]:
        gateway = gateway_of(request)
        arrival = await read_arrival(request)
        generation = await unless_disconnected(request.receive, gateway.chat_service.complete(arrival))
        compacted = generation.compaction.request
        model = compacted.body.model or gateway.served_model.name
        if compacted.body.stream:
            headers = await answer_headers(gateway, arrival.principal, generation)
            return EventStream(generation, answer_events(generation, model), headers=headers)
        answer = await whole_answer(request, generation, model)
        # Only now is the output charged, so that the limits in the headers are those of the next request.
        headers = await answer_headers(gateway, arrival.principal, generation)
        return Response(answer, media_type="application/json", headers=headers)


async def whole_answer(request: GatewayRequest, generation: Generation, model: str) -> bytes:
    """The answer of a started generation as JSON, once it is complete; the generation is closed either way."""
    try:
        if isinstance(generation, Relay):
            return await unless_disconnected(request.receive, generation.read_answer(model))
        await unless_disconnected(request.receive, generation.read_to_end())
        return msgspec.json.encode(chat_completion(generation, model))
    finally:
        await generation.aclose()


async def answer_headers(gateway: Gateway, principal: Principal, generation: Generation) -> dict[str, str]:
    """The receipt, what was saved, and what the tenant has left now."""
    remaining = await gateway.admission.remaining(principal)
    return {**reduction_headers(generation.compaction), **rate_limit_headers(remaining)}
