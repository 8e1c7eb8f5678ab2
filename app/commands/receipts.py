"""``firsttoken receipts``: reduction records of all tenants, for operators."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from app.commands.operator_tools import config_option, json_option, print_records, with_storage
from app.errors import NotFoundError
from app.policies import Policy, PolicyBook

if TYPE_CHECKING:
    from app.receipts import Receipt
    from app.storage.receipts import StoredReceipt
    from app.storage.service import Storage

COLUMNS = ("id", "tenant", "created", "num_bytes")


@click.group()
def receipts() -> None:
    """List, show and replay reduction records."""


@receipts.command("list")
@click.option("--tenant", help="One tenant only.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@config_option
@json_option
def list_receipts(tenant: str | None, limit: int, config_file: Path | None, as_json: bool) -> None:
    """List the newest records, newest first."""
    found = with_storage(config_file, lambda storage: storage.receipts.list_receipts(tenant, limit))
    print_records(found, COLUMNS, as_json=as_json, title="receipts")


@receipts.command("show")
@click.argument("receipt_id")
@config_option
def show(receipt_id: str, config_file: Path | None) -> None:
    """Print the whole record as JSON, originals included."""
    stored = with_storage(config_file, lambda storage: _find(storage, receipt_id))
    sys.stdout.buffer.write(msgspec.json.format(stored.document, indent=2) + b"\n")


@receipts.command("replay")
@click.argument("receipt_id")
@config_option
def replay_receipt(receipt_id: str, config_file: Path | None) -> None:
    """Reduce the originals of a record again and print the messages that come out, as JSON.

    Exit status 1 says that they are not the bytes that were sent, and what differs.
    """
    from app.config_file import load_settings
    from app.local_compaction import LocalModels
    from app.replay import read_receipt, replay
    from reducer.errors import ReducerError

    settings, _ = load_settings(config_file)
    stored, policy = with_storage(config_file, lambda storage: _find_with_policy(storage, receipt_id))
    receipt: Receipt = read_receipt(stored.document)
    if policy is None:
        assert receipt.replay is not None, "read_receipt checks it"
        version = receipt.replay.policy_version
        raise click.ClickException(f"policy {receipt.policy!r} version {version} of this record is gone")
    assert receipt.replay is not None, "read_receipt checks it"
    models = LocalModels.load(settings)
    counter = models.counter(receipt.replay.template_kwargs, receipt.replay.unsent_tools)
    try:
        outcome = replay(receipt, stored.tenant, policy, counter, models.encoder, models.reranker)
    except ReducerError as error:
        raise click.ClickException(f"the originals can no longer be reduced: {error}") from error
    sys.stdout.buffer.write(outcome.again + b"\n")
    if not outcome.is_same:
        at = next((i for i, (a, b) in enumerate(zip(outcome.sent, outcome.again, strict=False)) if a != b), 0)
        degraded = f"; {', '.join(outcome.degraded)} fell back to a cheaper method then" if outcome.degraded else ""
        sent = outcome.sent[at : at + 60].decode("utf-8", "replace")
        raise click.ClickException(f"not the bytes that were sent, from byte {at} on: sent {sent!r}{degraded}")


async def _find(storage: "Storage", receipt_id: str) -> "StoredReceipt":
    stored = await storage.receipts.find(receipt_id)
    if stored is None:
        raise NotFoundError(f"There is no receipt {receipt_id!r} in the database.")
    return stored


async def _find_with_policy(storage: "Storage", receipt_id: str) -> "tuple[StoredReceipt, Policy | None]":
    from app.replay import read_receipt

    stored = await _find(storage, receipt_id)
    receipt = read_receipt(stored.document)
    assert receipt.replay is not None, "read_receipt checks it"
    version = receipt.replay.policy_version
    book: PolicyBook = storage.book
    if version is None:
        return stored, book.get(receipt.policy) if receipt.policy in book.file_names else None
    return stored, await storage.policies.find(receipt.policy, version)
