"""Block tables and prefix hits: exact block ids and token counts. Blocks hold four tokens here."""

import pytest
from factories_engine import make_kv_cache_manager, make_sequence

from engine import kv_cache_manager as module
from engine.block_hash import BlockHash, HashedBlock
from engine.kv_cache_manager import KVCacheManager
from engine.sequence import Sequence


def compute(manager: KVCacheManager, sequence: Sequence, num_tokens: int | None = None) -> list[int]:
    """Allocate (with a prefix hit where the sequence is new), compute and cache tokens, as a scheduler would."""
    computed = module.NOTHING_COMPUTED
    if not manager.block_ids(sequence.request_id):
        computed = manager.get_computed_blocks(sequence)
    count = num_tokens if num_tokens is not None else sequence.num_uncomputed_tokens - computed.num_tokens
    assert manager.allocate_slots(sequence, count, computed) is not None
    sequence.num_computed_tokens += computed.num_tokens + count
    manager.cache_blocks(sequence)
    return manager.block_ids(sequence.request_id)


def test_prefix_hit_shares_full_blocks_and_computes_the_rest() -> None:
    manager = make_kv_cache_manager(num_blocks=10)
    first = make_sequence([*range(8), 100, 101], request_id="a")
    assert compute(manager, first) == [0, 1, 2]
    second = make_sequence([*range(8), 200, 201, 202], request_id="b")
    computed = manager.get_computed_blocks(second)
    assert [block.block_id for block in computed.blocks] == [0, 1]
    assert computed.num_tokens == 8
    assert compute(manager, second) == [0, 1, 3]
    manager.check_integrity([first, second])


