"""Policies with versions: each change is a new version, one version is active, old ones can be taken up again."""

from typing import Any

import msgspec
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from app.config_tree import struct_of
from app.errors import ConfigError, ConflictError, InvalidRequestError, NotFoundError
from app.policies import Policy, PolicyBook
from app.settings import PolicySettings
from app.snapshot import LiveConfig
from app.storage.database import Database
from app.storage.models import PolicyRow, TenantRow
from app.storage.records import PolicyVersion


class PolicyService:
    """Writes versions and keeps the policy book up to date. Every call is one transaction."""

    def __init__(self, database: Database, config: LiveConfig, source: str) -> None:
        """``source`` is how messages call the configuration."""
        self._database = database
        self._config = config
        self._source = source

    @property
    def _book(self) -> PolicyBook:
        return self._config.current.policies

    async def refresh(self) -> None:
        """Reads the active versions into the book."""
        async with self._database.session() as session:
            rows = list((await session.scalars(select(PolicyRow).where(PolicyRow.is_active))).all())
        taken = [row.name for row in rows if row.name in self._book.file_names]
        if taken:
            raise ConfigError(
                f"policies.{taken[0]} is in {self._source} and in the database; remove it from one of them"
            )
        self._book.replace_stored({row.name: self._policy(row.name, row.version, row.settings) for row in rows})

    async def list_versions(self, name: str | None = None) -> list[PolicyVersion]:
        """All versions, of one policy or of all; those of the configuration file first."""
        found = []
        for of_file in self._book.file_names:
            policy = self._book.get(of_file)
            if policy is not None and name in (None, of_file):
                settings = msgspec.to_builtins(policy.settings)
                found.append(
                    PolicyVersion(name=of_file, version=None, is_active=True, settings=settings, note="", created=None)
                )
        query = select(PolicyRow).order_by(PolicyRow.name, PolicyRow.version)
        async with self._database.session() as session:
            rows = await session.scalars(query if name is None else query.where(PolicyRow.name == name))
            found += [_info(row) for row in rows.all()]
        return found

    async def put(self, name: str, settings: dict[str, Any], note: str = "") -> PolicyVersion:
        """Adds a version and makes it the active one.

        Raises ``ConflictError`` for a policy of the file, ``InvalidRequestError`` for settings that do not fit.
        """
        if name in self._book.file_names:
            raise ConflictError(f"policies.{name} is in {self._source}; change it there.", param="name")
        try:
            policy = self._policy(name, 0, settings)
        except ConfigError as error:
            raise InvalidRequestError(str(error), param="settings", code="invalid_value") from None
        try:
            async with self._database.session() as session:
                await self._check_floors(session, policy)
                last = await session.scalar(select(func.max(PolicyRow.version)).where(PolicyRow.name == name))
                row = PolicyRow(name=name, version=(last or 0) + 1, settings=settings, note=note[:500], is_active=True)
                await self._deactivate(session, name)
                session.add(row)
                await session.flush()
                added = _info(row)
        except IntegrityError:
            raise ConflictError(f"Policy {name!r} is being changed by somebody else; try again.") from None
        await self.refresh()
        return added

    async def activate(self, name: str, version: int) -> PolicyVersion:
        """Makes a version the active one. Raises ``NotFoundError``."""
        async with self._database.session() as session:
            wanted = (PolicyRow.name == name, PolicyRow.version == version)
            row = await session.scalar(select(PolicyRow).where(*wanted))
            if row is None:
                raise NotFoundError(f"There is no version {version} of policy {name!r} in the database.", param="name")
            await self._check_floors(session, self._policy(name, version, row.settings))
            await self._deactivate(session, name)
            row.is_active = True
            await session.flush()
            activated = _info(row)
        await self.refresh()
        return activated

    async def find(self, name: str, version: int | None) -> Policy | None:
        """A version as it was, active or not."""
        if version is None:
            return self._book.get(name)
        async with self._database.session() as session:
            wanted = (PolicyRow.name == name, PolicyRow.version == version)
            row = await session.scalar(select(PolicyRow).where(*wanted))
            return None if row is None else self._policy(name, version, row.settings)

    def _policy(self, name: str, version: int, settings: dict[str, Any]) -> Policy:
        return self._book.make(name, version, struct_of(settings, PolicySettings, f"policies.{name}"))

    async def _check_floors(self, session: AsyncSession, policy: Policy) -> None:
        """Refuses a version that tenants who use the policy may not use."""
        query = select(TenantRow.name, TenantRow.recall_floor).where(
            TenantRow.policy == policy.name, TenantRow.recall_floor.is_not(None)
        )
        for tenant, floor in (await session.execute(query.order_by(TenantRow.name))).all():
            if not policy.meets(floor):
                raise InvalidRequestError(
                    f"Tenant {tenant!r} uses policy {policy.name!r} with a recall floor of {floor}; the measured "
                    f"recall of this version is {policy.settings.measured_recall}.",
                    param="measured_recall",
                )

    @staticmethod
    async def _deactivate(session: AsyncSession, name: str) -> None:
        await session.execute(update(PolicyRow).where(PolicyRow.name == name).values(is_active=False))


def _info(row: PolicyRow) -> PolicyVersion:
    return PolicyVersion(
        name=row.name,
        version=row.version,
        is_active=row.is_active,
        settings=row.settings,
        note=row.note,
        created=int(row.created_at.timestamp()),
    )
