"""Gives sequences the KV blocks they need, and finds the blocks they need not compute again.

The life of a sequence here is ``get_computed_blocks`` (what the prefix cache already has), ``allocate_slots`` before
every step, ``cache_blocks`` after it, ``free`` at the end or at a preemption. A prompt of 40 tokens, blocks of 16::

    tokens      0 .............. 15 | 16 ............. 31 | 32 ... 39
    blocks      full, hashed        | full, hashed        | partial, no hash
    at most     hit                 | hit                 | always computed

Blocks become findable only in ``cache_blocks``, after the step that computed them: a step that fails leaves nothing
behind. Each sequence's block table only ever grows at its end until it is freed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.block_hash import CacheKey, extend_hashed_blocks
from engine.block_pool import BlockPool, KVCacheBlock
from engine.sequence import Sequence


class ComputedBlocks(NamedTuple):
    """A prefix found in the cache. Valid until the next change of the pool: pass it on at once."""

    blocks: list[KVCacheBlock]
    num_tokens: int


NOTHING_COMPUTED = ComputedBlocks([], 0)


@dataclass(slots=True)
class _BlockTable:
    """What one sequence holds."""

    blocks: list[KVCacheBlock] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    """Ids of ``blocks``: copied in every step, so kept ready."""
    num_cached_blocks: int = 0
    """Leading blocks that were offered to the cache already."""
    is_cacheable: bool = True
    """False after a hash collision: what follows an ambiguous block must not be found."""

    def append(self, blocks: list[KVCacheBlock]) -> None:
        self.blocks.extend(blocks)
        self.block_ids.extend(block.block_id for block in blocks)


class KVCacheManager:
    """Block tables of all sequences that hold blocks, over one pool."""

    def __init__(
        self, *, num_blocks: int, block_size: int, cache_key: CacheKey, enable_prefix_caching: bool = True
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.cache_key = cache_key
        self.enable_prefix_caching = enable_prefix_caching
        self.block_pool = BlockPool(num_blocks, enable_caching=enable_prefix_caching)
        self._tables: dict[str, _BlockTable] = {}

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1; cached but unreferenced blocks count as free."""
        return self.block_pool.usage

    @property
    def max_num_tokens(self) -> int:
        """Most tokens one sequence can have computed with the whole pool for itself."""
        return self.block_pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Blocks that the known tokens of a sequence need and that it does not hold yet."""
        table = self._tables.get(sequence.request_id)
        num_held = len(table.blocks) if table else 0
        return max(0, self.num_blocks_for(sequence.num_tokens) - num_held)

    def block_ids(self, request_id: str) -> list[int]:
        """A copy of the block table; empty for a sequence that holds nothing."""
        table = self._tables.get(request_id)
        return table.block_ids.copy() if table else []

    def get_computed_blocks(self, sequence: Sequence) -> ComputedBlocks:
        """The longest cached prefix of a sequence that holds no blocks yet, in whole blocks.

        It never covers the last known token: that one is computed again, because its logits are needed.
        """
        if not self.enable_prefix_caching:
            return NOTHING_COMPUTED
        self._extend_hashes(sequence)
        max_num_blocks = (sequence.num_tokens - 1) // self.block_size
        blocks: list[KVCacheBlock] = []
        for hashed in sequence.hashed_blocks[:max_num_blocks]:
            block = self.block_pool.get_cached_block(hashed)
            if block is None:
                break
            blocks.append(block)
        return ComputedBlocks(blocks, len(blocks) * self.block_size)

    def can_fit(self, sequence: Sequence, computed: ComputedBlocks, num_reserved_blocks: int) -> bool:
        """All known tokens of a waiting sequence fit while ``num_reserved_blocks`` free blocks are left for others."""
        num_new_blocks = self.num_blocks_for(sequence.num_tokens) - len(computed.blocks)
        return num_new_blocks + self._num_free(computed.blocks) + num_reserved_blocks <= self.block_pool.num_free_blocks

    def allocate_slots(
        self, sequence: Sequence, num_new_tokens: int, computed: ComputedBlocks = NOTHING_COMPUTED
    ) -> list[KVCacheBlock] | None:
        """Extend the block table so that the next ``num_new_tokens`` tokens have a place.

        Args:
            sequence: holds no blocks yet if ``computed`` is given.
            num_new_tokens: tokens to compute after ``num_computed_tokens`` (and after ``computed``).
            computed: result of ``get_computed_blocks``; its blocks become the head of the table.

        Returns:
            The new blocks, possibly none, or ``None`` if too few are free; then nothing has changed.
        """
        assert num_new_tokens > 0, f"{sequence.request_id}: num_new_tokens must be positive, got {num_new_tokens}"
        table = self._tables.get(sequence.request_id)
        assert table is None or not computed.blocks, f"{sequence.request_id} holds blocks already and takes a prefix"
        num_held = len(table.blocks) if table else len(computed.blocks)
        num_tokens = sequence.num_computed_tokens + computed.num_tokens + num_new_tokens
        num_new_blocks = max(0, self.num_blocks_for(num_tokens) - num_held)
        if num_new_blocks + self._num_free(computed.blocks) > self.block_pool.num_free_blocks:
            return None
        if table is None:
            # Before new blocks are taken: one of the prefix must not be evicted for the sake of its own tail.
            self.block_pool.touch(computed.blocks)
            table = _BlockTable(num_cached_blocks=len(computed.blocks))
            table.append(computed.blocks)
            self._tables[sequence.request_id] = table
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        table.append(new_blocks)
        return new_blocks

    def cache_blocks(self, sequence: Sequence) -> None:
        """Make the full blocks of the ``num_computed_tokens`` tokens findable, once they are really computed."""
        table = self._tables[sequence.request_id]
        num_full_blocks = sequence.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or num_full_blocks <= table.num_cached_blocks or not table.is_cacheable:
            return
        self._extend_hashes(sequence)
        for index in range(table.num_cached_blocks, num_full_blocks):
            if not self.block_pool.cache_full_block(table.blocks[index], sequence.hashed_blocks[index]):
                table.is_cacheable = False
                return
            table.num_cached_blocks = index + 1

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence, last one first; it may have none. What is cached stays findable."""
        table = self._tables.pop(sequence.request_id, None)
        if table is not None:
            self.block_pool.free_blocks(reversed(table.blocks))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and no effect, while any sequence holds blocks."""
        return self.block_pool.reset_cache()

    def _extend_hashes(self, sequence: Sequence) -> None:
        extra = b"" if sequence.hashed_blocks else self.cache_key.extra(sequence.cache_salt)
        extend_hashed_blocks(sequence.hashed_blocks, sequence.token_ids, self.block_size, extra)

    def _num_free(self, blocks: Iterable[KVCacheBlock]) -> int:
        return sum(block.ref_count == 0 for block in blocks)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that the pool and the tables of exactly these sequences (those that should hold blocks) add up."""
        self.block_pool.check_integrity()
        holders = {sequence.request_id: sequence for sequence in sequences}
        assert holders.keys() == self._tables.keys(), (
            f"blocks are held by {sorted(self._tables)}, but {sorted(holders)} should hold some"
        )
        num_references: dict[int, int] = {}
        for request_id, table in self._tables.items():
            sequence = holders[request_id]
            num_computed = sequence.num_computed_tokens
            assert table.block_ids == [block.block_id for block in table.blocks], f"{request_id}: ids differ"
            assert len(table.blocks) * self.block_size >= num_computed, (
                f"{request_id}: {len(table.blocks)} blocks for {num_computed} computed tokens"
            )
            assert table.num_cached_blocks * self.block_size <= num_computed, (
                f"{request_id}: {table.num_cached_blocks} blocks are cached, {num_computed} tokens are computed"
            )
            for index, block in enumerate(table.blocks):
                num_references[block.block_id] = num_references.get(block.block_id, 0) + 1
                if index >= table.num_cached_blocks:
                    # The next step writes into it.
                    assert block.ref_count == 1, f"{request_id}: block {block.block_id} is not full, but shared"
                    assert block.content is None, f"{request_id}: block {block.block_id} is not full, but cached"
                elif block.content is not None:
                    assert block.content == sequence.hashed_blocks[index], (
                        f"{request_id}: block {block.block_id} holds another prefix"
                    )
        self.block_pool.check_references(num_references)
