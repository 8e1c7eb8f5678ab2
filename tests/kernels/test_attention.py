"""Every attention backend against the fp32 reference, over shapes, dtypes and GQA ratios."""

import pytest
import torch
from factories_kernels import CPU_BACKENDS, get_backend
from factories_model import AttentionCase

from kernels.attention import AttentionMetadata, get_attention_backend, sdpa
from kernels.attention.reference import attention_ref
from kernels.capabilities import probe_capabilities
from kernels.native.library import native_kernels

MIXED = ((1, 1, 1, 17, 40, 5), (0, 33, 300, 0, 100, 16))

BATCHES = {
    "one decode": ((1,), (50,)),
    "one token": ((1,), (0,)),
    "decodes of equal length": ((1, 1, 1), (31, 31, 31)),
    "decodes of very different lengths": ((1, 1, 1, 1), (5, 700, 90, 640)),
    "prompt": ((200,), (0,)),
    "prompts": ((3, 130, 16), (0, 0, 0)),
    "chunk after context": ((70,), (90,)),
    "chunk longer than a tile": ((300,), (200,)),
    "chunk of one token after a longer one": ((20, 1), (10, 40)),
    "mixed": MIXED,
}


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).abs().max())


def _attend(
    backend: str, case: AttentionCase, *, window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    attention = get_backend(backend, case.q.dtype)
    metadata = attention.prepare(case.metadata, dtype=case.q.dtype)
    return attention.attend(case.q, case.k, case.v, case.kv_cache, metadata, case.scale, window=window, softcap=softcap)


def _plain_torch(case: AttentionCase) -> torch.Tensor:
    """Matrix product, softmax, matrix product in the dtype of the case: what its rounding is measured by."""
    outputs, row = [], 0
    for index, (query_len, context_len) in enumerate(
        zip(case.metadata.query_lens, case.metadata.context_lens, strict=True)
    ):
        blocks = case.metadata.block_tables[index].long()
        keys, values = case.kv_cache[:, blocks].flatten(1, 2)[:, : context_len + query_len].transpose(1, 2)
        query = case.q[row : row + query_len].transpose(0, 1)
        group_size = query.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(group_size, 0), values.repeat_interleave(group_size, 0)
        mask = torch.ones(query_len, context_len + query_len, dtype=torch.bool).tril(context_len)
        scores = (query @ keys.transpose(1, 2) * case.scale).masked_fill(~mask, float("-inf"))
        outputs.append((scores.softmax(dim=-1) @ values).transpose(0, 1))
        row += query_len
    return torch.cat(outputs)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 3), (8, 1)], ids=lambda heads: f"{heads[0]}q{heads[1]}kv")
def test_backend_agrees_with_the_reference_in_fp32(backend: str, batch: str, heads: tuple[int, int]) -> None:
    case = AttentionCase(*BATCHES[batch], num_heads=heads[0], num_kv_heads=heads[1])
    expected = attention_ref(case.q, case.kv_cache, case.metadata, case.scale)
    actual = _attend(backend, case)
    assert actual.shape == case.q.shape
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("window", "softcap"), [(1, None), (16, None), (37, None), (200, None), (5000, None), (None, 2.0), (37, 2.0)]
)
def test_window_and_soft_cap_agree_with_the_reference(
    backend: str, batch: str, window: int | None, softcap: float | None
) -> None:
    case = AttentionCase(*BATCHES[batch], num_heads=6, num_kv_heads=2)
    expected = attention_ref(case.q, case.kv_cache, case.metadata, case.scale, window=window, softcap=softcap)
    actual = _attend(backend, case, window=window, softcap=softcap)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_reference_sees_no_key_before_the_window() -> None:
    case = AttentionCase((1,), (30,), num_heads=2, num_kv_heads=2)
    expected = attention_ref(case.q, case.kv_cache, case.metadata, case.scale, window=8)
    slots = case.kv_cache.flatten(1, 2)
    before = [int(case.metadata.block_tables[0, i // 16]) * 16 + i % 16 for i in range(31 - 8)]
    slots[:, before] = 1e3
    torch.testing.assert_close(attention_ref(case.q, case.kv_cache, case.metadata, case.scale, window=8), expected)
    slots[:, int(case.metadata.block_tables[0, 1]) * 16 + 7] = 1e3  # the first key inside
    assert not torch.allclose(attention_ref(case.q, case.kv_cache, case.metadata, case.scale, window=8), expected)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("magnitude", [1.0, 3.0])
def test_backend_errs_at_most_twice_as_much_as_plain_torch(
    backend: str, dtype: torch.dtype, batch: str, magnitude: float
) -> None:
    if backend == "native" and dtype == torch.float16:
        pytest.skip("native attention computes fp32 and bf16")
    case = AttentionCase(*BATCHES[batch], num_heads=9, num_kv_heads=3, dtype=dtype, magnitude=magnitude)
    expected = attention_ref(case.q, case.kv_cache, case.metadata, case.scale)
    actual = _attend(backend, case)
    assert actual.dtype == dtype
    assert _error(actual, expected) <= 2 * _error(_plain_torch(case), expected) + 1e-3 * magnitude


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 1), (80, 8), (128, 64)])
def test_backend_takes_other_head_and_block_sizes(backend: str, head_dim: int, block_size: int) -> None:
    case = AttentionCase(*MIXED, head_dim=head_dim, block_size=block_size)
    expected = attention_ref(case.q, case.kv_cache, case.metadata, case.scale)
    torch.testing.assert_close(_attend(backend, case), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "native"])
