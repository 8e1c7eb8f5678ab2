"""``firsttoken keys``: API keys of the tenants in the database."""

import sys
from pathlib import Path

import click
import msgspec

from app.commands.operator_tools import Span, checked, config_option, json_option, print_records, with_storage
from app.storage.records import DEFAULT_OVERLAP_S, IssuedKey, NewKey, Rotation

COLUMNS = ("id", "name", "hint", "groups", "status", "created", "expires", "revoked")


def show_issued(issued: IssuedKey, *, as_json: bool) -> None:
    """Prints a new key, the only time that it is shown: the key alone on standard output, the rest beside it."""
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(issued), indent=2) + b"\n")
        return
    click.echo(f"key {issued.info.name!r} of {issued.info.tenant!r}, id {issued.info.id}; not shown again:", err=True)
    click.echo(issued.key)


@click.group()
def keys() -> None:
    """Make, rotate and revoke API keys."""


@keys.command("list")
@click.argument("tenant")
@config_option
@json_option
def list_keys(tenant: str, config_file: Path | None, as_json: bool) -> None:
    """List the keys of TENANT, those that ended as well."""
    found = with_storage(config_file, lambda storage: storage.keys.list_keys(tenant))
    print_records(found, COLUMNS, as_json=as_json, title=f"keys of {tenant}")


@keys.command("create")
@click.argument("tenant")
@click.argument("name")
@click.option("--group", "groups", multiple=True, help="A group whose documents the holder may read; repeatable.")
@click.option("--expires-in", type=Span(), help="E.g. 24h or 90d; without it the key does not expire.")
@config_option
@json_option
def create(
    tenant: str, name: str, groups: tuple[str, ...], expires_in: float | None, config_file: Path | None, as_json: bool
) -> None:
    """Make a key called NAME for TENANT and print it, once."""
    new = checked({"name": name, "groups": list(groups), "expires_in_s": expires_in}, NewKey)
    show_issued(with_storage(config_file, lambda storage: storage.keys.create(tenant, new)), as_json=as_json)


@keys.command("rotate")
@click.argument("tenant")
@click.argument("key")
@click.option("--overlap", type=Span(), default=DEFAULT_OVERLAP_S, show_default="24h", help="The old key works on.")
@click.option("--expires-in", type=Span(), help="Of the new key; without it, as long as the old one was made for.")
@config_option
@json_option
def rotate(
    tenant: str, key: str, overlap: float, expires_in: float | None, config_file: Path | None, as_json: bool
) -> None:
    """Make a new key in place of KEY (name or id), which works until the overlap ends."""
    rotation = checked({"overlap_s": overlap, "expires_in_s": expires_in}, Rotation)
    show_issued(with_storage(config_file, lambda storage: storage.keys.rotate(tenant, key, rotation)), as_json=as_json)


@keys.command("revoke")
@click.argument("tenant")
@click.argument("key")
@config_option
@json_option
def revoke(tenant: str, key: str, config_file: Path | None, as_json: bool) -> None:
    """End KEY (an id, or all keys of a name). Running gateways refuse it within `storage.key_cache_s`."""
    ended = with_storage(config_file, lambda storage: storage.keys.revoke(tenant, key))
    print_records(ended, COLUMNS, as_json=as_json, title=f"keys of {tenant}")
