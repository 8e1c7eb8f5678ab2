"""The database: tenants, groups, keys, budgets, policies, usage; on SQLite, and on PostgreSQL where it is installed."""

import asyncio
import datetime
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from factories_app import ACME_KEY
from factories_storage import digest_of, make_storage_settings, postgres_programs, running_postgres
from sqlalchemy import inspect, text

from app.auth import Authenticator, Principal
from app.errors import ConfigError, ConflictError, InvalidRequestError, NotFoundError
from app.operator_settings import BudgetSettings, StorageSettings
from app.policies import PolicyBook
from app.settings import PolicySettings
from app.storage.database import HEAD, KNOWN, MIGRATIONS, Database
from app.storage.models import PlainBase
from app.storage.records import NewKey, NewTenant, Rotation, TenantChanges
from app.storage.service import Storage


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    if postgres_programs() is None:
        pytest.skip("PostgreSQL is not installed")
    with running_postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage]:
    url = ""
    if request.param == "postgres":
        url = request.getfixturevalue("postgres")
        await empty(url)
    opened = Storage(make_storage_settings(tmp_path, url=url), source="firsttoken.toml")
    await opened.open()
    yield opened
    await opened.close()


async def empty(url: str) -> None:
    """Removes the tables of the test before."""
    database = Database(StorageSettings(url=url))
    await database.open(migrate=True)
    async with database.engine.begin() as connection:
        await connection.execute(text("DROP SCHEMA public CASCADE"))
        await connection.execute(text("CREATE SCHEMA public"))
    await database.close()


async def test_a_tenant_is_created_changed_listed_and_deleted(storage: Storage) -> None:
    created = await storage.tenants.create(NewTenant(name="initech", groups=["staff"], requests_per_minute=60))
    assert (created.source, created.groups, created.requests_per_minute) == ("database", ["staff"], 60)
    changed = await storage.tenants.change("initech", TenantChanges(requests_per_minute=None, max_input_tokens=512))
    assert (changed.requests_per_minute, changed.max_input_tokens, changed.policy) == (None, 512, "default")
    listed = {info.name: info.source for info in await storage.tenants.list_tenants()}
    assert listed == {"acme": "file", "globex": "file", "initech": "database"}
    issued = await storage.keys.create("initech", NewKey(name="backend", groups=["staff"]))
    await storage.tenants.delete("initech")
    with pytest.raises(NotFoundError):
        await storage.tenants.get("initech")
    assert await storage.keys.find_principal(digest_of(issued.key)) is None


async def test_a_name_is_taken_once_also_by_the_file(storage: Storage) -> None:
    await storage.tenants.create(NewTenant(name="initech"))
    with pytest.raises(ConflictError):
        await storage.tenants.create(NewTenant(name="initech"))
    with pytest.raises(ConflictError, match=r"tenants\.acme is a tenant of firsttoken\.toml"):
        await storage.tenants.create(NewTenant(name="acme"))
    with pytest.raises(InvalidRequestError, match=r"tenants\.acme is a tenant of firsttoken\.toml; change it there"):
        await storage.tenants.change("acme", TenantChanges(max_input_tokens=1))


async def test_a_key_is_shown_once_and_kept_as_a_digest(storage: Storage) -> None:
    await storage.tenants.create(NewTenant(name="initech", groups=["staff", "board"], max_input_tokens=99))
    issued = await storage.keys.create("initech", NewKey(name="backend", groups=["staff"]))
    principal = await storage.keys.find_principal(digest_of(issued.key))
    assert principal is not None
    assert (principal.tenant_id, principal.key_name, principal.groups) == ("initech", "backend", frozenset({"staff"}))
    assert principal.tenant.max_input_tokens == 99
    assert issued.key not in str(await storage.keys.list_keys("initech"))
    async with storage.database.session() as session:
        kept = str((await session.execute(text("SELECT * FROM api_keys"))).all())
    assert issued.key not in kept
    assert digest_of(issued.key) in kept


