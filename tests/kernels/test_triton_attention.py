"""Triton attention against the fp32 reference: interpreted on a CPU, compiled where there is a GPU."""

import pytest
import torch
from factories_triton import DEVICE, EXACT, TritonCase, error, plain_attention

from kernels.attention.triton import TritonAttention
from kernels.triton_kernels.attention_decode import choose_num_splits, paged_decode
from kernels.triton_kernels.attention_prefill import list_tiles, paged_prefill
from kernels.triton_kernels.tuning import KernelConfig, find_config

MIXED = ((1, 1, 17, 5), (0, 100, 40, 33))

BATCHES = {
    "one decode": ((1,), (50,)),
    "one token": ((1,), (0,)),
    "decodes of different lengths": ((1, 1, 1), (5, 130, 63)),
    "prompt": ((50,), (0,)),
    "prompts": ((3, 33, 16), (0, 0, 0)),
    "chunk after context": ((37,), (45,)),
    "chunk of one token after a longer one": ((12, 1), (10, 40)),
    "mixed": MIXED,
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)], ids=lambda heads: f"{heads[0]}q{heads[1]}kv")
def test_triton_agrees_with_the_reference_in_fp32(batch: str, heads: tuple[int, int]) -> None:
    case = TritonCase(*BATCHES[batch], num_heads=heads[0], num_kv_heads=heads[1])
    actual = case.attend()
    assert actual.shape == case.q.shape
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, case.expected(), **EXACT)


@pytest.mark.parametrize("batch", ["decodes of different lengths", "chunk after context", "mixed"])
@pytest.mark.parametrize(
    ("window", "softcap"), [(1, None), (16, None), (37, None), (5000, None), (None, 2.0), (37, 2.0)]
)
def test_window_and_soft_cap_agree_with_the_reference(batch: str, window: int | None, softcap: float | None) -> None:
    case = TritonCase(*BATCHES[batch], num_heads=3, num_kv_heads=1)
    actual = case.attend(window=window, softcap=softcap)
    torch.testing.assert_close(actual, case.expected(window=window, softcap=softcap), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("magnitude", [1.0, 3.0])
def test_triton_errs_at_most_twice_as_much_as_plain_torch(dtype: torch.dtype, batch: str, magnitude: float) -> None:
    case = TritonCase(*BATCHES[batch], num_heads=3, num_kv_heads=1, dtype=dtype, magnitude=magnitude)
    expected = case.expected()
    actual = case.attend()
    assert actual.dtype == dtype
    assert error(actual, expected) <= 2 * error(plain_attention(case), expected) + 1e-3 * magnitude


@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 1), (80, 8), (128, 64), (8, 12)])
def test_triton_takes_other_head_and_block_sizes(head_dim: int, block_size: int) -> None:
    case = TritonCase(*MIXED, head_dim=head_dim, block_size=block_size)
    torch.testing.assert_close(case.attend(), case.expected(), **EXACT)


def test_scale_other_than_the_usual_one_is_applied() -> None:
    case = TritonCase(*MIXED)
    case.scale = 0.4
    torch.testing.assert_close(case.attend(), case.expected(), **EXACT)


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (16, 64), (64, 16)])
@pytest.mark.parametrize("window", [None, 20])
def test_prefill_does_not_depend_on_the_tile_and_writes_its_rows_alone(
    block_m: int, block_n: int, window: int | None
) -> None:
    case = TritonCase((1, 30, 21), (9, 0, 50), num_heads=6, num_kv_heads=2)
    config = KernelConfig(block_m=block_m, block_n=block_n)
    out = torch.full(case.q.shape, float("nan"), device=DEVICE)
    tiles = list_tiles(case.metadata, block_m // 3)
    paged_prefill(case.q, case.kv_cache, case.metadata, tiles, case.scale, out, config, window=window)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:], case.expected(window=window)[1:], **EXACT)


def test_tiles_with_most_keys_come_first() -> None:
    case = TritonCase((1, 40, 5), (200, 0, 100))
    assert list_tiles(case.metadata, 16).tolist() == [[2, 0], [1, 32], [1, 16], [1, 0]]


@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 1.5)])
def test_decode_does_not_depend_on_the_splits(
    num_splits: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = TritonCase((1, 1, 1, 1), (0, 15, 16, 150), num_heads=6, num_kv_heads=2)
    out = torch.full(case.q.shape, float("nan"), device=DEVICE)
    empty = torch.empty
    # partial results that the first pass does not write must not be read
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))
    config = KernelConfig(block_n=16)
    paged_decode(
        case.q,
        case.kv_cache,
        case.metadata,
        case.scale,
        out,
        config,
        num_splits=num_splits,
        window=window,
        softcap=softcap,
    )
    torch.testing.assert_close(out, case.expected(window=window, softcap=softcap), **EXACT)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [None, 8])
def test_decode_of_an_empty_sequence_is_zero(num_splits: int, window: int | None) -> None:
    case = TritonCase((1, 1), (40, 0))
    case.metadata.seq_lens[1] = 0
    out = torch.full(case.q.shape, float("nan"), device=DEVICE)
    config = KernelConfig(block_n=16)
    paged_decode(case.q, case.kv_cache, case.metadata, case.scale, out, config, num_splits=num_splits, window=window)
    assert not out[1].any()
    torch.testing.assert_close(out[0], case.expected(window=window)[0], **EXACT)


def test_splits_are_a_power_of_two_and_grow_only_while_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.triton_kernels.attention_decode.num_multiprocessors", lambda device: 132)
    device = torch.device("cuda")
    assert choose_num_splits(1, 8, 8192, 64, device) == 32  # 264 programs / 8
    assert choose_num_splits(1, 8, 300, 64, device) == 2  # 5 tiles
    assert choose_num_splits(1, 1, 10**6, 64, device) == 64
    assert choose_num_splits(64, 8, 8192, 64, device) == 1


def test_result_of_a_sequence_does_not_depend_on_the_rest_of_the_batch() -> None:
    case = TritonCase((1, 40), (70, 30))
    together = case.attend()[1:]
    backend = TritonAttention()
    alone = type(case.metadata).build(
        [40], [30], [case.metadata.block_tables[1].tolist()], case.metadata.block_size, device=DEVICE
    )
    prepared = backend.prepare(alone, dtype=case.q.dtype)
    single = backend.attend(case.q[1:], case.k[1:], case.v[1:], case.kv_cache, prepared, case.scale)
    assert torch.equal(together, single)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (16, 16)], ids=lambda heads: f"{heads[0]}q{heads[1]}kv")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 1000])
def test_real_sizes_err_at_most_twice_as_much_as_plain_torch(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "dtype": dtype}
    case = TritonCase((1, 1, 1, 2048, 777), (8191, 33, 4000, 0, 3001), **sizes)
    expected = case.expected(window=window)
    plain = error(plain_attention(case), case.expected())
    assert error(case.attend(window=window), expected) <= 2 * plain + 1e-3


def test_configuration_is_found_for_every_class() -> None:
    for size in (64, 128, 256):
        for bits in (16, 32):
            for kernel in ("prefill", "decode"):
                assert find_config(kernel, f"d{size}_{bits}", DEVICE).block_n >= 16
