"""What an operator keeps: tenants, groups, keys, budgets, policies, usage and receipts in a database.

Importing this package is cheap; its modules load SQLAlchemy and are imported when a database is opened.
"""

__all__: tuple[str, ...] = ()
