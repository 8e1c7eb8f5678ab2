"""``firsttoken models``: fetch models and list what is there."""

import contextlib
from collections.abc import Iterator

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.errors import ModelError
from engine.model_catalogue import CATALOGUE
from engine.model_download import ProgressCallback
from engine.model_store import ModelStore


@click.group()
def models() -> None:
    """Fetch models and list what is there."""


@models.command("pull")
@click.argument("names", metavar="[NAME]...", nargs=-1)
def pull_models(names: tuple[str, ...]) -> None:
    """Fetch models into the cache folder; without NAME the default language model and passage encoder.

    NAME is a name of the catalogue or a Hugging Face id (org/name, org/name/file.gguf).
    """
    console = Console()
    store = ModelStore()
    for name in names or tuple(name for name, model in CATALOGUE.items() if model.is_default):
        try:
            with _progress_bars(console) as progress:
                path = store.pull(name, progress)
        except ModelError as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"{name}: {path}")


@models.command("list")
def list_models() -> None:
    """List the models of the catalogue and whether they are on this machine."""
    store = ModelStore()
    table = Table(title=f"models in {store.cache}", title_justify="left")
    for column in ("name", "kind", "size", "from", "installed", "path"):
        table.add_column(column, overflow="fold", justify="right" if column == "size" else "left")
    for model in CATALOGUE.values():
        is_installed = store.is_installed(model)
        table.add_row(
            model.name,
            model.kind,
            f"{model.size / 1e6:.0f} MB",
            f"wheel {model.requirement}",
            "yes" if is_installed else "no",
            str(store.path_of(model)) if is_installed else "-",
        )
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no width to fit into, and broken paths are no use there
    console.print(table)
    click.echo("Any folder, .gguf file or Hugging Face id (org/name, org/name/file.gguf) can be served as well.")


@contextlib.contextmanager
def _progress_bars(console: Console) -> Iterator[ProgressCallback]:
    """A bar for each task that is reported, on the terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def update(task: str, done: int, total: int | None) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total)
                if not console.is_terminal:
                    click.echo(task)
            bars.update(tasks[task], completed=done, total=total)

        yield update
