"""The second tier: its books slot by slot, and tokens that do not change when blocks come back from it."""

from pathlib import Path

import pytest
import torch
from factories_engine import FakeModelRunner, fake_generate, make_scheduler, make_sequence, run_step
from factories_model import make_llama, save_llama

from engine.block_hash import BlockHash, HashedBlock, extend_hashed_blocks
from engine.config import CacheConfig
from engine.errors import ModelError
from engine.kv_cache import KVCache
from engine.scheduler import Scheduler
from engine.second_tier import KVTransfer, SecondTier
from engine.second_tier_memory import SecondTierMemory
from engine.sequence import Sequence
from engine.weights import open_checkpoint


def chain(num_blocks: int, first_token: int = 0, salt: bytes = b"tenant") -> list[HashedBlock]:
    hashed_blocks: list[HashedBlock] = []
    extend_hashed_blocks(hashed_blocks, range(first_token, first_token + 4 * num_blocks), 4, salt)
    return hashed_blocks


def test_stores_fill_slots_and_then_push_out_the_least_recently_used() -> None:
    tier = SecondTier(2)
    a, b, c = chain(3)
    tier.store(7, a)
    tier.store(8, b)
    assert tier.take_transfers() == ([KVTransfer(7, 0), KVTransfer(8, 1)], [])
    tier.store(9, a)  # kept already: newer now, and nothing to copy
    tier.store(5, c)
    assert tier.take_transfers() == ([KVTransfer(5, 1)], [])
    assert [tier.holds(content) for content in (a, b, c)] == [True, False, True]
    tier.check_integrity()


def test_what_is_loaded_in_a_step_is_not_pushed_out_in_it() -> None:
    tier = SecondTier(1)
    a, b = chain(2)
    tier.store(0, a)
    tier.take_transfers()
    tier.pin([a])
    tier.load(a, 3)
    tier.store(4, b)
    assert tier.take_transfers() == ([], [KVTransfer(3, 0)])
    tier.end_step()
    tier.store(4, b)
    assert tier.holds(b)


def test_another_content_under_the_same_hash_is_not_held() -> None:
    tier = SecondTier(1)
    (a,) = chain(1)
    tier.store(0, a)
    assert not tier.holds(a._replace(token_ids=(9, 9, 9, 9)))
    assert not tier.holds(a._replace(extra=b"another tenant"))


def test_stores_of_a_failed_step_are_not_believed() -> None:
    tier = SecondTier(2)
    a, b = chain(2)
    tier.store(0, a)
    tier.take_transfers()
    tier.end_step()
    tier.store(1, b)
    stores, _ = tier.take_transfers()
    tier.fail_step(stores)
    assert (tier.holds(a), tier.holds(b)) == (True, False)
    tier.check_integrity()


def test_followers_of_a_hash_are_found() -> None:
    tier = SecondTier(4)
    a, b, c = chain(3)
    for block_id, content in enumerate((a, b, c)):
        tier.store(block_id, content)
    assert tier.descendants({a.hash}) == {b.hash}
    tier.forget([a.hash, BlockHash(b"unknown")])
    assert tier.num_used_slots == 2


def run(scheduler: Scheduler, runner: FakeModelRunner, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_unfinished:
        run_step(scheduler, runner)


@pytest.mark.parametrize("num_slots", [0, 3, 32])
def test_evicted_prefix_comes_back_from_the_second_tier(num_slots: int) -> None:
    scheduler = make_scheduler(num_blocks=8, num_second_tier_blocks=num_slots)
    runner = FakeModelRunner(8, 4)
    run(scheduler, runner, make_sequence(17, request_id="first", max_tokens=1))
    run(scheduler, runner, make_sequence(range(100, 130), request_id="flood", max_tokens=1))
    again = make_sequence(17, request_id="again", max_tokens=3, ignore_eos=True)
    run(scheduler, runner, again)
    assert again.output_token_ids == fake_generate(range(17), 3)
    # A chain is of use from its first block on; with three slots that one has been pushed out by later blocks.
    assert again.num_cached_tokens == (16 if num_slots == 32 else 0)


def test_another_tenant_finds_nothing_in_the_second_tier() -> None:
    scheduler = make_scheduler(num_blocks=8, num_second_tier_blocks=32)
    runner = FakeModelRunner(8, 4)
    run(scheduler, runner, make_sequence(17, request_id="a", max_tokens=1, cache_salt="acme"))
    run(scheduler, runner, make_sequence(range(100, 130), request_id="flood", max_tokens=1, cache_salt="acme"))
    other = make_sequence(17, request_id="b", max_tokens=1, cache_salt="globex")
    run(scheduler, runner, other)
    assert other.num_cached_tokens == 0


def test_reset_forgets_the_second_tier_as_well() -> None:
    scheduler = make_scheduler(num_blocks=8, num_second_tier_blocks=32)
    runner = FakeModelRunner(8, 4)
    run(scheduler, runner, make_sequence(17, request_id="a", max_tokens=1))
    run(scheduler, runner, make_sequence(range(100, 130), request_id="flood", max_tokens=1))
    assert scheduler.kv_cache_manager.num_second_tier_blocks > 0
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    assert scheduler.kv_cache_manager.num_second_tier_blocks == 0


@pytest.fixture
def kv_cache(tmp_path: Path) -> KVCache:
    spec = open_checkpoint(save_llama(tmp_path, make_llama())).spec
    cache = KVCache(spec, num_blocks=6, block_size=4, dtype=torch.bfloat16)
    for index, layer in enumerate(cache.layers):
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(index)))
    return cache


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_blocks_come_back_as_they_were(kind: str, kv_cache: KVCache, tmp_path: Path) -> None:
    config = CacheConfig(second_tier=kind, second_tier_gib=0.001, second_tier_folder=str(tmp_path))  # type: ignore[arg-type]
    memory = SecondTierMemory(config, kv_cache)
    before = [layer.clone() for layer in kv_cache.layers]
    memory.execute([KVTransfer(1, 5), KVTransfer(4, 0)], [])
    for layer in kv_cache.layers:
        layer[:, [1, 4]] = 0
    memory.execute([], [KVTransfer(2, 0), KVTransfer(3, 5)])
    for old, new in zip(before, kv_cache.layers, strict=True):
        assert torch.equal(new[:, 2], old[:, 4])
        assert torch.equal(new[:, 3], old[:, 1])
        assert torch.equal(new[:, [0, 5]], old[:, [0, 5]])


def test_stores_are_made_before_loads(kv_cache: KVCache) -> None:
    memory = SecondTierMemory(CacheConfig(second_tier="memory", second_tier_gib=0.001), kv_cache)
    expected = kv_cache.layers[0][:, 1].clone()
    memory.execute([KVTransfer(1, 0)], [KVTransfer(2, 0)])
    assert torch.equal(kv_cache.layers[0][:, 2], expected)


def test_file_of_the_tier_has_no_name(kv_cache: KVCache, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    config = CacheConfig(second_tier="disk", second_tier_gib=0.001, second_tier_folder=str(folder))
    memory = SecondTierMemory(config, kv_cache)
    assert memory.num_slots > 0
    assert list(folder.iterdir()) == []


def test_tier_that_cannot_be_made_says_why(kv_cache: KVCache, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"second_tier_gib 1e-06 holds no KV block"):
        SecondTierMemory(CacheConfig(second_tier="memory", second_tier_gib=1e-6), kv_cache)
    config = CacheConfig(second_tier="disk", second_tier_folder=str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"cannot map a second tier of 4294967296 bytes in .*nowhere"):
        SecondTierMemory(config, kv_cache)
