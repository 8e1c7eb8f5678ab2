"""``GET /admin/v1/config``: which configuration is in force, and what became of the last attempt to change it."""

from litestar import Controller, Response, get

from app.admin_access import require_admin_key
from app.http_io import GatewayRequest, gateway_of, json_response


class AdminConfigController(Controller):
    """The state of the configuration, without its values."""

    path = "/admin/v1/config"

    @get("/")
    async def show(self, request: GatewayRequest) -> Response[bytes]:
        """State, digest, times, keys that wait for a restart, the last refused attempt."""
        await require_admin_key(request)
        return json_response(gateway_of(request).reloads.status)