async def test_a_group_that_the_tenant_lacks_is_named(storage: Storage) -> None:
    await storage.tenants.create(NewTenant(name="initech", groups=["staff"]))
    with pytest.raises(InvalidRequestError, match="no group 'board'; it has staff"):
        await storage.keys.create("initech", NewKey(name="backend", groups=["board"]))


async def test_a_removed_group_is_gone_from_its_keys(storage: Storage) -> None:
    await storage.tenants.create(NewTenant(name="initech", groups=["staff", "board"]))
    issued = await storage.keys.create("initech", NewKey(name="backend", groups=["staff", "board"]))
    await storage.tenants.remove_group("initech", "board")
    principal = await storage.keys.find_principal(digest_of(issued.key))
    assert principal is not None
    assert principal.groups == frozenset({"staff"})


async def test_a_rotated_key_lives_as_long_as_the_old_one_was_made_to(storage: Storage) -> None:
    await storage.tenants.create(NewTenant(name="initech"))
    first = await storage.keys.create("initech", NewKey(name="backend", expires_in_s=90 * 86400))
    for _ in range(2):
        first = await storage.keys.rotate("initech", "backend", Rotation(overlap_s=0))
        assert first.info.expires is not None
        assert abs(first.info.expires - first.info.created - 90 * 86400) <= 1
    other = await storage.keys.rotate("initech", "backend", Rotation(expires_in_s=3600))
    assert other.info.expires is not None
    assert abs(other.info.expires - other.info.created - 3600) <= 1


async def test_a_rotated_key_works_until_the_overlap_ends(storage: Storage) -> None:
    await storage.tenants.create(NewTenant(name="initech", groups=["staff"]))
    old = await storage.keys.create("initech", NewKey(name="backend", groups=["staff"]))
    new = await storage.keys.rotate("initech", "backend", Rotation(overlap_s=3600))
    for key in (old.key, new.key):
        principal = await storage.keys.find_principal(digest_of(key))
        assert principal is not None
        assert principal.groups == frozenset({"staff"})
    newest = await storage.keys.rotate("initech", "backend", Rotation(overlap_s=0))
    assert await storage.keys.find_principal(digest_of(new.key)) is None
    assert await storage.keys.find_principal(digest_of(newest.key)) is not None
    assert [info.status for info in await storage.keys.list_keys("initech")] == ["active", "expired", "active"]


async def test_expired_and_revoked_keys_and_keys_of_blocked_tenants_do_not_work(storage: Storage) -> None:
    await storage.tenants.create(NewTenant(name="initech"))
    short = await storage.keys.create("initech", NewKey(name="short", expires_in_s=0.001))
    revoked = await storage.keys.create("initech", NewKey(name="revoked"))
    blocked = await storage.keys.create("initech", NewKey(name="blocked"))
    await asyncio.sleep(0.01)
    await storage.keys.revoke("initech", "revoked")
    for issued in (short, revoked):
        assert await storage.keys.find_principal(digest_of(issued.key)) is None
    assert await storage.keys.find_principal(digest_of(blocked.key)) is not None
    await storage.tenants.change("initech", TenantChanges(is_blocked=True))
    assert await storage.keys.find_principal(digest_of(blocked.key)) is None


async def test_a_tenant_made_anew_does_not_get_the_salt_of_the_one_before(storage: Storage) -> None:
    salts = []
    for _ in range(2):
        await storage.tenants.create(NewTenant(name="initech"))
        issued = await storage.keys.create("initech", NewKey(name="backend"))
        principal = await storage.keys.find_principal(digest_of(issued.key))
        assert principal is not None
        salts.append(principal.cache_salt)
        await storage.tenants.delete("initech")
    assert salts[0] != salts[1]


