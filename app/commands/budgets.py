"""``firsttoken budgets`` and ``firsttoken usage``: what tenants may use by period, and what they used by day."""

from pathlib import Path
from typing import Any

import click

from app.commands.operator_tools import checked, config_option, json_option, print_records, with_storage
from app.commands.tenants import COLUMNS, show
from app.counters.periods import PERIODS, Period
from app.operator_settings import BudgetSettings

USAGE_COLUMNS = (
    *("day", "tenant", "key", "requests", "input_tokens", "output_tokens", "cached_tokens"),
    *("original_tokens", "saved_tokens"),
)
AMOUNTS = ("requests", "input_tokens", "output_tokens", "tokens")


@click.group()
def budgets() -> None:
    """Limit what tenants use in a minute, an hour, a day or a month (UTC)."""


@budgets.command("list")
@config_option
@json_option
def list_budgets(config_file: Path | None, as_json: bool) -> None:
    """List the tenants that have budgets."""
    found = with_storage(config_file, lambda storage: storage.tenants.list_tenants())
    limited = [info for info in found if info.budgets or info.tokens_per_day is not None]
    print_records(limited, COLUMNS, as_json=as_json, title="budgets")


@budgets.command("set")
@click.argument("tenant")
@click.argument("period", type=click.Choice(PERIODS))
@click.option("--requests", type=int, help="Requests in the period.")
@click.option("--input-tokens", type=int, help="Tokens of compacted prompts.")
@click.option("--output-tokens", type=int, help="Tokens of answers.")
@click.option("--tokens", type=int, help="Both together.")
@config_option
@json_option
def set_budget(tenant: str, period: Period, config_file: Path | None, as_json: bool, **amounts: Any) -> None:
    """Set the budget of TENANT for PERIOD, in place of the one before."""
    values = {name: amounts[name] for name in AMOUNTS if amounts[name] is not None}
    budget = checked({"period": period, **values}, BudgetSettings)
    show(with_storage(config_file, lambda storage: storage.tenants.set_budget(tenant, budget)), as_json=as_json)


@budgets.command("remove")
@click.argument("tenant")
@click.argument("period", type=click.Choice(PERIODS))
@config_option
@json_option
def remove_budget(tenant: str, period: Period, config_file: Path | None, as_json: bool) -> None:
    """Lift the budget of TENANT for PERIOD."""
    show(with_storage(config_file, lambda storage: storage.tenants.remove_budget(tenant, period)), as_json=as_json)


@click.command()
@click.option("--tenant", help="One tenant only.")
@click.option("--since", type=click.DateTime(["%Y-%m-%d"]), help="First day, e.g. 2026-03-01.")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), help="Last day.")
@config_option
@json_option
def usage(tenant: str | None, since: Any, until: Any, config_file: Path | None, as_json: bool) -> None:
    """Show what was used by day, tenant and key (UTC)."""
    first, last = (None if moment is None else moment.date() for moment in (since, until))
    found = with_storage(config_file, lambda storage: storage.usage.list_days(tenant, first, last))
    print_records(found, USAGE_COLUMNS, as_json=as_json, title="usage")
