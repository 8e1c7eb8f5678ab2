"""Gives sequences the KV blocks they need, and finds the blocks they need not compute again.

The life of a sequence here is ``get_computed_blocks`` (what the prefix cache already has), ``allocate_slots`` before
every step, ``cache_blocks`` after it, ``free`` at the end or at a preemption. A prompt of 40 tokens, blocks of 16::

    tokens      0 .............. 15 | 16 ............. 31 | 32 ... 39
    blocks      full, hashed        | full, hashed        | partial, no hash
    at most     hit                 | hit                 | always computed

Blocks become findable only in ``cache_blocks``, after the step that computed them: a step that fails leaves nothing
behind. Each sequence's block table only ever grows at its end until it is freed.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.block_hash import BlockHash, CacheKey, HashedBlock, extend_hashed_blocks, num_equal_tokens
from engine.block_pool import BlockPool, KVCacheBlock
from engine.received_blocks import ReceivedBlocks
from engine.second_tier import KVTransfer, SecondTier
from engine.sequence import Sequence


class ComputedBlocks(NamedTuple):
    """A prefix found in the cache. Valid until the next change of the pool: pass it on at once."""

    blocks: list[KVCacheBlock]
    """In the pool."""
    num_tokens: int
    """In the pool, in the second tier, and received, together."""
    tier: SequenceOf[HashedBlock] = ()
    """What follows ``blocks`` and is found in the second tier: it needs blocks, but no computing."""
    received: SequenceOf[HashedBlock] = ()
    """What follows that and has come from another engine for this sequence: it needs blocks, but no computing."""

    @property
    def num_blocks(self) -> int:
        """All of them."""
        return len(self.blocks) + len(self.tier) + len(self.received)


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
    promised: list[BlockHash] = field(default_factory=list)
    """Blocks of its prompt that it is about to compute, last one first: others may wait for them."""

    def append(self, blocks: list[KVCacheBlock]) -> None:
        self.blocks.extend(blocks)
        self.block_ids.extend(block.block_id for block in blocks)


class KVCacheManager:
    """Block tables of all sequences that hold blocks, over one pool."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        cache_key: CacheKey,
        enable_prefix_caching: bool = True,
        public_prefixes: Iterable[SequenceOf[int]] = (),
        num_second_tier_blocks: int = 0,
    ) -> None:
        """Build a manager whose blocks are all free.

        Args:
            num_blocks: size of the pool.
            block_size: tokens per block.
            cache_key: what all blocks depend on.
            enable_prefix_caching: share equal prefixes within a tenant.
            public_prefixes: token ids that prompts of any tenant may begin with and share; only whole blocks of them.
            num_second_tier_blocks: slots for evicted blocks; 0 is no second tier.
        """
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.cache_key = cache_key
        self.enable_prefix_caching = enable_prefix_caching
        self.public_prefixes = [list(prefix) for prefix in public_prefixes]
        self.second_tier = SecondTier(num_second_tier_blocks) if num_second_tier_blocks else None
        self.block_pool = BlockPool(
            num_blocks,
            enable_caching=enable_prefix_caching,
            on_evict=self.second_tier.store if self.second_tier is not None else None,
        )
        self.received_blocks = ReceivedBlocks()
        self._leases: dict[str, list[KVCacheBlock]] = {}
        """Blocks that are kept for other engines, beside the tables."""
        self._tables: dict[str, _BlockTable] = {}
        self._promised: Counter[BlockHash] = Counter()
        """Blocks that running sequences are about to compute, and how many of them each."""

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1; cached but unreferenced blocks count as free."""
        return self.block_pool.usage

    @property
    def num_second_tier_blocks(self) -> int:
        """Evicted blocks that are kept in the second tier."""
        return self.second_tier.num_used_slots if self.second_tier is not None else 0

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
        tier: list[HashedBlock] = []
        if self.second_tier is not None:
            for hashed in sequence.hashed_blocks[len(blocks) : max_num_blocks]:
                if not self.second_tier.holds(hashed):
                    break
                tier.append(hashed)
        num_found = len(blocks) + len(tier)
        received = self.received_blocks.match(sequence.request_id, sequence.hashed_blocks[num_found:max_num_blocks])
        return ComputedBlocks(blocks, (num_found + len(received)) * self.block_size, tier, received)

    def is_promised(self, sequence: Sequence, computed: ComputedBlocks) -> bool:
        """A running sequence is about to compute the very block that comes after ``computed``: waiting saves it."""
        index = computed.num_blocks
        if not self._promised or index >= (sequence.num_tokens - 1) // self.block_size:
            return False
        return sequence.hashed_blocks[index].hash in self._promised

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
        is_new = table is None
        if table is None:
            # Before new blocks are taken: one of the prefix must not be evicted for the sake of its own tail.
            self.block_pool.touch(computed.blocks)
            if self.second_tier is not None:
                self.second_tier.pin(computed.tier)
            table = _BlockTable(num_cached_blocks=len(computed.blocks))
            table.append(computed.blocks)
            self._tables[sequence.request_id] = table
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        table.append(new_blocks)
        if is_new:
            self._promise(sequence, table, computed.num_blocks)
            if not computed.received:  # what has come, if anything, is in the pool already
                self.received_blocks.forget(sequence.request_id)
            received_into = new_blocks[len(computed.tier) :]
            for hashed, block in zip(computed.received, received_into, strict=False):
                self.received_blocks.receive(sequence.request_id, hashed, block.block_id)
        if self.second_tier is not None:
            for hashed, block in zip(computed.tier, new_blocks, strict=False):
                self.second_tier.load(hashed, block.block_id)
        return new_blocks

    def cache_blocks(self, sequence: Sequence) -> None:
        """Make the full blocks of the ``num_computed_tokens`` tokens findable, once they are really computed."""
        table = self._tables[sequence.request_id]
        num_full_blocks = sequence.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or num_full_blocks <= table.num_cached_blocks or not table.is_cacheable:
            return
        self._extend_hashes(sequence)
        for index in range(table.num_cached_blocks, num_full_blocks):
            hashed = sequence.hashed_blocks[index]
            if not self.block_pool.cache_full_block(table.blocks[index], hashed):
                self._stop_caching(table)
                return
            table.num_cached_blocks = index + 1
            if table.promised and table.promised[-1] == hashed.hash:
                self._release_promise(table.promised.pop())

    def take_transfers(self) -> tuple[list[KVTransfer], list[KVTransfer]]:
        """Stores and loads that the next step has to make for the second tier."""
        return self.second_tier.take_transfers() if self.second_tier is not None else ([], [])

    def end_step(self) -> None:
        """The step with the taken transfers has been executed."""
        self.received_blocks.end_step()
        if self.second_tier is not None:
            self.second_tier.end_step()

    def fail_step(self, transfers: Iterable[KVTransfer]) -> None:
        """The step with these stores and loads broke off; nothing that they should have copied is believed."""
        self.received_blocks.end_step()
        if self.second_tier is not None:
            self.second_tier.fail_step(transfers)

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence, last one first; it may have none. What is cached stays findable."""
        table = self._tables.pop(sequence.request_id, None)
        if table is not None:
            for block_hash in table.promised:
                self._release_promise(block_hash)
            if self.second_tier is not None:
                self.second_tier.cancel_loads(table.block_ids)
            self.received_blocks.cancel_receives(table.block_ids)
            self.block_pool.free_blocks(reversed(table.blocks))

    @property
    def num_leased_blocks(self) -> int:
        """Blocks of all leases, shared ones counted as often as they are leased."""
        return sum(len(blocks) for blocks in self._leases.values())

    def lease_blocks(self, lease_id: str, sequence: Sequence) -> dict[BlockHash, int]:
        """Keep the cached blocks of a prompt, whoever uses them, until ``release_lease``.

        Returns:
            Hash and block id of each, in the order of the prompt; nothing is kept where there is none.
        """
        assert lease_id not in self._leases, f"lease {lease_id} exists already"
        blocks: list[KVCacheBlock] = []
        for hashed in sequence.hashed_blocks[: sequence.num_prompt_tokens // self.block_size]:
            block = self.block_pool.get_cached_block(hashed)
            if block is None:
                break
            blocks.append(block)
        if blocks:
            self.block_pool.touch(blocks)
            self._leases[lease_id] = blocks
        return {block.content.hash: block.block_id for block in blocks if block.content is not None}

    def is_lease_valid(self, lease_id: str) -> bool:
        """The blocks of a lease still hold what they did when it began."""
        return all(block.content is not None for block in self._leases[lease_id])

    def release_lease(self, lease_id: str) -> None:
        """Give back the blocks of a lease, last one first; they stay findable."""
        self.block_pool.free_blocks(reversed(self._leases.pop(lease_id)))

    def drop_blocks(self, block_ids: Iterable[int]) -> set[str]:
        """Make blocks that turned out to be wrong unfindable, with everything that was computed after them.

        Returns:
            Ids of the sequences that hold such a block and have to compute their tokens again.
        """
        dropped_ids = set(block_ids)
        hashes = self.block_pool.contents_of(dropped_ids)
        frontier = hashes
        while frontier:
            frontier = self.block_pool.descendants(frontier) - hashes
            if self.second_tier is not None:
                frontier |= self.second_tier.descendants(hashes) - hashes
            hashes = hashes | frontier
        self.block_pool.forget(hashes)
        if self.second_tier is not None:
            self.second_tier.forget(hashes)
        for table in self._tables.values():
            if any(block.content is None for block in table.blocks[: table.num_cached_blocks]):
                self._stop_caching(table)  # the parent of what it computes next cannot be found
        return {request_id for request_id, table in self._tables.items() if dropped_ids.intersection(table.block_ids)}

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and no effect, while any sequence holds blocks."""
        if not self.block_pool.reset_cache():
            return False
        if self.second_tier is not None:
            self.second_tier.clear()
        return True

    def _promise(self, sequence: Sequence, table: _BlockTable, num_computed_blocks: int) -> None:
        if self.enable_prefix_caching:
            hashes = [hashed.hash for hashed in sequence.hashed_blocks[num_computed_blocks:]]
            self._promised.update(hashes)
            table.promised = hashes[::-1]

    def _release_promise(self, block_hash: BlockHash) -> None:
        self._promised[block_hash] -= 1
        if not self._promised[block_hash]:
            del self._promised[block_hash]

    def _stop_caching(self, table: _BlockTable) -> None:
        table.is_cacheable = False
        for block_hash in table.promised:
            self._release_promise(block_hash)
        table.promised.clear()

    def _extend_hashes(self, sequence: Sequence) -> None:
        if sequence.num_public_blocks is None:
            prompt = sequence.prompt_token_ids
            num_public = max((num_equal_tokens(prompt, prefix) for prefix in self.public_prefixes), default=0)
            sequence.num_public_blocks = num_public // self.block_size
        is_past_extras = len(sequence.hashed_blocks) > sequence.num_public_blocks
        extend_hashed_blocks(
            sequence.hashed_blocks,
            sequence.token_ids,
            self.block_size,
            b"" if is_past_extras else self.cache_key.extra(sequence.cache_salt),
            public_extra=b"" if is_past_extras else self.cache_key.public_extra(),
            num_public_blocks=sequence.num_public_blocks,
        )

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
        for blocks in self._leases.values():
            for block in blocks:
                num_references[block.block_id] = num_references.get(block.block_id, 0) + 1
        self.block_pool.check_references(num_references)
        promised = Counter(block_hash for table in self._tables.values() for block_hash in table.promised)
        assert promised == self._promised, "the promised blocks are not those of the tables"
        if self.second_tier is not None:
            self.second_tier.check_integrity()
