"""What the bench of compacted histories writes down, and its table."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from eval.intervals import Estimate, PairedDifference
from eval.manifest import Manifest

BUDGET = 0.3
OURS = "firsttoken"
ARMS = (OURS, "last turns", "bm25 turns", "one selection", "oracle turns")
ASKED_ARMS = (OURS, "bm25 turns", "minilm turns", "bm25 + minilm turns")
NUM_COMPACTIONS = 6


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One arm on one set at one budget."""

    arm: str
    budget: float
    answered: Estimate
    """Share of the probes, mean over the cases."""
    answered_of_all: float
    """Share of all probes of the set."""
    tokens_kept: float


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Each probe asked as the question of a request."""

    arm: str
    budget: float
    answered: Estimate
    """Share of the asked probes, mean over the probes."""
    ours_minus: PairedDifference | None = None
    """Ours minus this arm, by the same probes."""


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """The record while a conversation grows turn by turn at a fixed budget, means over conversations."""

    num_conversations: int
    num_turns: float
    num_appended: float
    """Turns after which the record was the one before and more."""
    num_rewritten: float
    """Turns after which it was another one."""


class Compactions(msgspec.Struct, frozen=True, kw_only=True):
    """Six compactions, each of the messages that the one before sent and the turns since."""

    num_conversations: int
    num_facts: int
    """Facts that the ledger pins."""
    num_lost: int
    num_reported: int
    """Conversations where the reducer said that facts had no room."""


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """One data set."""

    name: str
    sha256: str
    num_cases: int
    num_probes: int
    cells: list[Cell]
    versus_best: list[tuple[float, str, PairedDifference]]
    """Budget, best baseline, ours minus it."""
    num_asked: int
    """Probes that were asked."""
    asked: list[Asked]
    unrelated: Estimate
    """Share of the probes, mean over the cases, where the question has nothing to do with the conversation."""
    growth: Growth
    compactions: Compactions
    ms_median: float
    """Time of one compaction with nothing cached."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    manifest: Manifest
    sets: list[SetResult]


def print_result(console: Console, result: Result, budgets: Sequence[float]) -> None:
    """One table: probes answered in % by arm, set and budget."""
    table = Table(title="probes answered in %, at " + " / ".join(f"{budget:.0%}" for budget in budgets))
    table.add_column("arm")
    for item in result.sets:
        table.add_column(f"{item.name}\n({item.num_cases} cases, {item.num_probes} probes)")
    for arm in ARMS:
        table.add_row(arm, *(_row(item, arm) for item in result.sets))
    table.add_section()
    table.add_row(
        f"{OURS}, unrelated question, {BUDGET:.0%}", *(f"{100 * item.unrelated.mean:.1f}" for item in result.sets)
    )
    for arm in ASKED_ARMS:
        table.add_row(
            f"{arm}, probe asked, {BUDGET:.0%}",
            *(
                " / ".join(
                    f"{100 * cell.answered.mean:.1f} of {item.num_asked}" for cell in item.asked if cell.arm == arm
                )
                for item in result.sets
            ),
        )
    console.print(table)
    for item in result.sets:
        growth, lost = item.growth, item.compactions
        console.print(
            f"{item.name}: {growth.num_turns:.0f} turns append {growth.num_appended:.1f} times and rewrite "
            f"{growth.num_rewritten:.1f} times; after {NUM_COMPACTIONS} compactions {lost.num_lost} of {lost.num_facts}"
            f" facts are lost, {lost.num_reported} of {lost.num_conversations} conversations say so; "
            f"{item.ms_median:.0f} ms a compaction"
        )


def _row(item: SetResult, arm: str) -> str:
    cells = [cell for cell in item.cells if cell.arm == arm]
    return " / ".join(f"{100 * cell.answered.mean:.1f} at {100 * cell.tokens_kept:.0f}" for cell in cells)