def test_result_of_a_sequence_does_not_depend_on_the_rest_of_the_batch(backend: str) -> None:
    case = AttentionCase((1, 150), (200, 100))
    alone = AttentionMetadata.build([150], [100], [case.metadata.block_tables[1].tolist()], case.metadata.block_size)
    attention = get_backend(backend, torch.float32)
    together = _attend(backend, case)[1:]
    prepared = attention.prepare(alone, dtype=torch.float32)
    single = attention.attend(case.q[1:], case.k[1:], case.v[1:], case.kv_cache, prepared, case.scale)
    assert torch.equal(together, single)


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "native"])
def test_large_scores_keep_their_order_in_bf16(backend: str) -> None:
    # scores around 300, where bf16 steps by 2: only differences count, and those are far smaller
    case = AttentionCase((256,), (0,), num_heads=2, num_kv_heads=1, dtype=torch.bfloat16)
    common = torch.zeros(64, dtype=torch.bfloat16)
    common[:4] = 24.0
    case.q.copy_(case.q * 0.5 + common)
    case.k.copy_(case.k * 0.5 + common)
    case.kv_cache.flatten(1, 2)[0, case.metadata.slot_mapping] = case.k
    expected = attention_ref(case.q, case.kv_cache, case.metadata, case.scale)
    assert (expected - attention_ref(case.q * 0, case.kv_cache, case.metadata, 1.0)).abs().max() > 0.5
    assert _error(_attend(backend, case), expected) < 0.05


@pytest.mark.parametrize(("query_len", "context_len"), [(1, 5), (256, 10), (600, 300)])
def test_masked_rows_of_other_devices_agree_with_the_joined_softmaxes(query_len: int, context_len: int) -> None:
    query = torch.randn(1, 9, query_len, 64)
    key, value = torch.randn(2, 1, 3, context_len + query_len, 64)
    masked = sdpa._attend_masked(query, key, value, context_len, 0.125)
    joined = sdpa._join_context_and_chunk(query, key, value, context_len, 0.125)
    torch.testing.assert_close(masked, joined, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_default_backend_follows_dtype_and_processor(dtype: torch.dtype) -> None:
    kernels = native_kernels()
    expected = "tiled" if dtype == torch.bfloat16 and probe_capabilities().has_cpu_bf16 else "sdpa"
    if kernels is not None and dtype != torch.float16:
        expected = f"native ({kernels.isa})"
    assert get_attention_backend(dtype=dtype).name == expected


def test_native_backend_refuses_what_it_cannot_compute() -> None:
    with pytest.raises(ValueError, match=r"computes fp32 and bf16 on a CPU, not torch.float16 on cpu"):
        get_attention_backend("native", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"not torch.float32 on cuda"):
        get_attention_backend("native", dtype=torch.float32, device="cuda")


def test_unknown_backend_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"unknown attention backend 'magic'; there are reference, sdpa, tiled, native"
    ):
        get_attention_backend("magic", dtype=torch.float32)


def test_metadata_lays_out_the_worked_example() -> None:
    metadata = AttentionMetadata.build([1, 1, 4], [5, 1, 3], [[7, 2], [4, 0], [9, 3]], block_size=4)
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 6]
    assert metadata.seq_lens.tolist() == [6, 2, 7]
    assert metadata.num_decodes == 2
    assert metadata.block_tables.tolist() == [[7, 2], [4, 0], [9, 3]]
    assert metadata.slot_mapping.tolist() == [2 * 4 + 1, 4 * 4 + 1, 9 * 4 + 3, 3 * 4, 3 * 4 + 1, 3 * 4 + 2]
    assert (metadata.num_seqs, metadata.num_tokens) == (3, 6)


def test_metadata_ignores_blocks_that_are_reserved_for_later() -> None:
    metadata = AttentionMetadata.build([2], [3], [[5, 6, 7, 8]], block_size=4)
    assert metadata.block_tables.tolist() == [[5, 6]]


def test_metadata_refuses_a_block_table_that_is_too_short() -> None:
    with pytest.raises(AssertionError, match="1 blocks of 4 for 5 tokens"):
        AttentionMetadata.build([5], [0], [[0]], block_size=4)
