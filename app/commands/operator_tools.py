"""What the commands of operators share: the configuration, an open database, and how results are printed."""

import asyncio
import datetime
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

from app.commands.compact import plain
from app.config_file import load_settings
from app.errors import ConfigError, GatewayError

if TYPE_CHECKING:
    from app.storage.service import Storage

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
B = TypeVar("B", bound=msgspec.Struct)

_SPAN = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
PIPE_WIDTH = 200


class Span(click.ParamType[float]):
    """A time span such as ``90s``, ``15m``, ``24h`` or ``30d``; a number of seconds for the command."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        if isinstance(value, int | float):
            return float(value)
        found = _SPAN.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no time span such as 90s, 15m, 24h or 30d", param, ctx)
        return float(int(found[1]) * _SECONDS[found[2]])


def config_option(command: F) -> F:
    """``--config``, as ``config_file``."""
    text = "Configuration; default $FIRSTTOKEN_CONFIG."
    return click.option("--config", "config_file", type=click.Path(path_type=Path), help=text)(command)


def json_option(command: F) -> F:
    """``--json``, as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def with_storage(config_file: Path | None, action: "Callable[[Storage], Awaitable[T]]") -> T:
    """The result of ``action`` on the open database; errors end the command with one line."""
    settings, source = load_settings(config_file)

    async def run() -> T:
        from app.storage.service import opened

        async with opened(settings, source) as storage:
            return await action(storage)

    try:
        return asyncio.run(run())
    except ConfigError:
        raise
    except GatewayError as error:
        raise click.ClickException(str(error)) from error


def checked(values: dict[str, Any], kind: type[B]) -> B:
    """Options as the Struct that the service takes; what does not fit ends the command with one line."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise click.ClickException(str(error).replace(" - at `$.", ": --").replace("`", "")) from None


def print_records(records: Sequence[msgspec.Struct], columns: Sequence[str], *, as_json: bool, title: str) -> None:
    """A table with the columns, or all fields as JSON."""
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(list(records)), indent=2) + b"\n")
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for record in records:
        fields = msgspec.to_builtins(record)
        table.add_row(*(plain(shown(name, fields[name])) for name in columns))
    console = Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)


def shown(name: str, value: Any) -> str:
    """A value for the eye; times are Unix seconds."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("created", "expires", "revoked"):
        return datetime.datetime.fromtimestamp(value, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    if name == "budgets":
        return "; ".join(
            f"{entry['period']}: "
            + ", ".join(f"{n} {what}" for what, n in entry.items() if what != "period" and n is not None)
            for entry in value
        )
    if isinstance(value, list):
        return ", ".join(str(entry) for entry in value)
    return str(value)
