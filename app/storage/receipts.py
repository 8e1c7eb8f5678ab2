"""Receipts in the database: written in the background, kept within the limits in number, bytes and age.

The newest are in memory as well, so that the caller who has just got an id can look it up at once.
"""

import asyncio
import time
import zlib
from collections import deque
from dataclasses import dataclass

import structlog
from sqlalchemy import delete, func, select

from app.auth import Principal
from app.errors import NotFoundError
from app.receipts import ReceiptStore
from app.settings import ReceiptSettings
from app.storage.database import Database, insert_new
from app.storage.models import ReceiptRow
from app.storage.records import ReceiptInfo

MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Records that wait for the database; when it does not answer the oldest are given up."""
COMPRESSION_LEVEL = 1
FLUSHES_PER_SWEEP = 30


@dataclass(frozen=True, slots=True)
class StoredReceipt:
    """A record and who may read it."""

    id: str
    tenant: str
    groups: frozenset[str]
    created_s: float
    document: bytes
    replaces: bool = False
    """There may be an earlier one with this id."""


class ReceiptArchive:
    """Keeps records. Used from the event loop only."""

    def __init__(self, database: Database, settings: ReceiptSettings, memory: ReceiptStore) -> None:
        self._database = database
        self._settings = settings
        self._memory = memory
        self._queue: deque[StoredReceipt] = deque()
        self._queued_bytes = 0
        self._num_flushes = 0

    def limit(self, settings: ReceiptSettings) -> None:
        """Takes other limits; the database follows with the next records and sweeps."""
        self._settings = settings

    def put(self, receipt_id: str, principal: Principal, document: bytes) -> None:
        """Keeps a record in memory now and in the database soon, in place of an earlier one with this id."""
        replaces = receipt_id in self._memory
        self._memory.put(receipt_id, principal, document)
        if len(document) > min(self._settings.max_bytes_per_tenant, self._settings.max_bytes):
            return
        self._queue.append(
            StoredReceipt(receipt_id, principal.tenant_id, principal.groups, time.time(), document, replaces)
        )
        self._queued_bytes += len(document)
        num_given_up = 0
        while self._queued_bytes > MAX_QUEUED_BYTES and len(self._queue) > 1:
            self._queued_bytes -= len(self._queue.popleft().document)
            num_given_up += 1
        if num_given_up:
            structlog.get_logger("firsttoken.receipts").warning("receipts_not_written", count=num_given_up)

    async def get(self, receipt_id: str, principal: Principal) -> bytes:
        """The record as JSON. Raises ``NotFoundError``, the same for one that is not there and one of others."""
        try:
            return self._memory.get(receipt_id, principal)
        except NotFoundError as error:
            stored = await self.find(receipt_id)
            if stored is None or stored.tenant != principal.tenant_id or not stored.groups <= principal.groups:
                raise error from None
            return stored.document

    async def find(self, receipt_id: str) -> StoredReceipt | None:
        """A record of any tenant, for the operator; ``None`` where it is not kept."""
        async with self._database.session() as session:
            row = await session.get(ReceiptRow, receipt_id)
        if row is None or row.created_s <= time.time() - self._settings.retention_s:
            return None
        document = await asyncio.to_thread(zlib.decompress, row.document)
        return StoredReceipt(row.id, row.tenant, frozenset(row.groups), row.created_s, document)

    async def list_receipts(self, tenant: str | None = None, limit: int = 100) -> list[ReceiptInfo]:
        """The newest records, newest first, without their texts."""
        columns = (ReceiptRow.id, ReceiptRow.tenant, ReceiptRow.created_s, ReceiptRow.num_bytes)
        query = select(*columns).order_by(ReceiptRow.created_s.desc(), ReceiptRow.id).limit(limit)
        oldest_s = time.time() - self._settings.retention_s
        query = query.where(ReceiptRow.created_s > oldest_s)
        if tenant is not None:
            query = query.where(ReceiptRow.tenant == tenant)
        async with self._database.session() as session:
            rows = (await session.execute(query)).all()
        return [
            ReceiptInfo(id=row.id, tenant=row.tenant, created=int(row.created_s), num_bytes=row.num_bytes)
            for row in rows
        ]

    async def flush(self) -> None:
        """Writes what waits and removes what is over a limit. Raises ``DatabaseError``; nothing is lost then."""
        taken = list(self._queue)
        if taken:
            newest = {receipt.id: receipt for receipt in taken}
            rows = await asyncio.to_thread(_rows, list(newest.values()))
            replaced = [receipt.id for receipt in newest.values() if receipt.replaces]
            async with self._database.session() as session:
                for start in range(0, len(replaced), 500):
                    ids = replaced[start : start + 500]
                    await session.execute(delete(ReceiptRow).where(ReceiptRow.id.in_(ids)))
                await insert_new(session, ReceiptRow.__table__, rows)
            for receipt in taken:
                if self._queue and self._queue[0] is receipt:  # else it was given up meanwhile
                    self._queued_bytes -= len(self._queue.popleft().document)
            for tenant in sorted({receipt.tenant for receipt in taken}):
                await self._trim(tenant)
        self._num_flushes += 1
        if self._num_flushes % FLUSHES_PER_SWEEP == 1:
            await self.sweep()

    async def sweep(self) -> None:
        """Removes records that are too old, then the oldest while all together are over ``max_bytes``."""
        oldest_s = time.time() - self._settings.retention_s
        async with self._database.session() as session:
            await session.execute(delete(ReceiptRow).where(ReceiptRow.created_s <= oldest_s))
            total = await session.scalar(select(func.coalesce(func.sum(ReceiptRow.num_bytes), 0)))
        if int(total or 0) > self._settings.max_bytes:
            await self._remove_oldest(None, self._settings.max_bytes, None)

    async def _trim(self, tenant: str) -> None:
        settings = self._settings
        async with self._database.session() as session:
            figures = select(func.count(), func.coalesce(func.sum(ReceiptRow.num_bytes), 0))
            count, total = (await session.execute(figures.where(ReceiptRow.tenant == tenant))).one()
        if count > settings.max_entries_per_tenant or total > settings.max_bytes_per_tenant:
            await self._remove_oldest(tenant, settings.max_bytes_per_tenant, settings.max_entries_per_tenant)

    async def _remove_oldest(self, tenant: str | None, max_bytes: int, max_entries: int | None) -> None:
        """Keeps the newest records that fit."""
        query = select(ReceiptRow.id, ReceiptRow.num_bytes).order_by(ReceiptRow.created_s.desc(), ReceiptRow.id)
        if tenant is not None:
            query = query.where(ReceiptRow.tenant == tenant)
        async with self._database.session() as session:
            num_bytes = 0
            extra = []
            for place, row in enumerate((await session.execute(query)).all()):
                num_bytes += row.num_bytes
                if num_bytes > max_bytes or (max_entries is not None and place >= max_entries):
                    extra.append(row.id)
            for start in range(0, len(extra), 500):
                await session.execute(delete(ReceiptRow).where(ReceiptRow.id.in_(extra[start : start + 500])))


def _rows(receipts: list[StoredReceipt]) -> list[dict[str, object]]:
    """What is inserted; compressing takes CPU time and runs in a thread."""
    rows: list[dict[str, object]] = []
    for receipt in receipts:
        document = zlib.compress(receipt.document, COMPRESSION_LEVEL)
        rows.append(
            {
                "id": receipt.id,
                "tenant": receipt.tenant,
                "groups": sorted(receipt.groups),
                "created_s": receipt.created_s,
                "num_bytes": len(document),
                "document": document,
            }
        )
    return rows
