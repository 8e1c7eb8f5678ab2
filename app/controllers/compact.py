"""``POST /v1/compact``: what a completion would send to the model, without generating."""

from litestar import Controller, Response, post

from app.answers import compact_answer, reduction_headers
from app.http_io import GatewayRequest, gateway_of, json_response, read_arrival, unless_disconnected


class CompactController(Controller):
    """Reduce and answer."""

    @post("/v1/compact", status_code=200)
    async def create(self, request: GatewayRequest) -> Response[bytes]:
        """The compacted prompt and the decision about every document and turn."""
        gateway = gateway_of(request)
        with gateway.drain.interruptible():
            arrival = await read_arrival(request)
            compaction = await unless_disconnected(request.receive, gateway.chat_service.compact(arrival))
        return json_response(compact_answer(compaction), headers=reduction_headers(compaction))
