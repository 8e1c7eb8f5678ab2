"""API keys: made once, shown once, kept as digests; replaced with an overlap, expiring, revoked."""

import datetime
import hashlib
import secrets
import uuid

from advanced_alchemy.repository import SQLAlchemyAsyncRepository
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal, account_limits, cache_salt
from app.errors import InvalidRequestError, NotFoundError
from app.snapshot import LiveConfig
from app.storage.database import Database
from app.storage.models import ApiKeyRow, TenantRow
from app.storage.records import IssuedKey, KeyInfo, NewKey, Rotation
from app.storage.tenants import find_tenant, settings_of_row

KEY_PREFIX = "sk-ft-"
KEY_BYTES = 24
HINT_CHARS = 12


class KeyRepository(SQLAlchemyAsyncRepository[ApiKeyRow]):
    """Rows of keys."""

    model_type = ApiKeyRow


class KeyService:
    """Makes and ends keys of the tenants in the database. Every call is one transaction."""

    def __init__(self, database: Database, config: LiveConfig, source: str) -> None:
        """``source`` is how messages call the configuration."""
        self._database = database
        self._config = config
        self._source = source

    async def find_principal(self, digest: str) -> Principal | None:
        """The holder of a key; ``None`` where it is unknown, revoked, expired, or its tenant is blocked."""
        async with self._database.session() as session:
            row = await session.scalar(select(ApiKeyRow).where(ApiKeyRow.digest == digest))
            if row is None or status_of(row) != "active" or row.tenant.is_blocked:
                return None
            return self._principal(row)

    async def list_keys(self, tenant: str) -> list[KeyInfo]:
        """The keys of a tenant, oldest first; those that ended as well. Raises ``NotFoundError``."""
        self._refuse_file(tenant)
        async with self._database.session() as session:
            row = await find_tenant(session, tenant)
            return [info_of(key) for key in await self._keys_of(session, row)]

    async def create(self, tenant: str, new: NewKey) -> IssuedKey:
        """Makes a key. Raises ``NotFoundError``, and ``InvalidRequestError`` for a group that the tenant lacks."""
        self._refuse_file(tenant)
        async with self._database.session() as session:
            owner = await find_tenant(session, tenant)
            return await self._issue(session, owner, new.name, new.groups, new.expires_in_s)

    async def rotate(self, tenant: str, key: str, rotation: Rotation) -> IssuedKey:
        """Makes a key with the same name, groups and lifetime; the old one works until the overlap ends.

        ``key`` is an id or a name that one working key has. Raises ``NotFoundError`` and ``InvalidRequestError``.
        """
        self._refuse_file(tenant)
        async with self._database.session() as session:
            owner = await find_tenant(session, tenant)
            old = self._one(await self._keys_of(session, owner), tenant, key)
            if status_of(old) != "active":
                raise InvalidRequestError(f"Key {key!r} is {status_of(old)}; make a new one.", param="key")
            groups = [group.name for group in old.groups]
            expires_in_s = rotation.expires_in_s
            if expires_in_s is None and old.expires_at is not None:
                expires_in_s = (old.expires_at - old.created_at).total_seconds()
            issued = await self._issue(session, owner, old.name, groups, expires_in_s)
            end = now() + datetime.timedelta(seconds=rotation.overlap_s)
            old.expires_at = end if old.expires_at is None else min(end, old.expires_at)
            return issued

    async def revoke(self, tenant: str, key: str) -> list[KeyInfo]:
        """Ends a key by its id, or all working keys of a name. Raises ``NotFoundError`` where there is none."""
        self._refuse_file(tenant)
        async with self._database.session() as session:
            owner = await find_tenant(session, tenant)
            rows = [row for row in await self._keys_of(session, owner) if key in (str(row.id), row.name)]
            ended = [row for row in rows if row.revoked_at is None]
            if not rows:
                raise NotFoundError(f"Tenant {tenant!r} has no key {key!r}.", param="key")
            for row in ended:
                row.revoked_at = now()
            await session.flush()
            return [info_of(row) for row in rows]

    def _refuse_file(self, tenant: str) -> None:
        if tenant in self._config.settings.tenants:
            text = f"tenants.{tenant} is a tenant of {self._source}; its keys are there."
            raise InvalidRequestError(text, param="name", code="read_only")

    async def _issue(
        self, session: AsyncSession, owner: TenantRow, name: str, groups: list[str], expires_in_s: float | None
    ) -> IssuedKey:
        known = {group.name: group for group in owner.groups}
        if unknown := [group for group in groups if group not in known]:
            have = ", ".join(sorted(known)) or "none"
            text = f"Tenant {owner.name!r} has no group {unknown[0]!r}; it has {have}."
            raise InvalidRequestError(text, param="groups")
        key = KEY_PREFIX + secrets.token_hex(KEY_BYTES)
        row = ApiKeyRow(
            id=uuid.uuid4(),
            tenant_id=owner.id,
            name=name,
            digest=hashlib.sha256(key.encode()).hexdigest(),
            hint=key[:HINT_CHARS],
            expires_at=None if expires_in_s is None else now() + datetime.timedelta(seconds=expires_in_s),
            created_at=now(),
        )
        row.groups = [known[group] for group in dict.fromkeys(groups)]
        row.tenant = owner
        await KeyRepository(session=session).add(row)
        return IssuedKey(key=key, info=info_of(row))

    async def _keys_of(self, session: AsyncSession, owner: TenantRow) -> list[ApiKeyRow]:
        found = select(ApiKeyRow).where(ApiKeyRow.tenant_id == owner.id).order_by(ApiKeyRow.created_at, ApiKeyRow.id)
        return list((await session.scalars(found)).all())

    @staticmethod
    def _one(rows: list[ApiKeyRow], tenant: str, key: str) -> ApiKeyRow:
        """The key with this id, else the newest working one of this name."""
        by_id = [row for row in rows if str(row.id) == key]
        named = [row for row in rows if row.name == key]
        working = [row for row in named if status_of(row) == "active"]
        found = by_id or working or named
        if not found:
            raise NotFoundError(f"Tenant {tenant!r} has no key {key!r}.", param="key")
        return found[-1]

    def _principal(self, row: ApiKeyRow) -> Principal:
        tenant = settings_of_row(row.tenant)
        return Principal(
            tenant_id=row.tenant.name,
            tenant=tenant,
            key_name=row.name,
            groups=frozenset(group.name for group in row.groups),
            # With the row's id: a tenant that is made anew under an old name does not find the old one's prefixes.
            cache_salt=cache_salt(f"{row.tenant.name}/{row.tenant.id}", self._config.settings.server.salt_secret),
            limits=account_limits(tenant),
        )


def now() -> datetime.datetime:
    """The time in UTC."""
    return datetime.datetime.now(datetime.UTC)


def status_of(row: ApiKeyRow) -> str:
    """``active``, ``expired`` or ``revoked``."""
    if row.revoked_at is not None:
        return "revoked"
    return "expired" if row.expires_at is not None and row.expires_at <= now() else "active"


def info_of(row: ApiKeyRow) -> KeyInfo:
    """A key as operators see it."""
    return KeyInfo(
        id=str(row.id),
        tenant=row.tenant.name,
        name=row.name,
        hint=row.hint,
        groups=sorted(group.name for group in row.groups),
        status=status_of(row),  # type: ignore[arg-type]
        created=int(row.created_at.timestamp()),
        expires=None if row.expires_at is None else int(row.expires_at.timestamp()),
        revoked=None if row.revoked_at is None else int(row.revoked_at.timestamp()),
    )
