"""Writing keys and values into the paged cache."""

import pytest
import torch

from kernels.store_kv import store_kv, store_kv_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_kv_writes_the_slots_and_nothing_else(dtype: torch.dtype) -> None:
    expected = torch.randn(2, 5, 4, 2, 8).to(dtype)
    actual = expected.clone()
    qkv = torch.randn(6, 9, 8).to(dtype)
    k, v = qkv[:, 5:7], qkv[:, 7:]
    slots = torch.tensor([19, 0, 7, 8, 9, 3])
    store_kv(k, v, actual, slots)
    store_kv_ref(k, v, expected, slots)
    assert torch.equal(actual, expected)


def test_store_kv_refuses_another_dtype() -> None:
    cache = torch.zeros(2, 1, 4, 1, 8)
    k = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="the cache is"):
        store_kv(k, k, cache, torch.tensor([0]))


def test_store_kv_refuses_a_slot_count_that_does_not_fit() -> None:
    cache = torch.zeros(2, 1, 4, 1, 8)
    k = torch.zeros(2, 1, 8)
    with pytest.raises(AssertionError, match="1 slots"):
        store_kv(k, k, cache, torch.tensor([0]))
