"""``GET /v1/receipts/{id}``."""

from litestar import Controller, Response, get

from app.http_io import GatewayRequest, authenticated, gateway_of


class ReceiptsController(Controller):
    """Looks records up."""

    @get("/v1/receipts/{receipt_id:str}")
    async def show(self, request: GatewayRequest) -> Response[bytes]:
        """The whole record of a reduction of the caller's own tenant."""
        principal = await authenticated(request)
        document = await gateway_of(request).find_receipt(request.path_params["receipt_id"], principal)
        return Response(document, media_type="application/json")
