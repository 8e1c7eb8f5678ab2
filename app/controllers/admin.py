"""``/admin/v1/tenants``: tenants, groups, budgets and keys, for operators."""

from typing import Any

import msgspec
from litestar import Controller, Response, delete, get, patch, post, put

from app.admin_access import read_admin_body, require_admin
from app.completion_request import convert_body, decode_object
from app.counters.periods import PERIODS, Period
from app.errors import InvalidRequestError
from app.http_io import GatewayRequest, gateway_of, json_response
from app.operator_settings import BudgetSettings
from app.storage.records import NewKey, NewTenant, Rotation, TenantChanges


class AdminTenantsController(Controller):
    """What operators do with tenants. Every change holds at once in this process."""

    path = "/admin/v1/tenants"

    @get("/")
    async def list_tenants(self, request: GatewayRequest) -> Response[bytes]:
        """All tenants, those of the configuration file as well."""
        storage = await require_admin(request)
        return listing(await storage.tenants.list_tenants())

    @post("/")
    async def create(self, request: GatewayRequest) -> Response[bytes]:
        """A new tenant."""
        storage = await require_admin(request)
        new = convert_body(decode_object(await read_admin_body(request)), NewTenant)
        return json_response(await storage.tenants.create(new), status_code=201)

    @get("/{name:str}")
    async def show(self, request: GatewayRequest) -> Response[bytes]:
        """One tenant."""
        (name,) = named(request, "name")
        storage = await require_admin(request)
        return json_response(await storage.tenants.get(name))

    @patch("/{name:str}")
    async def change(self, request: GatewayRequest) -> Response[bytes]:
        """Sets the fields of the body."""
        (name,) = named(request, "name")
        storage = await require_admin(request)
        changes = convert_body(decode_object(await read_admin_body(request)), TenantChanges)
        return changed(request, await storage.tenants.change(name, changes))

    @delete("/{name:str}", status_code=200)
    async def remove(self, request: GatewayRequest) -> Response[bytes]:
        """Removes a tenant and its keys."""
        (name,) = named(request, "name")
        storage = await require_admin(request)
        await storage.tenants.delete(name)
        return changed(request, {"name": name, "deleted": True})

    @put("/{name:str}/budgets/{period:str}")
    async def set_budget(self, request: GatewayRequest) -> Response[bytes]:
        """Sets the budget of a period."""
        name, period = named(request, "name", "period")
        storage = await require_admin(request)
        fields = {**decode_object(await read_admin_body(request)), "period": _period(period)}
        return changed(request, await storage.tenants.set_budget(name, convert_body(fields, BudgetSettings)))

    @delete("/{name:str}/budgets/{period:str}", status_code=200)
    async def remove_budget(self, request: GatewayRequest) -> Response[bytes]:
        """Lifts the budget of a period."""
        name, period = named(request, "name", "period")
        storage = await require_admin(request)
        return changed(request, await storage.tenants.remove_budget(name, _period(period)))

    @put("/{name:str}/groups/{group:str}")
    async def add_group(self, request: GatewayRequest) -> Response[bytes]:
        """Adds a group."""
        name, group = named(request, "name", "group")
        storage = await require_admin(request)
        checked = convert_body({"name": group}, NewKey).name
        return changed(request, await storage.tenants.add_group(name, checked))

    @delete("/{name:str}/groups/{group:str}", status_code=200)
    async def remove_group(self, request: GatewayRequest) -> Response[bytes]:
        """Removes a group, from its keys as well."""
        name, group = named(request, "name", "group")
        storage = await require_admin(request)
        return changed(request, await storage.tenants.remove_group(name, group))

    @get("/{name:str}/keys")
    async def list_keys(self, request: GatewayRequest) -> Response[bytes]:
        """The tenant's keys, without their secrets."""
        (name,) = named(request, "name")
        storage = await require_admin(request)
        return listing(await storage.keys.list_keys(name))

    @post("/{name:str}/keys")
    async def create_key(self, request: GatewayRequest) -> Response[bytes]:
        """A new key; the answer is the only place where it is ever shown."""
        (name,) = named(request, "name")
        storage = await require_admin(request)
        new = convert_body(decode_object(await read_admin_body(request)), NewKey)
        return changed(request, await storage.keys.create(name, new), status_code=201)

    @post("/{name:str}/keys/{key:str}/rotate")
    async def rotate_key(self, request: GatewayRequest) -> Response[bytes]:
        """A new key in place of an old one, which works until the overlap ends."""
        name, key = named(request, "name", "key")
        storage = await require_admin(request)
        rotation = convert_body(decode_object(await read_admin_body(request) or b"{}"), Rotation)
        return changed(request, await storage.keys.rotate(name, key, rotation), status_code=201)

    @delete("/{name:str}/keys/{key:str}", status_code=200)
    async def revoke_key(self, request: GatewayRequest) -> Response[bytes]:
        """Ends a key by its id, or all keys of a name."""
        name, key = named(request, "name", "key")
        storage = await require_admin(request)
        revoked = await storage.keys.revoke(name, key)
        gateway_of(request).directory.forget()
        return listing(revoked)


def named(request: GatewayRequest, *names: str) -> tuple[str, ...]:
    """Parts of the address."""
    return tuple(str(request.path_params[name]) for name in names)


def listing(entries: list[Any]) -> Response[bytes]:
    """OpenAI's shape of a list."""
    return json_response({"object": "list", "data": msgspec.to_builtins(entries)})


def changed(request: GatewayRequest, content: Any, *, status_code: int = 200) -> Response[bytes]:
    """The answer to a change, which this process's next request sees."""
    gateway_of(request).directory.forget()
    return json_response(content, status_code=status_code)


def _period(name: str) -> Period:
    if name not in PERIODS:
        raise InvalidRequestError(f"Unknown period {name!r}; it must be one of {', '.join(PERIODS)}.", param="period")
    return name
