"""``firsttoken config``: whether the configuration can be used."""

from pathlib import Path

import click

from app.config_file import load_settings


@click.group()
def config() -> None:
    """Check the configuration."""


@config.command("check")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def check(file: Path | None) -> None:
    """Check FILE, else the file that `serve` would read. Exit status 1 names what is wrong and where."""
    settings, source = load_settings(file)
    click.echo(f"{source}: ok")
    click.echo(f"  address   {settings.server.host}:{settings.server.port}")
    backend = settings.backend
    model = backend.model if backend.kind == "openai" else settings.engine.model.model
    click.echo(f"  model     {model} as {settings.server.served_model_name!r}")
    if backend.kind == "openai":
        click.echo(f"  replicas  {', '.join(replica.url for replica in backend.replicas)}")
    click.echo(f"  encoder   {settings.encoder.model if settings.encoder.enabled else 'off'}")
    click.echo(f"  policies  {', '.join(settings.policy_names)}")
    click.echo(f"  tenants   {', '.join(sorted(settings.tenants)) or 'none: every request will be refused'}")
