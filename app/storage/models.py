"""The tables.

tenants ─┬─ tenant_groups ─┐
         ├─ budgets        ├─ api_key_groups
         └─ api_keys ──────┘
policies      every version of every policy
usage_days    what a key of a tenant used on one day; names, so that tenants of the configuration file count as well
receipts      reduction records, compressed
"""

import datetime
import uuid
from typing import Any

from advanced_alchemy.base import UUIDAuditBase, orm_registry
from advanced_alchemy.types import DateTimeUTC, JsonB
from sqlalchemy import BigInteger, Column, Date, ForeignKey, Index, LargeBinary, String, Table, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

MAX_NAME_CHARS = 64

api_key_groups = Table(
    "api_key_groups",
    orm_registry.metadata,
    Column("api_key_id", ForeignKey("api_keys.id", ondelete="CASCADE"), primary_key=True),
    Column("tenant_group_id", ForeignKey("tenant_groups.id", ondelete="CASCADE"), primary_key=True),
)


class TenantRow(UUIDAuditBase):
    """One tenant and the limits that have no period."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(MAX_NAME_CHARS), unique=True)
    is_blocked: Mapped[bool] = mapped_column(default=False)
    policy: Mapped[str] = mapped_column(String(MAX_NAME_CHARS), default="default")
    deny_unlabelled: Mapped[bool] = mapped_column(default=False)
    max_input_tokens: Mapped[int | None] = mapped_column(BigInteger, default=None)
    ttft_slo_ms: Mapped[float | None] = mapped_column(default=None)
    recall_floor: Mapped[float | None] = mapped_column(default=None)
    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger, default=None)
    max_parallel_requests: Mapped[int | None] = mapped_column(BigInteger, default=None)

    groups: Mapped[list["GroupRow"]] = relationship(
        cascade="all, delete-orphan", passive_deletes=True, lazy="selectin", order_by="GroupRow.name"
    )
    budgets: Mapped[list["BudgetRow"]] = relationship(
        cascade="all, delete-orphan", passive_deletes=True, lazy="selectin", order_by="BudgetRow.period"
    )
    keys: Mapped[list["ApiKeyRow"]] = relationship(
        cascade="all, delete-orphan", passive_deletes=True, lazy="raise", back_populates="tenant"
    )


class GroupRow(UUIDAuditBase):
    """A group of a tenant; keys are members."""

    __tablename__ = "tenant_groups"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(MAX_NAME_CHARS))


class BudgetRow(UUIDAuditBase):
    """What a tenant may use in each window of a period."""

    __tablename__ = "budgets"
    __table_args__ = (UniqueConstraint("tenant_id", "period"),)

    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    period: Mapped[str] = mapped_column(String(8))
    requests: Mapped[int | None] = mapped_column(BigInteger, default=None)
    input_tokens: Mapped[int | None] = mapped_column(BigInteger, default=None)
    output_tokens: Mapped[int | None] = mapped_column(BigInteger, default=None)
    tokens: Mapped[int | None] = mapped_column(BigInteger, default=None)


class ApiKeyRow(UUIDAuditBase):
    """One key, by its digest; the key itself is not kept."""

    __tablename__ = "api_keys"
    __table_args__ = (Index("ix_api_keys_tenant_id", "tenant_id"),)

    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(MAX_NAME_CHARS))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    hint: Mapped[str] = mapped_column(String(16))
    """First characters, by which a holder recognises the key."""
    expires_at: Mapped[datetime.datetime | None] = mapped_column(DateTimeUTC(timezone=True), default=None)
    revoked_at: Mapped[datetime.datetime | None] = mapped_column(DateTimeUTC(timezone=True), default=None)

    tenant: Mapped[TenantRow] = relationship(lazy="joined", back_populates="keys")
    groups: Mapped[list[GroupRow]] = relationship(
        secondary=api_key_groups, lazy="selectin", order_by="GroupRow.name", passive_deletes=True
    )


class PolicyRow(UUIDAuditBase):
    """One version of a policy; the active one is used."""

    __tablename__ = "policies"
    __table_args__ = (UniqueConstraint("name", "version"),)

    name: Mapped[str] = mapped_column(String(MAX_NAME_CHARS))
    version: Mapped[int]
    is_active: Mapped[bool] = mapped_column(default=False)
    settings: Mapped[dict[str, Any]] = mapped_column(JsonB)
    note: Mapped[str] = mapped_column(String(500), default="")


class PlainBase(DeclarativeBase):
    """Tables that are written in bulk and have natural keys."""

    registry = orm_registry


class UsageRow(PlainBase):
    """What one key used on one UTC day."""

    __tablename__ = "usage_days"

    tenant: Mapped[str] = mapped_column(String(MAX_NAME_CHARS), primary_key=True)
    day: Mapped[datetime.date] = mapped_column(Date, primary_key=True)
    key_name: Mapped[str] = mapped_column(String(MAX_NAME_CHARS), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    input_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    original_tokens: Mapped[int] = mapped_column(BigInteger)
    saved_tokens: Mapped[int] = mapped_column(BigInteger)


class ReceiptRow(PlainBase):
    """One reduction record."""

    __tablename__ = "receipts"
    __table_args__ = (
        Index("ix_receipts_tenant_created", "tenant", "created_s"),
        Index("ix_receipts_created", "created_s"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(MAX_NAME_CHARS))
    groups: Mapped[list[str]] = mapped_column(JsonB)
    """Groups of the key that made it; a reader needs all of them."""
    created_s: Mapped[float]
    """Unix time in seconds."""
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    """As kept, compressed."""
    document: Mapped[bytes] = mapped_column(LargeBinary)
