"""Runs migrations on the connection that the caller holds."""

from advanced_alchemy.base import orm_registry
from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=orm_registry.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
