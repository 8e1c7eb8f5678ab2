"""The first tables: tenants, groups, budgets, keys, policies, usage, receipts."""

import sqlalchemy as sa
from advanced_alchemy.types import GUID, DateTimeUTC, JsonB
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Creates the tables."""
    op.create_table(
        "policies",
        sa.Column("id", GUID(length=16), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("is_active", sa.Boolean(), nullable=False),
        sa.Column("settings", JsonB, nullable=False),
        sa.Column("note", sa.String(length=500), nullable=False),
        sa.Column("sa_orm_sentinel", sa.Integer(), nullable=True),
        sa.Column("created_at", DateTimeUTC(timezone=True), nullable=False),
        sa.Column("updated_at", DateTimeUTC(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policies")),
        sa.UniqueConstraint("name", "version", name=op.f("uq_policies_name")),
    )
    op.create_table(
        "receipts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("groups", JsonB, nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_receipts")),
    )
    op.create_index("ix_receipts_created", "receipts", ["created_s"], unique=False)
    op.create_index("ix_receipts_tenant_created", "receipts", ["tenant", "created_s"], unique=False)
    op.create_table(
        "tenants",
        sa.Column("id", GUID(length=16), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("is_blocked", sa.Boolean(), nullable=False),
        sa.Column("policy", sa.String(length=64), nullable=False),
        sa.Column("deny_unlabelled", sa.Boolean(), nullable=False),
        sa.Column("max_input_tokens", sa.BigInteger(), nullable=True),
        sa.Column("ttft_slo_ms", sa.Float(), nullable=True),
        sa.Column("recall_floor", sa.Float(), nullable=True),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("max_parallel_requests", sa.BigInteger(), nullable=True),
        sa.Column("sa_orm_sentinel", sa.Integer(), nullable=True),
        sa.Column("created_at", DateTimeUTC(timezone=True), nullable=False),
        sa.Column("updated_at", DateTimeUTC(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "usage_days",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("key_name", sa.String(length=64), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("original_tokens", sa.BigInteger(), nullable=False),
        sa.Column("saved_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "day", "key_name", name=op.f("pk_usage_days")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", GUID(length=16), nullable=False),
        sa.Column("tenant_id", GUID(length=16), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("hint", sa.String(length=16), nullable=False),
        sa.Column("expires_at", DateTimeUTC(timezone=True), nullable=True),
        sa.Column("revoked_at", DateTimeUTC(timezone=True), nullable=True),
        sa.Column("sa_orm_sentinel", sa.Integer(), nullable=True),
        sa.Column("created_at", DateTimeUTC(timezone=True), nullable=False),
        sa.Column("updated_at", DateTimeUTC(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"], unique=False)
    op.create_table(
        "budgets",
        sa.Column("id", GUID(length=16), nullable=False),
        sa.Column("tenant_id", GUID(length=16), nullable=False),
        sa.Column("period", sa.String(length=8), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=True),
        sa.Column("input_tokens", sa.BigInteger(), nullable=True),
        sa.Column("output_tokens", sa.BigInteger(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.Column("sa_orm_sentinel", sa.Integer(), nullable=True),
        sa.Column("created_at", DateTimeUTC(timezone=True), nullable=False),
        sa.Column("updated_at", DateTimeUTC(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_budgets_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budgets")),
        sa.UniqueConstraint("tenant_id", "period", name=op.f("uq_budgets_tenant_id")),
    )
    op.create_table(
        "tenant_groups",
        sa.Column("id", GUID(length=16), nullable=False),
        sa.Column("tenant_id", GUID(length=16), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("sa_orm_sentinel", sa.Integer(), nullable=True),
        sa.Column("created_at", DateTimeUTC(timezone=True), nullable=False),
        sa.Column("updated_at", DateTimeUTC(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_tenant_groups_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenant_groups")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_tenant_groups_tenant_id")),
    )
    op.create_table(
        "api_key_groups",
        sa.Column("api_key_id", GUID(length=16), nullable=False),
        sa.Column("tenant_group_id", GUID(length=16), nullable=False),
        sa.ForeignKeyConstraint(
            ["api_key_id"], ["api_keys.id"], name=op.f("fk_api_key_groups_api_key_id_api_keys"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_group_id"],
            ["tenant_groups.id"],
            name=op.f("fk_api_key_groups_tenant_group_id_tenant_groups"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("api_key_id", "tenant_group_id", name=op.f("pk_api_key_groups")),
    )


def downgrade() -> None:
    """Drops the tables and all that is in them."""

    op.drop_table("api_key_groups")
    op.drop_table("tenant_groups")
    op.drop_table("budgets")
    op.drop_index("ix_api_keys_tenant_id", table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_table("usage_days")
    op.drop_table("tenants")
    op.drop_index("ix_receipts_tenant_created", table_name="receipts")
    op.drop_index("ix_receipts_created", table_name="receipts")
    op.drop_table("receipts")
    op.drop_table("policies")
