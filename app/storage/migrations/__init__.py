"""Migrations of the tables, applied by Alembic."""

__all__: tuple[str, ...] = ()