async def test_budgets_are_set_by_period_and_become_limits(storage: Storage) -> None:
    await storage.tenants.create(NewTenant(name="initech"))
    await storage.tenants.set_budget("initech", BudgetSettings(period="day", tokens=5))
    await storage.tenants.set_budget("initech", BudgetSettings(period="day", input_tokens=1000, output_tokens=50))
    info = await storage.tenants.set_budget("initech", BudgetSettings(period="month", tokens=9999))
    assert [(b.period, b.input_tokens, b.tokens) for b in info.budgets] == [("day", 1000, None), ("month", None, 9999)]
    issued = await storage.keys.create("initech", NewKey(name="backend"))
    principal = await storage.keys.find_principal(digest_of(issued.key))
    assert principal is not None
    assert [(limit.period, limit.output_tokens) for limit in principal.limits.periods] == [("day", 50), ("month", None)]
    info = await storage.tenants.remove_budget("initech", "day")
    assert [budget.period for budget in info.budgets] == ["month"]
    with pytest.raises(NotFoundError):
        await storage.tenants.remove_budget("initech", "day")


async def test_each_change_of_a_policy_is_a_version_and_an_older_one_can_be_taken_up_again(storage: Storage) -> None:
    await storage.policies.put("lean", {"max_input_tokens": 512})
    second = await storage.policies.put("lean", {"max_input_tokens": 256, "reducer": {"selection": {"top_k": 3}}})
    assert second.version == 2
    active = storage.book.get("lean")
    assert active is not None
    assert (active.version, active.settings.max_input_tokens, active.reducer.selection.top_k) == (2, 256, 3)
    await storage.policies.activate("lean", 1)
    active = storage.book.get("lean")
    assert active is not None
    assert (active.version, active.settings.max_input_tokens) == (1, 512)
    assert [(entry.version, entry.is_active) for entry in await storage.policies.list_versions("lean")] == [
        (1, True),
        (2, False),
    ]
    with pytest.raises(InvalidRequestError, match=r"policies\.lean\.reducer"):
        await storage.policies.put("lean", {"reducer": {"selection": {"topk": 3}}})
    with pytest.raises(ConflictError):
        await storage.policies.put("default", {})


async def test_a_recall_floor_holds_for_the_policy_and_for_its_later_versions(storage: Storage) -> None:
    await storage.policies.put("lean", {"measured_recall": 0.97})
    await storage.tenants.create(NewTenant(name="initech", policy="lean", recall_floor=0.95))
    with pytest.raises(InvalidRequestError, match=r"recall floor is 0\.98.* is 0\.97"):
        await storage.tenants.change("initech", TenantChanges(recall_floor=0.98))
    with pytest.raises(InvalidRequestError, match="not known"):
        await storage.tenants.change("initech", TenantChanges(policy="default"))
    with pytest.raises(InvalidRequestError, match=r"floor of 0\.95; .* is 0\.9"):
        await storage.policies.put("lean", {"measured_recall": 0.9})


def principal_of_file() -> Principal:
    from factories_app import make_settings

    return Authenticator(make_settings()).authenticate(f"Bearer {ACME_KEY}")


async def test_usage_of_a_day_adds_up_also_from_two_processes(storage: Storage) -> None:
    other = Storage(storage._config.settings, source="firsttoken.toml")
    await other.open()
    principal = principal_of_file()
    for process in (storage, other):
        for _ in range(3):
            process.usage.on_settled(principal, 100, 10)
        process.usage.on_compaction(principal, 900, 800)
    await asyncio.gather(storage.usage.flush(), other.usage.flush())
    storage.usage.on_settled(principal, 1, 1)
    await storage.usage.flush()
    (row,) = await storage.usage.list_days()
    assert (row.tenant, row.key, row.requests, row.input_tokens, row.output_tokens, row.saved_tokens) == (
        *("acme", "demo", 7),
        *(601, 61, 1600),
    )
    today = datetime.datetime.now(datetime.UTC).date()
    assert await storage.usage.list_days("globex") == []
    assert await storage.usage.list_days(since=today + datetime.timedelta(days=1)) == []
    spent = await other.usage.spent_since("acme", "month", 0.0)
    assert (spent.requests, spent.input_tokens, spent.output_tokens) == (7, 601, 61)
    await other.close()


