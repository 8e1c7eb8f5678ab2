"""Usage by tenant, key and day: added up in memory, written every moment, read by operators.

What a crash loses is younger than the flush interval. Nothing of it decides about admission while the process runs; a
gateway that counts in memory asks it once, after a restart, what its tenants had used before.
"""

import datetime
from dataclasses import astuple, dataclass

from sqlalchemy import func, select

from app.auth import Principal
from app.counters.memory import Spent
from app.counters.periods import Period
from app.storage.database import Database, insert_or_add
from app.storage.models import UsageRow
from app.storage.records import UsageDay

UsageKey = tuple[str, datetime.date, str]
"""Tenant, day, name of the key."""


@dataclass(slots=True)
class Used:
    """What came together since the last flush."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    original_tokens: int = 0
    saved_tokens: int = 0

    def add(self, other: "Used") -> None:
        """Adds figures."""
        self.requests += other.requests
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cached_tokens += other.cached_tokens
        self.original_tokens += other.original_tokens
        self.saved_tokens += other.saved_tokens


class UsageRecorder:
    """Hears of settled requests. Used from the event loop only."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pending: dict[UsageKey, Used] = {}

    @property
    def num_pending(self) -> int:
        """Rows that the next flush writes."""
        return len(self._pending)

    def on_settled(self, principal: Principal, input_tokens: int, output_tokens: int) -> None:
        """A request has ended; what it used counts for the day on which it ends."""
        self._add(principal, Used(requests=1, input_tokens=input_tokens, output_tokens=output_tokens))

    def on_compaction(self, principal: Principal, original_tokens: int, saved_tokens: int) -> None:
        """A prompt was reduced."""
        self._add(principal, Used(original_tokens=original_tokens, saved_tokens=saved_tokens))

    def on_cached(self, principal: Principal, cached_tokens: int) -> None:
        """Prompt tokens came from the prefix cache."""
        if cached_tokens:
            self._add(principal, Used(cached_tokens=cached_tokens))

    async def flush(self) -> None:
        """Writes what came together; where that fails it stays for the next time. Raises ``DatabaseError``."""
        taken, self._pending = self._pending, {}
        if not taken:
            return
        # In one order everywhere, so that two gateways that write the same rows never wait for each other in a circle.
        rows = [
            {"tenant": tenant, "day": day, "key_name": key_name, **_figures(used)}
            for (tenant, day, key_name), used in sorted(taken.items())
        ]
        try:
            async with self._database.session() as session:
                await insert_or_add(session, UsageRow.__table__, rows)
        except BaseException:
            for key, used in taken.items():
                self._pending.setdefault(key, Used()).add(used)
            raise

    async def spent_since(self, tenant: str, period: Period, start_s: float) -> Spent:
        """What a tenant used in a day or a month that began at ``start_s``; shorter periods begin empty."""
        if period not in ("day", "month"):
            return Spent()
        first = datetime.datetime.fromtimestamp(start_s, datetime.UTC).date()
        columns = (UsageRow.requests, UsageRow.input_tokens, UsageRow.output_tokens)
        query = select(*(func.coalesce(func.sum(column), 0) for column in columns)).where(
            UsageRow.tenant == tenant, UsageRow.day >= first
        )
        async with self._database.session() as session:
            spent = Spent(*(int(value) for value in (await session.execute(query)).one()))
        for (name, day, _), used in self._pending.items():
            if name == tenant and day >= first:
                spent.requests += used.requests
                spent.input_tokens += used.input_tokens
                spent.output_tokens += used.output_tokens
        return spent

    async def list_days(
        self, tenant: str | None = None, since: datetime.date | None = None, until: datetime.date | None = None
    ) -> list[UsageDay]:
        """Usage by day, tenant and key; ``until`` is the last day."""
        query = select(UsageRow).order_by(UsageRow.day, UsageRow.tenant, UsageRow.key_name)
        if tenant is not None:
            query = query.where(UsageRow.tenant == tenant)
        if since is not None:
            query = query.where(UsageRow.day >= since)
        if until is not None:
            query = query.where(UsageRow.day <= until)
        async with self._database.session() as session:
            rows = (await session.scalars(query)).all()
        return [
            UsageDay(
                tenant=row.tenant,
                day=row.day.isoformat(),
                key=row.key_name,
                requests=row.requests,
                input_tokens=row.input_tokens,
                output_tokens=row.output_tokens,
                cached_tokens=row.cached_tokens,
                original_tokens=row.original_tokens,
                saved_tokens=row.saved_tokens,
            )
            for row in rows
        ]

    def _add(self, principal: Principal, used: Used) -> None:
        today = datetime.datetime.now(datetime.UTC).date()
        self._pending.setdefault((principal.tenant_id, today, principal.key_name), Used()).add(used)


def _figures(used: Used) -> dict[str, int]:
    return dict(zip(Used.__slots__, astuple(used), strict=True))
