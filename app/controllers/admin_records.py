"""``/admin/v1/policies``, ``/admin/v1/usage`` and ``/admin/v1/receipts``, for operators."""

import datetime
from typing import Annotated, Any

import msgspec
from litestar import Controller, Response, get, post, put
from msgspec import Meta

from app.admin_access import read_admin_body, require_admin
from app.completion_request import convert_body, decode_object
from app.controllers.admin import listing, named
from app.errors import InvalidRequestError
from app.http_io import GatewayRequest, json_response
from app.storage.records import Name

MAX_LISTED = 1000


class PolicyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new version of a policy."""

    settings: dict[str, Any]
    """As under ``[policies.NAME]``."""
    note: Annotated[str, Meta(max_length=500)] = ""


class ActivateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version to take up again."""

    version: Annotated[int, Meta(ge=1)]


class _Named(msgspec.Struct, frozen=True, kw_only=True):
    name: Name


class AdminRecordsController(Controller):
    """Policies with versions; what was used; which receipts are kept."""

    path = "/admin/v1"

    @get("/policies")
    async def list_policies(self, request: GatewayRequest) -> Response[bytes]:
        """All versions of all policies; ``?name=`` for one."""
        storage = await require_admin(request)
        return listing(await storage.policies.list_versions(request.query_params.get("name")))

    @put("/policies/{name:str}")
    async def put_policy(self, request: GatewayRequest) -> Response[bytes]:
        """A new version, which is used from now on; other gateways take it within ``storage.key_cache_s``."""
        (name,) = named(request, "name")
        storage = await require_admin(request)
        body = convert_body(decode_object(await read_admin_body(request)), PolicyBody)
        return json_response(
            await storage.policies.put(convert_body({"name": name}, _Named).name, body.settings, body.note)
        )

    @post("/policies/{name:str}/activate", status_code=200)
    async def activate_policy(self, request: GatewayRequest) -> Response[bytes]:
        """Takes an older version up again."""
        (name,) = named(request, "name")
        storage = await require_admin(request)
        body = convert_body(decode_object(await read_admin_body(request)), ActivateBody)
        return json_response(await storage.policies.activate(name, body.version))

    @get("/usage")
    async def list_usage(self, request: GatewayRequest) -> Response[bytes]:
        """Usage by day, tenant and key; ``?tenant=``, ``?since=`` and ``?until=`` (days, e.g. 2026-03-01)."""
        storage = await require_admin(request)
        await storage.usage.flush()
        query = request.query_params
        days = [_day(name, query.get(name)) for name in ("since", "until")]
        return listing(await storage.usage.list_days(query.get("tenant"), *days))

    @get("/receipts")
    async def list_receipts(self, request: GatewayRequest) -> Response[bytes]:
        """The newest receipts without their texts; ``?tenant=`` and ``?limit=``."""
        storage = await require_admin(request)
        await storage.receipts.flush()
        query = request.query_params
        limit = query.get("limit", "100")
        if not limit.isdigit() or not 1 <= int(limit) <= MAX_LISTED:
            raise InvalidRequestError(f"limit must be between 1 and {MAX_LISTED}, got {limit[:20]!r}.", param="limit")
        return listing(await storage.receipts.list_receipts(query.get("tenant"), int(limit)))


def _day(name: str, value: str | None) -> datetime.date | None:
    if value is None:
        return None
    try:
        return datetime.date.fromisoformat(value)
    except ValueError:
        text = f"{name} must be a day such as 2026-03-01, got {value[:40]!r}."
        raise InvalidRequestError(text, param=name, code="invalid_value") from None