async def test_gateways_that_start_at_once_make_the_tables_once(tmp_path: Path, postgres: str) -> None:
    await empty(postgres)
    for url in ("", postgres):
        databases = [Database(StorageSettings(url=url, data_folder=str(tmp_path))) for _ in range(4)]
        await asyncio.gather(*(database.open() for database in databases))
        assert [await database.revision() for database in databases] == [HEAD] * 4
        for database in databases:
            await database.close()


async def test_many_connections_to_a_new_file_wait_for_each_other(tmp_path: Path) -> None:
    for turn in range(10):
        settings = StorageSettings(data_folder=str(tmp_path / str(turn)))
        databases = [Database(settings) for _ in range(6)]
        await asyncio.gather(*(database.open() for database in databases))
        for database in databases:
            await database.close()


async def test_the_migrations_make_the_tables_of_the_models(storage: Storage) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    def differences(connection: object) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": False})  # type: ignore[arg-type]
        return list(compare_metadata(context, PlainBase.metadata))

    async with storage.database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []


async def test_tables_that_may_not_be_changed_at_the_start_are_a_clear_error(tmp_path: Path) -> None:
    database = Database(StorageSettings(data_folder=str(tmp_path), migrate_at_start=False))
    with pytest.raises(ConfigError, match=f"tables at None, {HEAD} is needed; run `firsttoken db upgrade`"):
        await database.open()
    await database.open(migrate=True)
    await database.close()
    await database.open()
    async with database.engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await database.close()
    with pytest.raises(ConfigError, match="newer version of firsttoken"):
        await database.open(migrate=True)


async def test_the_file_is_its_owners_and_holds_the_tables(tmp_path: Path) -> None:
    storage = Storage(make_storage_settings(tmp_path / "data"))
    await storage.open()
    assert stat.S_IMODE((tmp_path / "data" / "firsttoken.db").stat().st_mode) == 0o600
    async with storage.database.engine.connect() as connection:
        tables = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    assert {"tenants", "api_keys", "budgets", "policies", "usage_days", "receipts"} <= set(tables)
    await storage.close()


async def test_a_tenant_of_the_file_and_of_the_database_is_refused_with_its_path(tmp_path: Path) -> None:
    storage = Storage(make_storage_settings(tmp_path, tenants={}))
    await storage.open()
    await storage.tenants.create(NewTenant(name="acme"))
    await storage.policies.put("tight", {})
    await storage.close()
    with pytest.raises(ConfigError, match=r"tenants\.acme is in firsttoken\.toml and in the database"):
        await Storage(make_storage_settings(tmp_path), source="firsttoken.toml").open()
    clash = make_storage_settings(tmp_path, tenants={}, policies={"tight": PolicySettings()})
    with pytest.raises(ConfigError, match=r"policies\.tight is in firsttoken\.toml and in the database"):
        await Storage(clash, source="firsttoken.toml").open()


async def test_an_address_that_cannot_be_opened_is_told_without_its_password() -> None:
    database = Database(StorageSettings(url="postgresql://someone:secret@127.0.0.1:1/none"))
    with pytest.raises(ConfigError, match="cannot be opened") as caught:
        await database.open()
    assert "secret" not in str(caught.value)


def test_the_head_of_the_migrations_is_the_revision_that_is_needed() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_heads() == [HEAD]
    assert sorted(script.revision for script in scripts.walk_revisions()) == sorted(KNOWN)


def test_a_policy_of_the_file_goes_before_one_of_the_database() -> None:
    from factories_app import make_settings

    book = PolicyBook(make_settings(policies={"tight": PolicySettings(max_input_tokens=1)}))
    assert book.names == ("default", "tight")
    policy = book.get("tight")
    assert policy is not None
    assert (policy.version, policy.settings.max_input_tokens) == (None, 1)
