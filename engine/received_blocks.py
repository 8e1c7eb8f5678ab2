"""Blocks that have come from another engine and wait, outside the pool, until their sequence is scheduled.

While blocks are on the way nothing of the pool is taken for them. When they have come they lie here, by request; at
admission the sequence gets fresh blocks, and the step that computes its first tokens copies into them what lies here,
as it does for the second tier. One that is preempted before that step finds it again. So a sequence that waits cannot
keep blocks from one that runs, and one that ends leaves nothing behind but this entry, which ``forget`` drops.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from engine.block_hash import BlockHash, HashedBlock

BlockData = bytes | bytearray | memoryview
"""The bytes of one block, all layers together."""


class KVReceive(NamedTuple):
    """Content for a block of the KV cache."""

    block_id: int
    data: BlockData


@dataclass(frozen=True, slots=True)
class _Entry:
    blocks: Mapping[BlockHash, BlockData]
    num_bytes: int


class ReceivedBlocks:
    """Received blocks of waiting sequences, and those that the next step has to copy."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._receives: list[tuple[str, KVReceive]] = []
        self._taken: set[str] = set()
        """Requests whose blocks are copied by the step that is being executed."""

    @property
    def num_bytes(self) -> int:
        """Of all blocks that wait here."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def __len__(self) -> int:
        """Sequences whose blocks wait here."""
        return len(self._entries)

    def add(self, request_id: str, blocks: Mapping[BlockHash, BlockData]) -> None:
        """Keep what has come for a sequence."""
        assert request_id not in self._entries, f"blocks for {request_id} came twice"
        self._entries[request_id] = _Entry(blocks, sum(len(data) for data in blocks.values()))

    def match(self, request_id: str, hashed_blocks: SequenceOf[HashedBlock]) -> list[HashedBlock]:
        """The first of some blocks, as far as they are here without a gap."""
        entry = self._entries.get(request_id)
        found: list[HashedBlock] = []
        if entry is None:
            return found
        for hashed in hashed_blocks:
            if hashed.hash not in entry.blocks:
                break
            found.append(hashed)
        return found

    def receive(self, request_id: str, hashed: HashedBlock, block_id: int) -> None:
        """Copy one of them into a block in the next step."""
        self._receives.append((request_id, KVReceive(block_id, self._entries[request_id].blocks[hashed.hash])))

    def forget(self, request_id: str) -> None:
        """Drop what lies here for a sequence, if anything."""
        self._entries.pop(request_id, None)

    def cancel_receives(self, block_ids: Iterable[int]) -> None:
        """Blocks that were given back before the step need no content."""
        if self._receives:
            gone = set(block_ids)
            self._receives = [entry for entry in self._receives if entry[1].block_id not in gone]

    def take_receives(self) -> list[KVReceive]:
        """Copies of the next step; the caller executes them."""
        entries, self._receives = self._receives, []
        self._taken.update(request_id for request_id, _ in entries)
        return [receive for _, receive in entries]

    def end_step(self) -> None:
        """The copies that were taken have been made, or are not to be tried again."""
        for request_id in self._taken:
            self.forget(request_id)
        self._taken.clear()
