"""Owns all KV blocks: who uses them, which are free, and which hold a prefix that can be used again.

A block is *in use* while its reference count is positive, else it is *free*. A free block may still be *cached*: it
keeps its content and can be found by hash until it is handed out for something else. Free blocks wait in two queues,
which are both the free list and the eviction order of the cache (a segmented LRU). Blocks leave at the heads, and the
second queue only when the first one is empty:

    head  [ never used or without reusable content | cached, least recently released ... most recently ]  tail
    head  [ cached and hit before, least recently released ... most recently ]  tail

What has been hit once is more likely to be hit again than what has only been computed, so a flood of new prompts does
not wash it out. The second queue is bounded; what it has no room for goes to the tail of the first one again.

Four blocks, six moments (a, b: full blocks of a prompt, b follows a; p: a partial block)::

    moment                            free queue         cached
    1 start                           0 1 2 3
    2 A takes three blocks            3
    3 A has computed a, b             3                  a:0 b:1
    4 A ends, tail first: p b a       2 3 1 0            a:0 b:1     2 (p) in front: nothing in it can be used again
    5 B hits a, takes one new block   3 1                a:0 b:1     0 is in use again, 2 is B's
    6 C takes two blocks              (empty)            a:0         b is evicted before its parent could ever be

Because sequences release their last block first, and a hit on a child is one on its parent, a child is always evicted
before its parent: no cached block is ever unreachable. ``check_integrity`` asserts that too.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from engine.block_hash import NO_PARENT, BlockHash, HashedBlock

PROTECTED_SHARE = 0.25
"""Most of the pool that blocks that were hit may keep from new ones. Measured on request traces: see the bench."""


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block of the paged KV cache."""

    block_id: int
    """Index into the KV tensors."""
    ref_count: int = 0
    """Sequences whose block table holds it."""
    content: HashedBlock | None = None
    """What it holds, while it can be found in the cache."""
    was_hit: bool = False
    """It was found in the cache since it was computed, or since it lost its place among those that were."""


