"""``firsttoken policies`` and ``firsttoken db``: versions of policies; the tables."""

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import click

from app.commands.operator_tools import config_option, json_option, print_records, with_storage
from app.config_file import load_settings
from app.errors import ConfigError

COLUMNS = ("name", "version", "is_active", "created", "note", "settings")


@click.group()
def policies() -> None:
    """Manage versions of policies in the database."""


@policies.command("list")
@click.argument("name", required=False)
@config_option
@json_option
def list_policies(name: str | None, config_file: Path | None, as_json: bool) -> None:
    """List all versions of NAME, or of all policies."""
    found = with_storage(config_file, lambda storage: storage.policies.list_versions(name))
    print_records(found, COLUMNS, as_json=as_json, title="policies")


@policies.command("put")
@click.argument("name")
@click.argument("file", type=click.File("rb"))
@click.option("--note", default="", help="What changed.")
@config_option
@json_option
def put_policy(name: str, file: Any, note: str, config_file: Path | None, as_json: bool) -> None:
    """Add a version of NAME from a TOML FILE with the keys of a `[policies.NAME]` table, and use it from now on."""
    try:
        settings = tomllib.loads(file.read().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{file.name}: not valid TOML: {error}") from None
    added = with_storage(config_file, lambda storage: storage.policies.put(name, settings, note))
    print_records([added], COLUMNS, as_json=as_json, title=f"policy {name}")


@policies.command("activate")
@click.argument("name")
@click.argument("version", type=click.IntRange(min=1))
@config_option
@json_option
def activate(name: str, version: int, config_file: Path | None, as_json: bool) -> None:
    """Use VERSION of NAME from now on."""
    found = with_storage(config_file, lambda storage: storage.policies.activate(name, version))
    print_records([found], COLUMNS, as_json=as_json, title=f"policy {name}")


@click.group()
def db() -> None:
    """Look after the database."""


@db.command("upgrade")
@config_option
def upgrade(config_file: Path | None) -> None:
    """Bring the tables up to date; `serve` does so by itself unless storage.migrate_at_start is false."""
    settings, _ = load_settings(config_file)
    if not settings.storage.enabled:
        raise ConfigError("storage.enabled is false, so there is no database")

    async def run() -> str:
        from app.storage.database import HEAD, Database

        database = Database(settings.storage)
        await database.open(migrate=True)
        await database.close()
        return f"{database.name}: tables at {HEAD}"

    click.echo(asyncio.run(run()))
