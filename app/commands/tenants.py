"""``firsttoken tenants``: who may use the gateway, with which limits and groups."""

from pathlib import Path
from typing import Any

import click

from app.commands.operator_tools import checked, config_option, json_option, print_records, with_storage
from app.storage.records import NewTenant, TenantChanges, TenantInfo

COLUMNS = (
    *("name", "source", "is_blocked", "groups", "policy", "max_input_tokens", "ttft_slo_ms", "recall_floor"),
    *("requests_per_minute", "max_parallel_requests", "tokens_per_day", "budgets"),
)
LIMITS = {
    "max_input_tokens": (int, "Most prompt tokens of one request; 0 is no limit."),
    "ttft_slo_ms": (float, "Objective for the time to the first token, in ms; 0 is none."),
    "recall_floor": (float, "Least measured recall of usable policies, 0 to 1; 0 is none."),
    "requests_per_minute": (int, "Requests in any 60 seconds; 0 is no limit."),
    "max_parallel_requests": (int, "Requests that run at the same time; 0 is no limit."),
}


def limit_options(command: Any) -> Any:
    """Options for every limit; 0 lifts one."""
    for name, (kind, text) in reversed(LIMITS.items()):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(command)
    command = click.option("--deny-unlabelled/--allow-unlabelled", default=None, help="Documents without acl.")(command)
    return click.option("--policy", help="Policy of requests that name none.")(command)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were used, with 0 as no limit."""
    used = {name: value for name, value in options.items() if value is not None}
    return {name: None if name in LIMITS and value == 0 else value for name, value in used.items()}


def show(info: TenantInfo, *, as_json: bool) -> None:
    """Prints one tenant."""
    print_records([info], COLUMNS, as_json=as_json, title=f"tenant {info.name}")


@click.group()
def tenants() -> None:
    """Manage tenants, their limits and their groups."""


@tenants.command("list")
@config_option
@json_option
def list_tenants(config_file: Path | None, as_json: bool) -> None:
    """List all tenants, those of the configuration file as well."""
    found = with_storage(config_file, lambda storage: storage.tenants.list_tenants())
    print_records(found, COLUMNS, as_json=as_json, title="tenants")


@tenants.command("show")
@click.argument("name")
@config_option
@json_option
def show_tenant(name: str, config_file: Path | None, as_json: bool) -> None:
    """Show one tenant."""
    show(with_storage(config_file, lambda storage: storage.tenants.get(name)), as_json=as_json)


@tenants.command("create")
@click.argument("name")
@click.option("--group", "groups", multiple=True, help="A group of the tenant; may be repeated.")
@limit_options
@config_option
@json_option
def create(name: str, groups: tuple[str, ...], config_file: Path | None, as_json: bool, **options: Any) -> None:
    """Create a tenant. Give it keys with `firsttoken keys create`."""
    new = checked({"name": name, "groups": list(groups), **given(options)}, NewTenant)
    show(with_storage(config_file, lambda storage: storage.tenants.create(new)), as_json=as_json)


@tenants.command("set")
@click.argument("name")
@click.option("--blocked/--unblocked", "is_blocked", default=None, help="A blocked tenant's keys are refused.")
@limit_options
@config_option
@json_option
def change(name: str, config_file: Path | None, as_json: bool, **options: Any) -> None:
    """Change limits of a tenant; those that are not named stay."""
    changes = checked(given(options), TenantChanges)
    show(with_storage(config_file, lambda storage: storage.tenants.change(name, changes)), as_json=as_json)


@tenants.command("delete")
@click.argument("name")
@config_option
@click.confirmation_option(prompt="Its keys stop working. Delete it?")
def delete(name: str, config_file: Path | None) -> None:
    """Delete a tenant with its keys, groups and budgets."""
    with_storage(config_file, lambda storage: storage.tenants.delete(name))
    click.echo(f"{name}: deleted")


@tenants.command("add-group")
@click.argument("name")
@click.argument("group")
@config_option
@json_option
def add_group(name: str, group: str, config_file: Path | None, as_json: bool) -> None:
    """Add GROUP to the groups of a tenant."""
    wanted = checked({"name": name, "groups": [group]}, NewTenant).groups[0]
    show(with_storage(config_file, lambda storage: storage.tenants.add_group(name, wanted)), as_json=as_json)


@tenants.command("remove-group")
@click.argument("name")
@click.argument("group")
@config_option
@json_option
def remove_group(name: str, group: str, config_file: Path | None, as_json: bool) -> None:
    """Remove GROUP from a tenant and from all its keys."""
    show(with_storage(config_file, lambda storage: storage.tenants.remove_group(name, group)), as_json=as_json)
