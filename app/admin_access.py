"""Who may use ``/admin/v1``: holders of an admin key of the configuration, and nobody else."""

import hmac
from typing import TYPE_CHECKING

from app.auth import key_digest, unknown_key
from app.errors import AuthenticationError, NotFoundError, PermissionDeniedError
from app.gateway import Gateway
from app.http_io import GatewayRequest, gateway_of, note_operator, read_body

if TYPE_CHECKING:
    from app.storage.service import Storage

MAX_ADMIN_BODY_BYTES = 1024 * 1024


def is_admin_key(digest: str, known: tuple[str, ...]) -> bool:
    """Whether the digest is one of ``known``; takes as long for any, so that time tells nothing of them."""
    found = [hmac.compare_digest(digest, one) for one in known]
    return any(found)


async def require_admin_key(request: GatewayRequest) -> None:
    """Raises ``AuthenticationError`` without a key or an unknown one, ``PermissionDeniedError`` with a tenant's."""
    gateway = gateway_of(request)
    authorization = request.headers.get("authorization")
    digest = key_digest(authorization)
    if not is_admin_key(digest, gateway.settings.admin.key_sha256):
        await _refuse(gateway, authorization)
    note_operator(request.scope, digest)


async def require_admin(request: GatewayRequest) -> "Storage":
    """The storage, for an operator. Raises as ``require_admin_key``, ``NotFoundError`` where there is no database."""
    await require_admin_key(request)
    storage = gateway_of(request).tenancy.storage
    if storage is None:
        raise NotFoundError("There is no database: storage.enabled is false.", code="storage_disabled")
    return storage


async def _refuse(gateway: Gateway, authorization: str | None) -> None:
    try:
        await gateway.directory.authenticate(authorization)
    except AuthenticationError:
        raise unknown_key() from None
    raise PermissionDeniedError("This key is a tenant's; /admin/v1 needs an admin key (admin.key_sha256).")


async def read_admin_body(request: GatewayRequest) -> bytes:
    """The body of an operator's request. Raises as ``read_body``."""
    return await read_body(request, MAX_ADMIN_BODY_BYTES)
