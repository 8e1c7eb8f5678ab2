"""Opens the database: SQLite in a file, or PostgreSQL by URL; brings its tables up to date.

SQLite runs in WAL mode and waits for other writers, so that several gateways and the command line may share a file.
"""

import asyncio
import contextlib
import fcntl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sqlalchemy import event, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from app.errors import ConfigError, OverloadedError
from app.operator_settings import StorageSettings

HEAD = "0001"
"""The revision that this version of firsttoken needs."""
KNOWN = ("0001",)
MIGRATIONS = Path(__file__).with_name("migrations")
BUSY_TIMEOUT_MS = 5000
MIGRATION_LOCK = 7_283_462_501
"""Of PostgreSQL's advisory locks: one gateway migrates, the others wait."""


class DatabaseError(OverloadedError):
    """The database does not answer; retry later."""


class Database:
    """One pool of connections."""

    def __init__(self, settings: StorageSettings) -> None:
        self._settings = settings
        self._url = make_url(settings.database_url())
        self._engine: AsyncEngine | None = None
        self._sessions: async_sessionmaker[AsyncSession] | None = None

    @property
    def name(self) -> str:
        """The address without its password."""
        return self._url.render_as_string(hide_password=True)

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file of this machine."""
        return self._url.get_backend_name() == "sqlite"

    @property
    def engine(self) -> AsyncEngine:
        """The open pool."""
        assert self._engine is not None, "open comes first"
        return self._engine

    async def open(self, *, migrate: bool | None = None) -> None:
        """Connects and checks the tables, or brings them up to date; the settings say which, unless ``migrate`` does.

        Raises ``ConfigError`` where the database cannot be used.
        """
        migrate = self._settings.migrate_at_start if migrate is None else migrate
        try:
            self._engine = self._make_engine()
            async with self._file_lock():
                revision = await self.revision()
                if revision != HEAD and migrate and (revision is None or revision in KNOWN):
                    await self._upgrade()
                    revision = await self.revision()
        except (SQLAlchemyError, OSError) as error:
            await self.close()
            cause = getattr(error, "orig", None) or error
            raise ConfigError(f"storage: {self.name} cannot be opened: {cause}") from error
        if revision != HEAD:
            await self.close()
            hint = "run `firsttoken db upgrade`"
            if revision is not None and revision not in KNOWN:
                hint = "it was written by a newer version of firsttoken"
            raise ConfigError(f"storage: {self.name} has its tables at {revision}, {HEAD} is needed; {hint}")
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)

    async def close(self) -> None:
        """Lets go of the connections. May be called twice."""
        engine, self._engine, self._sessions = self._engine, None, None
        if engine is not None:
            await engine.dispose()

    async def revision(self) -> str | None:
        """The revision of the tables; ``None`` where there are none."""
        async with self.engine.connect() as connection:
            return await connection.run_sync(_revision)

    async def upgrade(self) -> None:
        """Brings the tables up to date. Several gateways may do this at the same time: one does, the others wait."""
        async with self._file_lock():
            await self._upgrade()

    async def _upgrade(self) -> None:
        async with self.engine.begin() as connection:
            if not self.is_sqlite:
                await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
            await connection.run_sync(_upgrade)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session that commits at its end. Raises ``DatabaseError`` where the database does not answer."""
        assert self._sessions is not None, "open comes first"
        from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
        from sqlalchemy.exc import TimeoutError as PoolTimeoutError

        try:
            async with self._sessions.begin() as session:
                yield session
        except (OperationalError, InterfaceError, PoolTimeoutError, OSError) as error:
            raise DatabaseError("The database does not answer; retry later.") from error
        except DBAPIError as error:
            if error.connection_invalidated:
                raise DatabaseError("The database does not answer; retry later.") from error
            raise

    def _make_engine(self) -> AsyncEngine:
        if not self.is_sqlite:
            return create_async_engine(self._url, pool_size=self._settings.pool_size, pool_pre_ping=True)
        if self._url.database and self._url.database != ":memory:":
            path = Path(self._url.database)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
        engine = create_async_engine(self._url)
        event.listen(engine.sync_engine, "connect", _set_pragmas)
        return engine

    @contextlib.asynccontextmanager
    async def _file_lock(self) -> AsyncIterator[None]:
        """Keeps other processes of this machine from opening and migrating the same file meanwhile.

        SQLite changes tables step by step, and where two connections turn a new file's journal into a log at the same
        time, one of them is refused without waiting.
        """
        if not self.is_sqlite or not self._url.database or self._url.database == ":memory:":
            yield
            return
        with Path(f"{self._url.database}.lock").open("w") as lock:
            # In a thread, since the holder may be another task of this loop.
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            yield


def _set_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY_TIMEOUT_MS}", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _revision(connection: Any) -> str | None:
    from sqlalchemy import inspect

    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return None if found is None else str(found)


def _upgrade(connection: Any) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


async def insert_or_add(session: AsyncSession, table: Any, rows: list[dict[str, Any]]) -> None:
    """Inserts rows; where a row with the same primary key exists, adds the figures to it."""
    keys = [column.name for column in table.primary_key]
    statement = _insert(session, table)
    added = {c.name: c + statement.excluded[c.name] for c in table.columns if c.name not in keys}
    await session.execute(statement.on_conflict_do_update(index_elements=keys, set_=added), rows)


async def insert_new(session: AsyncSession, table: Any, rows: list[dict[str, Any]]) -> None:
    """Inserts rows; one whose primary key exists stays as it is."""
    keys = [column.name for column in table.primary_key]
    await session.execute(_insert(session, table).on_conflict_do_nothing(index_elements=keys), rows)


def _insert(session: AsyncSession, table: Any) -> Any:
    """An insert of the dialect, which knows conflicts."""
    from sqlalchemy.dialects import postgresql, sqlite

    assert session.bind is not None, "sessions are made from a pool"
    return (sqlite if session.bind.dialect.name == "sqlite" else postgresql).insert(table)
