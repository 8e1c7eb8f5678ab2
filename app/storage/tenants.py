"""Tenants, their groups and budgets: the one service behind the command line and ``/admin/v1``.

Tenants of the configuration file are shown and not changed. A name is either the file's or the database's.
"""

from typing import Any

from advanced_alchemy.exceptions import DuplicateKeyError
from advanced_alchemy.repository import SQLAlchemyAsyncRepository
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from app.counters.periods import Period
from app.errors import ConflictError, InvalidRequestError, NotFoundError
from app.operator_settings import BudgetSettings
from app.settings import TenantSettings
from app.snapshot import LiveConfig
from app.storage.database import Database
from app.storage.models import BudgetRow, GroupRow, TenantRow
from app.storage.records import NewTenant, TenantChanges, TenantInfo


class TenantRepository(SQLAlchemyAsyncRepository[TenantRow]):
    """Rows of tenants."""

    model_type = TenantRow


class TenantService:
    """Creates, changes and lists tenants. Every call is one transaction."""

    def __init__(self, database: Database, config: LiveConfig, source: str) -> None:
        """``source`` is how messages call the configuration."""
        self._database = database
        self._config = config
        self._source = source

    @property
    def _of_file(self) -> dict[str, TenantSettings]:
        return self._config.settings.tenants

    async def list_tenants(self) -> list[TenantInfo]:
        """All tenants by name."""
        async with self._database.session() as session:
            rows = (await session.scalars(select(TenantRow))).all()
            found = [info_of_row(row) for row in rows]
        found += [info_of_settings(name, tenant) for name, tenant in self._of_file.items()]
        return sorted(found, key=lambda info: info.name)

    async def get(self, name: str) -> TenantInfo:
        """One tenant. Raises ``NotFoundError``."""
        if name in self._of_file:
            return info_of_settings(name, self._of_file[name])
        async with self._database.session() as session:
            return info_of_row(await find_tenant(session, name))

    async def create(self, new: NewTenant) -> TenantInfo:
        """Adds a tenant. Raises ``ConflictError`` for a name that is taken, ``InvalidRequestError`` for bad limits."""
        if new.name in self._of_file:
            raise ConflictError(f"tenants.{new.name} is a tenant of {self._source}; choose another name.", param="name")
        try:
            async with self._database.session() as session:
                row = TenantRow(name=new.name, policy="default", is_blocked=False, deny_unlabelled=False)
                row.groups = [GroupRow(name=group) for group in dict.fromkeys(new.groups)]
                row.budgets = []
                self._apply(row, new)
                await TenantRepository(session=session).add(row)
                return info_of_row(row)
        except (IntegrityError, DuplicateKeyError):
            raise ConflictError(f"There is a tenant {new.name!r} already.", param="name") from None

    async def change(self, name: str, changes: TenantChanges) -> TenantInfo:
        """Sets the fields that were given. Raises as ``create``, and ``NotFoundError``."""
        async with self._database.session() as session:
            row = await self._writable(session, name)
            self._apply(row, changes)
            await session.flush()
            return info_of_row(row)

    async def delete(self, name: str) -> None:
        """Removes a tenant with its keys, groups and budgets; usage and receipts stay until they are old."""
        async with self._database.session() as session:
            await session.delete(await self._writable(session, name))

    async def set_budget(self, name: str, budget: BudgetSettings) -> TenantInfo:
        """Sets the budget of a period in place of the one before."""
        async with self._database.session() as session:
            row = await self._writable(session, name)
            entry = next((entry for entry in row.budgets if entry.period == budget.period), None)
            if entry is None:
                entry = BudgetRow(period=budget.period)
                row.budgets.append(entry)
            entry.requests, entry.tokens = budget.requests, budget.tokens
            entry.input_tokens, entry.output_tokens = budget.input_tokens, budget.output_tokens
            await session.flush()
            return info_of_row(row)

    async def remove_budget(self, name: str, period: Period) -> TenantInfo:
        """Lifts the budget of a period. Raises ``NotFoundError`` where there is none."""
        async with self._database.session() as session:
            row = await self._writable(session, name)
            entry = next((entry for entry in row.budgets if entry.period == period), None)
            if entry is None:
                raise NotFoundError(f"Tenant {name!r} has no budget per {period}.", param="period")
            row.budgets.remove(entry)
            await session.flush()
            return info_of_row(row)

    async def add_group(self, name: str, group: str) -> TenantInfo:
        """Adds a group; one that exists stays as it is."""
        async with self._database.session() as session:
            row = await self._writable(session, name)
            if group not in [entry.name for entry in row.groups]:
                row.groups.append(GroupRow(name=group))
            await session.flush()
            return info_of_row(row)

    async def remove_group(self, name: str, group: str) -> TenantInfo:
        """Removes a group, from its keys as well. Raises ``NotFoundError`` where there is none."""
        async with self._database.session() as session:
            row = await self._writable(session, name)
            entry = next((entry for entry in row.groups if entry.name == group), None)
            if entry is None:
                raise NotFoundError(f"Tenant {name!r} has no group {group!r}.", param="group")
            row.groups.remove(entry)
            await session.flush()
            return info_of_row(row)

    async def _writable(self, session: AsyncSession, name: str) -> TenantRow:
        if name in self._of_file:
            raise InvalidRequestError(
                f"tenants.{name} is a tenant of {self._source}; change it there.", param="name", code="read_only"
            )
        return await find_tenant(session, name)

    def _apply(self, row: TenantRow, changes: TenantChanges) -> None:
        for field, value in changes.given().items():
            setattr(row, field, value)
        policies = self._config.current.policies
        policy = policies.get(row.policy)
        if policy is None:
            known = ", ".join(policies.names)
            raise InvalidRequestError(f"Unknown policy {row.policy!r}; known policies: {known}.", param="policy")
        if not policy.meets(row.recall_floor):
            measured = policy.settings.measured_recall
            raise InvalidRequestError(
                f"The recall floor is {row.recall_floor}, the measured recall of policy {row.policy!r} is "
                f"{'not known' if measured is None else measured}.",
                param="recall_floor",
            )