class BlockPool:
    """A fixed number of blocks, shared by reference count, reused in LRU order."""

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        on_evict: Callable[[int, HashedBlock], None] | None = None,
    ) -> None:
        """Build a pool whose blocks are all free.

        Args:
            num_blocks: its size.
            enable_caching: without it no block can be found again.
            on_evict: hears of a cached block, by id and content, that is handed out for something else now.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self._on_evict = on_evict
        self._blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, KVCacheBlock] = OrderedDict((block.block_id, block) for block in self._blocks)
        self._protected: OrderedDict[int, KVCacheBlock] = OrderedDict()
        self._max_num_protected = int(num_blocks * PROTECTED_SHARE)
        # Two sequences that compute the same prefix at the same time make two blocks of one hash.
        self._cached: dict[BlockHash, list[KVCacheBlock]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free) + len(self._protected)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by hash, in use or not."""
        return sum(len(blocks) for blocks in self._cached.values())

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out free blocks with reference count 1; cached ones among them are evicted, least recent first."""
        assert num_blocks <= self.num_free_blocks, f"asked for {num_blocks} blocks, {self.num_free_blocks} are free"
        blocks = []
        for _ in range(num_blocks):
            _, block = (self._free or self._protected).popitem(last=False)
            if block.content is not None:
                if self._on_evict is not None:
                    self._on_evict(block.block_id, block.content)
                self._forget(block)
            block.ref_count = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take one more reference on each block, which was hit; free ones leave their queue."""
        for block in blocks:
            if block.ref_count == 0:
                self._leave_queue(block)
            block.ref_count += 1
            block.was_hit = True

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give back one reference on each block, in the order given: the first one is evicted first.

        Of several free blocks with one content only the last released stays cached; the others, like blocks without
        reusable content, are handed out again before any cached block is evicted.
        """
        for block in ordered_blocks:
            assert block.ref_count > 0, f"block {block.block_id} is freed more often than it was taken"
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.content is not None:
                self._drop_duplicates(block)
            self._enter_queue(block)

    def get_cached_block(self, hashed: HashedBlock) -> KVCacheBlock | None:
        """A block that holds exactly this content, or ``None``. One in use is preferred: sharing it costs no block."""
        found = None
        for block in self._cached.get(hashed.hash, ()):
            if block.content == hashed:
                if block.ref_count > 0:
                    return block
                found = block
        return found

    def cache_full_block(self, block: KVCacheBlock, hashed: HashedBlock) -> bool:
        """Make a block that is in use and fully computed findable.

        Returns:
            False if its hash already stands for other content. Then it is not cached, and nothing that follows it
            may be either: the parent hash of a follower would be ambiguous.
        """
        if not self.enable_caching:
            return False
        assert block.ref_count > 0, f"block {block.block_id} is cached while nobody uses it"
        assert block.content is None, f"block {block.block_id} is cached twice"
        blocks = self._cached.setdefault(hashed.hash, [])
        if blocks and blocks[0].content != hashed:
            return False
        blocks.append(block)
        block.content = hashed
        return True

    def reset_cache(self) -> bool:
        """Forget all cached content, e.g. after a change of weights.

        Returns:
            False, and nothing is forgotten, while a block is in use: its sequence goes on to cache what follows it.
        """
        if self.num_free_blocks < self.num_blocks:
            return False
        self._free.update(self._protected)
        self._protected.clear()
        for block in self._blocks:
            block.content = None
            block.was_hit = False
        self._cached.clear()
        return True

    def contents_of(self, block_ids: Iterable[int]) -> set[BlockHash]:
        """Hashes under which some blocks are cached."""
        contents = (self._blocks[block_id].content for block_id in block_ids)
        return {content.hash for content in contents if content is not None}

    def descendants(self, hashes: set[BlockHash]) -> set[BlockHash]:
        """Cached hashes whose parent is among ``hashes``. Linear in the cache: for rare events."""
        return {
            block_hash
            for block_hash, blocks in self._cached.items()
            if blocks[0].content is not None and blocks[0].content.parent in hashes
        }

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Make all blocks of these hashes unfindable, in use or not; their descendants have to be among them."""
        for block_hash in hashes:
            for block in list(self._cached.get(block_hash, ())):
                self._forget(block)
                if block.ref_count == 0:
                    self._leave_queue(block)
                    self._enter_queue(block)

    def _enter_queue(self, block: KVCacheBlock) -> None:
        """Put a block that is free now where it will be evicted in its turn."""
        if block.content is None:
            self._free[block.block_id] = block
            self._free.move_to_end(block.block_id, last=False)
        elif not block.was_hit:
            self._free[block.block_id] = block
        else:
            self._protected[block.block_id] = block
            if len(self._protected) > self._max_num_protected:
                block_id, oldest = self._protected.popitem(last=False)
                oldest.was_hit = False
                self._free[block_id] = oldest

    def _leave_queue(self, block: KVCacheBlock) -> None:
        del (self._protected if block.block_id in self._protected else self._free)[block.block_id]

    def _forget(self, block: KVCacheBlock) -> None:
        assert block.content is not None, f"block {block.block_id} is not cached"
        blocks = self._cached[block.content.hash]
        blocks.remove(block)
        if not blocks:
            del self._cached[block.content.hash]
        block.content = None
        block.was_hit = False

    def _drop_duplicates(self, block: KVCacheBlock) -> None:
        """Keep one cached copy of the content of a block that just became free.

        A copy in use is the one to keep, as it will be released after ``block`` and thus after its followers. Else
        it is ``block`` itself: its followers were released just before it, an older copy could be evicted before them.
        """
        assert block.content is not None, f"block {block.block_id} is not cached"
        others = [other for other in self._cached[block.content.hash] if other is not block]
        used = [other for other in others if other.ref_count > 0]
        # The copy that stays takes over that it was hit: its followers may be protected, so it has to be as well.
        if used:
            for other in used:
                other.was_hit |= block.was_hit
            self._forget(block)
            return
        for other in others:
            block.was_hit |= other.was_hit
            self._leave_queue(other)
            self._forget(other)
            self._enter_queue(other)

    def check_references(self, num_references: Mapping[int, int]) -> None:
        """Assert the reference count of every block; block ids that are not given have none."""
        for block in self._blocks:
            expected = num_references.get(block.block_id, 0)
            assert block.ref_count == expected, (
                f"block {block.block_id} counts {block.ref_count} references, {expected} tables hold it"
            )

    def check_integrity(self) -> None:
        """Assert that free queue, reference counts and cache tell the same story. Linear in the number of blocks."""
        for block in self._blocks:
            queues = [queue for queue in (self._free, self._protected) if queue.get(block.block_id) is block]
            assert len(queues) < 2, f"block {block.block_id} waits in two queues"
            is_free = bool(queues)
            assert (block.ref_count == 0) == is_free, (
                f"block {block.block_id} has {block.ref_count} references and is {'' if is_free else 'not '}free"
            )
            if block.content is not None:
                assert block in self._cached.get(block.content.hash, ()), f"block {block.block_id} cannot be found"
        assert self.num_free_blocks <= self.num_blocks, f"{self.num_free_blocks} of {self.num_blocks} blocks are free"
        assert len(self._protected) <= self._max_num_protected, f"{len(self._protected)} blocks are protected"
        assert all(block.was_hit and block.content for block in self._protected.values()), (
            "a block is protected in vain"
        )
        for block_hash, blocks in self._cached.items():
            assert blocks, "a hash without blocks stays in the cache"
            assert len({block.block_id for block in blocks}) == len(blocks), f"a block is listed twice: {blocks}"
            assert sum(block.ref_count == 0 for block in blocks) <= 1, f"free duplicates are cached: {blocks}"
            for block in blocks:
                assert block.content is not None, f"block {block.block_id} is cached without content"
                assert block.content.hash == block_hash, f"block {block.block_id} is cached under a foreign hash"
                assert block.content == blocks[0].content, f"one hash stands for two contents: {blocks}"
                parent = block.content.parent
                assert parent == NO_PARENT or parent in self._cached, (
                    f"block {block.block_id} is cached, but its parent was evicted before it"
                )
        seen_cached = False
        for block in self._free.values():
            assert block.content is not None or not seen_cached, (
                f"block {block.block_id} holds nothing, but waits behind cached blocks"
            )
            seen_cached = seen_cached or block.content is not None
