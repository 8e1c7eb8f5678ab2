"""The block pool: exact block ids through taking, sharing, releasing and evicting."""

import pytest

from engine.block_hash import BlockHash, HashedBlock, extend_hashed_blocks
from engine.block_pool import BlockPool, KVCacheBlock


def hashes(*token_ids: int) -> list[HashedBlock]:
    """A chain of blocks of one token each."""
    hashed_blocks: list[HashedBlock] = []
    extend_hashed_blocks(hashed_blocks, token_ids, 1, b"tenant")
    return hashed_blocks


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def take_and_cache(pool: BlockPool, hashed_blocks: list[HashedBlock]) -> list[KVCacheBlock]:
    blocks = pool.get_new_blocks(len(hashed_blocks))
    for block, hashed in zip(blocks, hashed_blocks, strict=True):
        assert pool.cache_full_block(block, hashed)
    pool.check_integrity()
    return blocks


def find(pool: BlockPool, hashed_blocks: list[HashedBlock]) -> list[int | None]:
    found = [pool.get_cached_block(hashed) for hashed in hashed_blocks]
    return [block.block_id if block else None for block in found]


def free(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
    pool.free_blocks(reversed(blocks))
    pool.check_integrity()


def test_new_blocks_come_in_order_with_one_reference() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    assert ids(blocks) == [0, 1, 2]
    assert [block.ref_count for block in blocks] == [1, 1, 1]
    assert pool.num_free_blocks == 1
    assert pool.usage == 0.75


def test_taking_more_than_is_free_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="asked for 3 blocks, 2 are free"):
        BlockPool(2).get_new_blocks(3)


def test_the_six_moments_of_the_module_docstring() -> None:
    pool = BlockPool(4)
    a, b = hashes(1, 2)
    blocks = pool.get_new_blocks(3)
    assert pool.cache_full_block(blocks[0], a)
    assert pool.cache_full_block(blocks[1], b)
    free(pool, blocks)
    assert list(pool._free) == [2, 3, 1, 0]
    hit = pool.get_cached_block(a)
    assert hit is blocks[0]
    pool.touch([hit])
    assert ids(pool.get_new_blocks(1)) == [2]
    assert list(pool._free) == [3, 1]
    assert ids(pool.get_new_blocks(2)) == [3, 1]
    assert find(pool, [a, b]) == [0, None]
    pool.check_integrity()


def test_a_cached_block_stays_findable_until_it_is_handed_out() -> None:
    pool = BlockPool(2)
    chain = hashes(1, 2)
    free(pool, take_and_cache(pool, chain))
    assert find(pool, chain) == [0, 1]
    pool.get_new_blocks(1)
    assert find(pool, chain) == [0, None]
    pool.get_new_blocks(1)
    assert find(pool, chain) == [None, None]
    pool.check_integrity()


def test_least_recently_released_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    one, other = hashes(1, 2), hashes(8, 9)
    first, second = take_and_cache(pool, one), take_and_cache(pool, other)
    free(pool, first)
    free(pool, second)
    pool.touch(first)
    free(pool, first)
    pool.get_new_blocks(2)
    assert find(pool, one + other) == [0, 1, None, None]


def test_a_shared_block_is_free_after_its_last_user() -> None:
    pool = BlockPool(2)
    chain = hashes(1)
    blocks = take_and_cache(pool, chain)
    pool.touch(blocks)
    free(pool, blocks)
    assert pool.num_free_blocks == 1
    free(pool, blocks)
    assert pool.num_free_blocks == 2


def test_freeing_once_too_often_is_a_bug() -> None:
    pool = BlockPool(2)
    blocks = pool.get_new_blocks(1)
    free(pool, blocks)
    with pytest.raises(AssertionError, match="block 0 is freed more often than it was taken"):
        pool.free_blocks(blocks)


def test_blocks_without_content_are_reused_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(3)
    chain = hashes(1)
    cached = take_and_cache(pool, chain)
    partial = pool.get_new_blocks(2)
    free(pool, cached)
    free(pool, partial)
    assert ids(pool.get_new_blocks(2)) == [1, 2]
    assert find(pool, chain) == [0]


def test_two_blocks_of_one_content_are_both_usable_and_one_is_found() -> None:
    pool = BlockPool(4)
    chain = hashes(1, 2)
    take_and_cache(pool, chain)
    take_and_cache(pool, chain)
    assert pool.num_cached_blocks == 4
    assert find(pool, chain) == [0, 1]


def test_a_duplicate_is_dropped_when_freed_while_its_copy_is_in_use() -> None:
    pool = BlockPool(4)
    chain = hashes(1, 2)
    first, second = take_and_cache(pool, chain), take_and_cache(pool, chain)
    free(pool, first)
    assert find(pool, chain) == [2, 3]
    assert pool.num_cached_blocks == 2
    assert ids(pool.get_new_blocks(2)) == [0, 1]
    free(pool, second)
    assert find(pool, chain) == [2, 3]