@pytest.mark.parametrize(("num_tokens", "expected"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_hit_never_covers_the_last_token(num_tokens: int, expected: int) -> None:
    manager = make_kv_cache_manager()
    compute(manager, make_sequence(16, request_id="a"))
    assert manager.get_computed_blocks(make_sequence(num_tokens, request_id="b")).num_tokens == expected


def test_blocks_are_cached_as_far_as_they_are_computed() -> None:
    manager = make_kv_cache_manager()
    first = make_sequence(16, request_id="a")
    hits = []
    for _ in range(3):
        compute(manager, first, 5)
        hits.append(manager.get_computed_blocks(make_sequence(16, request_id="b")).num_tokens)
    assert hits == [4, 8, 12]


def test_allocated_blocks_are_not_findable_before_they_are_computed() -> None:
    manager = make_kv_cache_manager()
    manager.allocate_slots(make_sequence(16, request_id="a"), 16)
    assert manager.get_computed_blocks(make_sequence(16, request_id="b")).num_tokens == 0


def test_freed_blocks_stay_findable_and_are_evicted_tail_first() -> None:
    manager = make_kv_cache_manager(num_blocks=4)
    first = make_sequence(14, request_id="a")
    assert compute(manager, first) == [0, 1, 2, 3]
    manager.free(first)
    probe = make_sequence(14, request_id="b")
    assert manager.get_computed_blocks(probe).num_tokens == 12
    # Block 3 is partial and goes first, then the leaf 2.
    assert compute(manager, make_sequence([50, 51, 52, 53, 54], request_id="c")) == [3, 2]
    assert manager.get_computed_blocks(probe).num_tokens == 8


def test_another_salt_never_hits() -> None:
    manager = make_kv_cache_manager()
    compute(manager, make_sequence(16, request_id="a", cache_salt="acme"))
    assert manager.get_computed_blocks(make_sequence(16, request_id="b", cache_salt="globex")).num_tokens == 0
    assert manager.get_computed_blocks(make_sequence(16, request_id="c", cache_salt="acme")).num_tokens == 12


def test_output_tokens_are_cached_for_the_next_turn() -> None:
    manager = make_kv_cache_manager()
    first = make_sequence(6, request_id="a")
    compute(manager, first)
    for token_id in (90, 91, 92):
        first.append_token(token_id, now=0.0)
        compute(manager, first, 1)
    manager.free(first)
    second = make_sequence([*range(6), 90, 91, 92, 7], request_id="b")
    assert manager.get_computed_blocks(second).num_tokens == 8


def test_equal_prompts_computed_at_the_same_time_get_blocks_of_their_own() -> None:
    manager = make_kv_cache_manager()
    first, second = make_sequence(9, request_id="a"), make_sequence(9, request_id="b")
    manager.allocate_slots(first, 9, manager.get_computed_blocks(first))
    manager.allocate_slots(second, 9, manager.get_computed_blocks(second))
    for sequence in (first, second):
        sequence.num_computed_tokens = 9
        manager.cache_blocks(sequence)
    assert manager.block_ids("a") == [0, 1, 2]
    assert manager.block_ids("b") == [3, 4, 5]
    manager.check_integrity([first, second])
    manager.free(first)
    manager.check_integrity([second])
    manager.free(second)
    manager.check_integrity([])
    assert [block.block_id for block in manager.get_computed_blocks(make_sequence(9)).blocks] == [3, 4]


def test_allocation_without_room_is_none_and_changes_nothing() -> None:
    manager = make_kv_cache_manager(num_blocks=3)
    first = make_sequence(8, request_id="a")
    compute(manager, first)
    second = make_sequence(8, request_id="b", cache_salt="other")
    assert manager.allocate_slots(second, 8) is None
    assert manager.block_ids("b") == []
    manager.check_integrity([first])
    assert manager.block_pool.num_free_blocks == 1


def test_free_blocks_of_the_hit_itself_do_not_count_as_room() -> None:
    manager = make_kv_cache_manager(num_blocks=3)
    first = make_sequence(12, request_id="a")
    compute(manager, first)
    manager.free(first)
    # Two of the three free blocks are the prefix itself, so one is left for the two that follow it.
    second = make_sequence([*range(8), *range(50, 58)], request_id="b")
    computed = manager.get_computed_blocks(second)
    assert computed.num_tokens == 8
    assert manager.allocate_slots(second, 8, computed) is None
    assert manager.allocate_slots(second, 4, computed) is not None
    assert manager.block_ids("b") == [0, 1, 2]


def test_slots_within_the_last_block_need_no_new_block() -> None:
    manager = make_kv_cache_manager()
    sequence = make_sequence(6)
    assert [block.block_id for block in manager.allocate_slots(sequence, 5) or []] == [0, 1]
    sequence.num_computed_tokens = 5
    assert manager.allocate_slots(sequence, 1) == []


def test_can_fit_counts_what_is_reserved_for_others() -> None:
    manager = make_kv_cache_manager(num_blocks=4)
    sequence = make_sequence(12)
    computed = manager.get_computed_blocks(sequence)
    assert manager.can_fit(sequence, computed, 1)
    assert not manager.can_fit(sequence, computed, 2)


def test_num_missing_blocks_counts_what_the_known_tokens_still_need() -> None:
    manager = make_kv_cache_manager()
    sequence = make_sequence(14)
    assert manager.num_missing_blocks(sequence) == 4
    compute(manager, sequence, 5)
    assert manager.num_missing_blocks(sequence) == 2


def test_free_of_a_sequence_without_blocks_is_harmless() -> None:
    manager = make_kv_cache_manager()
    manager.free(make_sequence(4))
    manager.check_integrity([])


def test_without_prefix_caching_nothing_is_shared() -> None:
    manager = make_kv_cache_manager(enable_prefix_caching=False)
    compute(manager, make_sequence(12, request_id="a"))
    assert manager.get_computed_blocks(make_sequence(12, request_id="b")) == ([], 0, (), ())


def test_reset_waits_until_no_sequence_holds_blocks() -> None:
    manager = make_kv_cache_manager()
    first, second = make_sequence(9, request_id="a"), make_sequence(9, request_id="b")
    compute(manager, first)
    assert not manager.reset_prefix_cache()
    manager.free(first)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(second).num_tokens == 0


def test_a_hash_collision_is_a_miss_and_ends_caching_of_that_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    # The worst hash there is: every block of one depth has the same one.
    def forged(
        hashed_blocks: list[HashedBlock], token_ids: list[int], block_size: int, extra: bytes, **_: object
    ) -> None:
        for index in range(len(hashed_blocks), len(token_ids) // block_size):
            tokens = tuple(token_ids[index * block_size : (index + 1) * block_size])
            parent = BlockHash(bytes([index]) * 32)
            hashed_blocks.append(HashedBlock(BlockHash(bytes([index + 1]) * 32), parent, tokens, b""))

    monkeypatch.setattr(module, "extend_hashed_blocks", forged)
    manager = make_kv_cache_manager()
    first = make_sequence(13, request_id="a")
    compute(manager, first)
    # Other tokens in the first block, equal ones after it.
    second = make_sequence([90, 91, 92, 93, *range(4, 13)], request_id="b")
    assert manager.get_computed_blocks(second).num_tokens == 0
    compute(manager, second)
    manager.check_integrity([first, second])
    assert manager.block_pool.num_cached_blocks == 3
    manager.free(first)
    manager.free(second)
    third = make_sequence(second.prompt_token_ids, request_id="c")
    assert manager.get_computed_blocks(third).num_tokens == 0
    assert manager.get_computed_blocks(make_sequence(13, request_id="d")).num_tokens == 12


def test_integrity_check_finds_blocks_nobody_should_hold() -> None:
    manager = make_kv_cache_manager()
    manager.allocate_slots(make_sequence(4, request_id="a"), 4)
    with pytest.raises(AssertionError, match=r"blocks are held by \['a'\]"):
        manager.check_integrity([])


def test_integrity_check_finds_a_block_in_two_tables() -> None:
    manager = make_kv_cache_manager()
    first, second = make_sequence(4, request_id="a"), make_sequence(4, request_id="b", cache_salt="other")
    compute(manager, first)
    compute(manager, second)
    manager._tables["b"].blocks[0] = manager._tables["a"].blocks[0]
    manager._tables["b"].block_ids[0] = 0
    with pytest.raises(AssertionError, match="holds another prefix"):
        manager.check_integrity([first, second])


def test_dropped_block_takes_all_that_follows_it_along() -> None:
    manager = make_kv_cache_manager()
    first = make_sequence([*range(12), 1], request_id="a")
    assert compute(manager, first) == [0, 1, 2, 3]
    manager.free(first)
    assert manager.drop_blocks([1]) == set()
    assert manager.block_pool.num_cached_blocks == 1
    manager.check_integrity([])
    assert manager.get_computed_blocks(make_sequence(13, request_id="b")).num_tokens == 4


def test_dropping_names_the_sequences_that_hold_the_block() -> None:
    manager = make_kv_cache_manager()
    first = make_sequence([*range(8), 50], request_id="a")
    second = make_sequence([*range(8), 60], request_id="b")
    other = make_sequence(range(100, 109), request_id="c")
    for sequence in (first, second, other):
        compute(manager, sequence)
    assert manager.drop_blocks([1]) == {"a", "b"}
    manager.check_integrity([first, second, other])


def test_sequence_without_its_dropped_parent_caches_nothing_more() -> None:
    manager = make_kv_cache_manager()
    first = make_sequence(24, request_id="a")
    compute(manager, first, 8)
    # A copy of the first block that another sequence computed for itself turns out to be wrong.
    twin = make_sequence([*range(4), 90], request_id="twin")
    manager.allocate_slots(twin, 4)
    twin.num_computed_tokens = 4
    manager.cache_blocks(twin)
    assert manager.drop_blocks(manager.block_ids("twin")) == {"twin"}
    compute(manager, first, 8)
    assert manager.block_pool.num_cached_blocks == 0
    manager.check_integrity([first, twin])


def test_salt_returns_behind_a_public_prefix() -> None:
    manager = make_kv_cache_manager(public_prefixes=[list(range(8)), list(range(50, 60))])
    prompts = {"a": [*range(8), *range(20, 28), 1], "b": [*range(8), *range(20, 28), 1]}
    chains = {}
    for salt, prompt in prompts.items():
        sequence = make_sequence(prompt, request_id=salt, cache_salt=salt)
        compute(manager, sequence)
        chains[salt] = [hashed.hash for hashed in sequence.hashed_blocks]
    assert chains["a"][:2] == chains["b"][:2]
    assert set(chains["a"][2:]).isdisjoint(chains["b"][2:])


def test_promises_end_with_the_blocks_or_with_the_sequence() -> None:
    manager = make_kv_cache_manager()
    first = make_sequence(17, request_id="a")
    second = make_sequence(17, request_id="b")
    assert not manager.is_promised(second, manager.get_computed_blocks(second))
    compute(manager, first, 4)
    assert manager.is_promised(second, manager.get_computed_blocks(second))
    compute(manager, first, 12)
    computed = manager.get_computed_blocks(second)
    assert computed.num_tokens == 16
    assert not manager.is_promised(second, computed)
    third = make_sequence(range(50, 67), request_id="c")
    compute(manager, third, 4)
    manager.free(third)
    again = make_sequence(range(50, 67), request_id="d")
    assert not manager.is_promised(again, manager.get_computed_blocks(again))
    manager.check_integrity([first])
