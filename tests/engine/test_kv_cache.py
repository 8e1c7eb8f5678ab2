"""Sizes and memory of the paged cache."""

from pathlib import Path

import pytest
import torch
from factories_model import make_llama, save_llama

from engine import kv_cache as module
from engine.config import CacheConfig
from engine.cpu_runtime import keep_freed_memory, lazy_zeros
from engine.errors import ModelError
from engine.kv_cache import KVCache, kv_block_bytes, num_kv_blocks
from engine.model_spec import ModelSpec
from engine.weights import open_checkpoint


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return open_checkpoint(save_llama(tmp_path, make_llama())).spec  # 2 layers, 2 KV heads of 64


def test_block_bytes_count_keys_and_values_of_all_layers(spec: ModelSpec) -> None:
    assert kv_block_bytes(spec, 16, torch.float32) == 2 * 2 * 2 * 64 * 16 * 4
    assert kv_block_bytes(spec, 16, torch.bfloat16) == 2 * 2 * 2 * 64 * 16 * 2


def test_num_blocks_fill_the_memory_given(spec: ModelSpec) -> None:
    assert num_kv_blocks(spec, CacheConfig(memory_gib=0.25), torch.float32) == 2**28 // (2 * 2 * 2 * 64 * 16 * 4)


def test_configured_number_of_blocks_comes_first(spec: ModelSpec) -> None:
    assert num_kv_blocks(spec, CacheConfig(memory_gib=0.25, num_blocks=7), torch.float32) == 7


def test_without_a_size_it_is_a_share_of_free_memory_but_not_more_than_can_be_of_use(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "free_memory_bytes", lambda device: 10 << 20)
    block_bytes = kv_block_bytes(spec, 16, torch.float32)
    cache = CacheConfig(free_memory_share=0.5)
    assert num_kv_blocks(spec, cache, torch.float32) == (5 << 20) // block_bytes
    assert num_kv_blocks(spec, cache, torch.float32, max_num_tokens=100) == 7
    with pytest.raises(ModelError, match=r"free_memory_share 0\.001 of 10485760 free bytes holds no KV block"):
        num_kv_blocks(spec, CacheConfig(free_memory_share=0.001), torch.float32)


def test_memory_without_room_for_a_block_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(ModelError, match=r"memory_gib 1e-06 holds no KV block of 16 tokens \(32768 bytes\)"):
        num_kv_blocks(spec, CacheConfig(memory_gib=1e-6), torch.float32)


def test_cache_is_zero_and_as_large_as_its_blocks(spec: ModelSpec) -> None:
    cache = KVCache(spec, num_blocks=5, block_size=16, dtype=torch.bfloat16)
    assert [tuple(layer.shape) for layer in cache.layers] == [(2, 5, 16, 2, 64)] * 2
    assert all(layer.count_nonzero() == 0 for layer in cache.layers)
    assert cache.num_bytes == 5 * kv_block_bytes(spec, 16, torch.bfloat16)


def test_clearing_non_finite_values_touches_nothing_else(spec: ModelSpec) -> None:
    cache = KVCache(spec, num_blocks=3, block_size=16, dtype=torch.float32)
    for layer in cache.layers:
        layer.fill_(1.0)
        layer[0, 1, 2] = float("nan")
        layer[1, 1, 3] = float("inf")
        layer[1, 2, 0] = float("nan")
    assert cache.clear_non_finite([0, 1]) == [1]
    for layer in cache.layers:
        expected = torch.ones_like(layer)
        expected[0, 1, 2] = 0.0
        expected[1, 1, 3] = 0.0
        expected[1, 2, 0] = float("nan")
        torch.testing.assert_close(layer, expected, rtol=0, atol=0, equal_nan=True)


def test_lazy_zeros_take_memory_only_where_they_are_touched() -> None:
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("resident memory is read from /proc")

    def resident_kib() -> int:
        return int(status.read_text().split("VmRSS:")[1].split()[0])

    before = resident_kib()
    zeros = lazy_zeros((4, 1 << 28), dtype=torch.float32)  # 4 GiB
    zeros[1, 5] = 3.0
    assert resident_kib() - before < 100 << 10
    assert zeros[1, 4:7].tolist() == [0.0, 3.0, 0.0]


def test_lazy_zeros_beyond_the_address_space_are_refused() -> None:
    with pytest.raises(MemoryError, match="cannot reserve 4611686018427387904 bytes"):
        lazy_zeros((1 << 60,), dtype=torch.float32)


def test_keeping_freed_memory_is_harmless_to_ask_for_twice() -> None:
    assert keep_freed_memory() == keep_freed_memory()
