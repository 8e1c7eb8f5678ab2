"""Block hashes: what they depend on, and that nothing else is mixed up in them."""

import dataclasses

import pytest
from factories_engine import make_cache_key
from hypothesis import given
from hypothesis import strategies as st

from engine.block_hash import NO_PARENT, CacheKey, HashedBlock, extend_hashed_blocks, hash_block


def chain(token_ids: list[int], block_size: int = 4, extra: bytes = b"x") -> list[HashedBlock]:
    hashed_blocks: list[HashedBlock] = []
    extend_hashed_blocks(hashed_blocks, token_ids, block_size, extra)
    return hashed_blocks


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(chain(list(range(n)))) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_chain_links_each_block_to_the_one_before() -> None:
    first, second = chain(list(range(8)))
    first_hash = hash_block(NO_PARENT, [0, 1, 2, 3], b"x")
    assert first == (first_hash, NO_PARENT, (0, 1, 2, 3), b"x")
    assert second == (hash_block(first_hash, [4, 5, 6, 7]), first_hash, (4, 5, 6, 7), b"")


def test_hash_stays_what_it_is_on_disk() -> None:
    assert hash_block(NO_PARENT, [1, 2, 3], b"tenant").hex() == (
        "a021e03b898c909898b91ed576e485dddb4b6afd3230166d6b0dac0c12e6b55e"
    )


def test_growing_the_chain_equals_hashing_at_once() -> None:
    token_ids = list(range(23))
    grown: list[HashedBlock] = []
    for end in range(len(token_ids) + 1):
        extend_hashed_blocks(grown, token_ids[:end], 4, b"x")
    assert grown == chain(token_ids)


def test_a_changed_token_changes_its_block_and_all_later_ones() -> None:
    one, other = chain(list(range(16))), chain([0, 1, 2, 3, 4, 99, *range(6, 16)])
    assert [a.hash == b.hash for a, b in zip(one, other, strict=True)] == [True, False, False, False]


def test_extra_reaches_every_block_through_the_first() -> None:
    one, other = chain(list(range(12)), extra=b"a"), chain(list(range(12)), extra=b"b")
    assert all(a.hash != b.hash for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CacheKey)])
def test_every_field_of_the_cache_key_changes_the_extra_data(field: str) -> None:
    assert make_cache_key().extra("tenant") != make_cache_key(**{field: "other"}).extra("tenant")


def test_salt_changes_the_extra_data() -> None:
    assert make_cache_key().extra("acme") != make_cache_key().extra("globex")


def test_neighbouring_fields_cannot_be_shifted_into_each_other() -> None:
    assert make_cache_key(rope="ab").extra("c") != make_cache_key(rope="a").extra("bc")


def test_empty_salt_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_salt must not be empty"):
        make_cache_key().extra("")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8), st.lists(st.integers(0, 2**32 - 1), max_size=8))
def test_different_tokens_have_different_hashes(one: list[int], other: list[int]) -> None:
    assert (hash_block(NO_PARENT, one) == hash_block(NO_PARENT, other)) == (one == other)


def test_tokens_and_extra_data_cannot_be_shifted_into_each_other() -> None:
    assert hash_block(NO_PARENT, [1, 2], b"") != hash_block(NO_PARENT, [1], b"\x02\x00\x00\x00")