def test_of_two_free_copies_the_one_released_last_stays() -> None:
    pool = BlockPool(5)
    chain = hashes(1, 2)
    first = take_and_cache(pool, chain)
    # A second user computes the same parent while the first one is not yet cached, then goes on alone.
    second = take_and_cache(pool, chain[:1])
    free(pool, first)
    free(pool, second)
    assert find(pool, chain) == [2, 1]
    # The copy that was dropped is the first to be handed out, then the leaf, then its parent.
    pool.get_new_blocks(3)
    assert find(pool, chain) == [2, 1]
    pool.get_new_blocks(1)
    assert find(pool, chain) == [2, None]
    pool.check_integrity()


def test_a_block_in_use_is_preferred_among_copies() -> None:
    pool = BlockPool(3)
    chain = hashes(1)
    first = take_and_cache(pool, chain)
    free(pool, first)
    second = take_and_cache(pool, chain)
    assert find(pool, chain) == ids(second)


def test_a_forged_hash_does_not_find_other_tokens() -> None:
    pool = BlockPool(2)
    (real,) = hashes(1)
    take_and_cache(pool, [real])
    forged = HashedBlock(real.hash, real.parent, (2,), real.extra)
    assert pool.get_cached_block(forged) is None
    assert find(pool, [real]) == [0]


@pytest.mark.parametrize("field", ["parent", "extra"])
def test_a_forged_hash_does_not_find_another_prefix_or_tenant(field: str) -> None:
    pool = BlockPool(2)
    (real,) = hashes(1)
    take_and_cache(pool, [real])
    other = BlockHash(bytes([1]) * 32)
    forged = real._replace(parent=other) if field == "parent" else real._replace(extra=other)
    assert pool.get_cached_block(forged) is None


def test_a_colliding_block_is_not_cached_beside_the_first() -> None:
    pool = BlockPool(2)
    (real,) = hashes(1)
    take_and_cache(pool, [real])
    (block,) = pool.get_new_blocks(1)
    assert not pool.cache_full_block(block, real._replace(token_ids=(2,)))
    assert block.content is None
    assert pool.num_cached_blocks == 1
    pool.check_integrity()


def test_without_caching_nothing_is_findable() -> None:
    pool = BlockPool(2, enable_caching=False)
    (hashed,) = hashes(1)
    (block,) = pool.get_new_blocks(1)
    assert not pool.cache_full_block(block, hashed)
    assert find(pool, [hashed]) == [None]


def test_reset_forgets_everything_once_all_blocks_are_free() -> None:
    pool = BlockPool(2)
    chain = hashes(1, 2)
    blocks = take_and_cache(pool, chain)
    assert not pool.reset_cache()
    assert find(pool, chain) == [0, 1]
    free(pool, blocks)
    assert pool.reset_cache()
    assert find(pool, chain) == [None, None]
    pool.check_integrity()


def test_integrity_check_finds_a_block_in_use_in_the_free_queue() -> None:
    pool = BlockPool(2)
    pool._blocks[0].ref_count = 1
    with pytest.raises(AssertionError, match="block 0 has 1 references and is free"):
        pool.check_integrity()


def test_integrity_check_finds_a_leaked_block() -> None:
    pool = BlockPool(2)
    del pool._free[1]
    with pytest.raises(AssertionError, match="block 1 has 0 references and is not free"):
        pool.check_integrity()


def test_integrity_check_finds_a_child_without_its_parent() -> None:
    pool = BlockPool(2)
    chain = hashes(1, 2)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_block(block, chain[1])
    with pytest.raises(AssertionError, match="its parent was evicted before it"):
        pool.check_integrity()


def test_blocks_that_were_hit_outlive_a_flood_of_new_ones() -> None:
    pool = BlockPool(8)
    old, new = hashes(1, 2), [hashed for start in (3, 4, 5, 6, 7, 8) for hashed in hashes(start)]
    blocks = pool.get_new_blocks(2)
    for block, hashed in zip(blocks, old, strict=True):
        pool.cache_full_block(block, hashed)
    pool.free_blocks(reversed(blocks))
    pool.touch(blocks)
    pool.free_blocks(reversed(blocks))
    for hashed in new * 2:
        (block,) = pool.get_new_blocks(1)
        pool.cache_full_block(block, hashed)
        pool.free_blocks([block])
    assert [pool.get_cached_block(hashed) for hashed in old] == blocks
    pool.check_integrity()


def test_room_for_blocks_that_were_hit_is_bounded_and_taken_in_the_end() -> None:
    pool = BlockPool(8)
    for start in range(1, 9):
        (block,) = pool.get_new_blocks(1)
        pool.cache_full_block(block, hashes(start)[0])
        pool.touch([block])
        pool.free_blocks([block, block])
        pool.check_integrity()
    assert len(pool._protected) == 2
    assert len({block.block_id for block in pool.get_new_blocks(8)}) == 8
    assert pool.num_cached_blocks == 0
    pool.check_integrity()


def test_evicted_content_is_told() -> None:
    told = []
    pool = BlockPool(1, on_evict=lambda block_id, hashed: told.append((block_id, hashed)))
    (block,) = pool.get_new_blocks(1)
    (content,) = hashes(1)
    pool.cache_full_block(block, content)
    pool.free_blocks([block])
    pool.get_new_blocks(1)
    assert told == [(0, content)]
