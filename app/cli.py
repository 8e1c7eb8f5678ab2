"""The command line ``firsttoken``. Each command's module is imported when it is called, so that help is instant."""

from collections.abc import Callable

import click

from app.errors import ConfigError


def _serve() -> click.Command:
    from app.commands.serve import serve

    return serve


def _compact() -> click.Command:
    from app.commands.compact import compact

    return compact


def _config() -> click.Command:
    from app.commands.config import config

    return config


def _models() -> click.Command:
    from app.commands.models import models

    return models


def _eval() -> click.Command:
    from eval.cli import eval_group

    return eval_group


def _plan() -> click.Command:
    from app.commands.plan import plan

    return plan


def _tenants() -> click.Command:
    from app.commands.tenants import tenants

    return tenants


def _keys() -> click.Command:
    from app.commands.keys import keys

    return keys


def _budgets() -> click.Command:
    from app.commands.budgets import budgets

    return budgets


def _usage() -> click.Command:
    from app.commands.budgets import usage

    return usage


def _policies() -> click.Command:
    from app.commands.policies import policies

    return policies


def _receipts() -> click.Command:
    from app.commands.receipts import receipts

    return receipts


def _db() -> click.Command:
    from app.commands.policies import db

    return db


COMMANDS: dict[str, tuple[Callable[[], click.Command], str]] = {
    "serve": (_serve, "Start the gateway on the embedded engine."),
    "compact": (_compact, "Show what a request would send to the model."),
    "config": (_config, "Check and show the configuration."),
    "models": (_models, "Fetch models and list what is there."),
    "plan": (_plan, "Say whether separate engines for prefill and decode pay."),
    "tenants": (_tenants, "Manage tenants, their limits and groups."),
    "keys": (_keys, "Make, rotate and revoke API keys."),
    "budgets": (_budgets, "Limit what tenants use in a period."),
    "usage": (_usage, "Show what tenants used by day."),
    "policies": (_policies, "Manage versions of policies."),
    "receipts": (_receipts, "List, show and replay reduction records."),
    "db": (_db, "Look after the database."),
    "eval": (_eval, "Measure what a reduction does to answers."),
}


class LateGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of ``COMMANDS``."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or ``None`` for an unknown name."""
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else entry[0]()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Keeps the name that the user typed, whatever the command's module calls it."""
        name, command, rest = super().resolve_command(ctx, args)
        return (args[0] if command is not None else name), command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Settings that cannot be used end any command with one line."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=LateGroup)
@click.version_option(package_name="firsttoken", prog_name="firsttoken")
def main() -> None:
    """Makes RAG prompts as small as their answers allow and gets the first token out fast."""


if __name__ == "__main__":
    main(prog_name="firsttoken")
