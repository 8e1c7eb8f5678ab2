"""``firsttoken config``: whether the configuration can be used, what is in effect, and what its keys mean."""

import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from app.config_file import read_config
from app.settings import Settings

FILE = click.argument("file", required=False, type=click.Path(path_type=Path))


@click.group()
def config() -> None:
    """Check and show the configuration."""


@config.command("check")
@FILE
def check(file: Path | None) -> None:
    """Check FILE, else the file that `serve` would read. Exit status 1 names what is wrong and where."""
    found = read_config(file)
    settings = found.settings
    click.echo(f"{found.source}: ok")
    click.echo(f"  address   {settings.server.host}:{settings.server.port}")
    backend = settings.backend
    model = backend.model if backend.kind == "openai" else settings.engine.model.model
    click.echo(f"  model     {model} as {settings.server.served_model_name!r}")
    if backend.kind == "openai":
        click.echo(f"  replicas  {', '.join(replica.url for replica in backend.replicas)}")
    click.echo(f"  encoder   {settings.encoder.model if settings.encoder.enabled else 'off'}")
    click.echo(f"  policies  {', '.join(settings.policy_names)}")
    click.echo(f"  tenants   {', '.join(sorted(settings.tenants)) or 'none: every request will be refused'}")
    for variable in missing_variables(settings):
        click.echo(f"  warning   backend.replicas: {variable} is not set here; `serve` needs it")


@config.command("show")
@FILE
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, with whether a reload applies each key.")
@click.option("--changed", is_flag=True, help="Only what file and environment set.")
def show(file: Path | None, as_json: bool, changed: bool) -> None:
    """Show what is in effect with FILE and the environment, and where each value comes from. Secrets are masked."""
    from app.config_view import config_values

    found = read_config(file)
    values = [value for value in config_values(found) if not changed or value.origin != "default"]
    if as_json:
        print_json(msgspec.to_builtins(values))
        return
    click.echo(f"# {found.source}, sha256 {found.digest}")
    lines = [(f"{value.key} = {shown(value.value)}", value.origin) for value in values]
    width = min(60, max((len(line) for line, _ in lines), default=0))
    for line, origin in lines:
        click.echo(f"{line:<{width}}  # {origin}")


@config.command("schema")
def schema() -> None:
    """Print the JSON Schema of the configuration file, for editors that complete and check TOML."""
    from app.config_schema import config_schema

    print_json(config_schema())


def print_json(value: Any) -> None:
    """Indented JSON on standard output."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def shown(value: Any) -> str:
    """A value as TOML writes it; ``none`` where there is none, for which TOML has no word."""
    return "none" if value is None else msgspec.json.encode(value).decode()


def missing_variables(settings: Settings) -> list[str]:
    """Variables with the keys of replicas that are not set in this environment."""
    if settings.backend.kind != "openai":
        return []
    named = {replica.api_key_env for replica in settings.backend.replicas if replica.api_key_env is not None}
    return sorted(name for name in named if not os.environ.get(name, "").strip())