async def find_tenant(session: AsyncSession, name: str) -> TenantRow:
    """The row of a tenant. Raises ``NotFoundError``."""
    row = await TenantRepository(session=session).get_one_or_none(TenantRow.name == name)
    if row is None:
        raise NotFoundError(f"There is no tenant {name!r} in the database.", param="name")
    return row


async def stored_names(session: AsyncSession) -> list[str]:
    """Names of all tenants of the database."""
    return list((await session.scalars(select(TenantRow.name))).all())


def budgets_of(row: TenantRow) -> list[BudgetSettings]:
    """The budgets of a tenant by period."""
    return [
        BudgetSettings(
            period=entry.period,  # type: ignore[arg-type]  # written by ``set_budget`` only
            requests=entry.requests,
            input_tokens=entry.input_tokens,
            output_tokens=entry.output_tokens,
            tokens=entry.tokens,
        )
        for entry in sorted(row.budgets, key=lambda entry: entry.period)
    ]


def settings_of_row(row: TenantRow) -> TenantSettings:
    """A tenant of the database as the gateway knows tenants."""
    return TenantSettings(
        policy=row.policy,
        deny_unlabelled=row.deny_unlabelled,
        max_input_tokens=row.max_input_tokens,
        ttft_slo_ms=row.ttft_slo_ms,
        recall_floor=row.recall_floor,
        requests_per_minute=row.requests_per_minute,
        max_parallel_requests=row.max_parallel_requests,
        budgets=tuple(budgets_of(row)),
    )


def info_of_row(row: TenantRow) -> TenantInfo:
    """A tenant of the database as operators see it."""
    return _info(
        row.name,
        settings_of_row(row),
        source="database",
        is_blocked=row.is_blocked,
        groups=sorted(group.name for group in row.groups),
    )


def info_of_settings(name: str, tenant: TenantSettings) -> TenantInfo:
    """A tenant of the configuration file as operators see it."""
    groups = sorted({group for key in tenant.keys for group in key.groups})
    return _info(name, tenant, source="file", is_blocked=False, groups=groups)


def _info(name: str, tenant: TenantSettings, **fields: Any) -> TenantInfo:
    return TenantInfo(
        name=name,
        policy=tenant.policy,
        deny_unlabelled=tenant.deny_unlabelled,
        max_input_tokens=tenant.max_input_tokens,
        ttft_slo_ms=tenant.ttft_slo_ms,
        recall_floor=tenant.recall_floor,
        requests_per_minute=tenant.requests_per_minute,
        max_parallel_requests=tenant.max_parallel_requests,
        tokens_per_day=tenant.tokens_per_day,
        budgets=list(tenant.budgets),
        **fields,
    )
