"""Which evicted blocks are kept outside the block pool, and which copies the next step has to make for it.

A block that the pool evicts moves to a slot of the second tier (memory of the host, or a mapped file) under the very
hash it had, salts included; a later prompt that finds its prefix there gets fresh blocks, into which the slots are
copied back. This module only keeps the books, as ``BlockPool`` does; the copies travel in ``SchedulerOutput`` and are
made by ``engine.second_tier_memory`` before the step computes anything, all stores before all loads::

    schedule   pool evicts block 7 (hash h) for a new sequence     store  7 -> slot 3
               a prompt misses h2 in the pool, finds it in slot 1   load   slot 1 -> block 9
    execute    stores, then loads, then the forward pass may write into blocks 7 and 9

A slot that is loaded in a step is pinned until the step is over, so that no store of the same step overwrites it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.block_hash import BlockHash, HashedBlock


class KVTransfer(NamedTuple):
    """A copy between a block of the KV cache and a slot of the second tier."""

    block_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class _Entry:
    slot: int
    content: HashedBlock


class SecondTier:
    """A fixed number of slots in LRU order, found by hash and compared by content."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots
        self._entries: OrderedDict[BlockHash, _Entry] = OrderedDict()
        """Least recently used first."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._pinned: set[BlockHash] = set()
        self._stores: list[KVTransfer] = []
        self._loads: list[KVTransfer] = []

    @property
    def num_used_slots(self) -> int:
        """Slots that hold a block, or will after the next step."""
        return len(self._entries)

    def holds(self, content: HashedBlock) -> bool:
        """Whether exactly this content is kept."""
        entry = self._entries.get(content.hash)
        return entry is not None and entry.content == content

    def store(self, block_id: int, content: HashedBlock) -> None:
        """Keep a block that is about to be handed out for something else; the least recently used one makes room.

        Nothing happens where the content is kept already, or where every slot is needed in this step.
        """
        if content.hash in self._entries:
            self._entries.move_to_end(content.hash)
            return
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return
        self._entries[content.hash] = _Entry(slot, content)
        self._stores.append(KVTransfer(block_id, slot))

    def pin(self, contents: Iterable[HashedBlock]) -> None:
        """Keep some entries until the step is over, as they are about to be loaded."""
        for content in contents:
            self._entries.move_to_end(content.hash)
            self._pinned.add(content.hash)

    def load(self, content: HashedBlock, block_id: int) -> None:
        """Copy a pinned entry into a block in the next step."""
        assert content.hash in self._pinned, f"block {block_id} is loaded from a slot that is not pinned"
        self._loads.append(KVTransfer(block_id, self._entries[content.hash].slot))

    def cancel_loads(self, block_ids: Iterable[int]) -> None:
        """Blocks that were given back before the step need no content."""
        gone = set(block_ids)
        self._loads = [load for load in self._loads if load.block_id not in gone]

    def take_transfers(self) -> tuple[list[KVTransfer], list[KVTransfer]]:
        """Stores and loads of the next step; the caller executes them."""
        transfers = self._stores, self._loads
        self._stores, self._loads = [], []
        return transfers

    def end_step(self) -> None:
        """The transfers that were taken are done."""
        self._pinned.clear()

    def fail_step(self, transfers: Iterable[KVTransfer]) -> None:
        """It is not known which of these were done: forget the entries, so that nothing tries the same again."""
        self._pinned.clear()
        slots = {transfer.slot for transfer in transfers}
        self.forget([content_hash for content_hash, entry in self._entries.items() if entry.slot in slots])

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Drop entries; hashes that are not kept are ignored."""
        for content_hash in hashes:
            entry = self._entries.pop(content_hash, None)
            if entry is not None:
                self._free.append(entry.slot)
                self._pinned.discard(content_hash)

    def descendants(self, hashes: set[BlockHash]) -> set[BlockHash]:
        """Entries whose parent is among ``hashes``."""
        return {entry.content.hash for entry in self._entries.values() if entry.content.parent in hashes}

    def clear(self) -> None:
        """Drop everything."""
        self.forget(list(self._entries))

    def _evict(self) -> int | None:
        for content_hash, entry in self._entries.items():
            if content_hash not in self._pinned and not self._is_being_stored(entry.slot):
                del self._entries[content_hash]
                return entry.slot
        return None

    def _is_being_stored(self, slot: int) -> bool:
        return any(store.slot == slot for store in self._stores)

    def check_integrity(self) -> None:
        """Assert that every slot is either free or holds one entry."""
        used = [entry.slot for entry in self._entries.values()]
        assert sorted(used + self._free) == list(range(self.num_slots)), (
            f"{len(used)} slots are used and {len(self._free)} free of {self.num_slots}"
        )
        for content_hash, entry in self._entries.items():
            assert entry.content.hash == content_hash, f"slot {entry.slot} is kept under a foreign hash"
        assert self._pinned <= self._entries.keys(), "an entry that is not kept is pinned"
