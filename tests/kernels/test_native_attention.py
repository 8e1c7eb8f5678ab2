"""The native attention of every instruction set against the reference: what the tests of all backends leave open."""

from collections.abc import Iterator

import pytest
import torch
from factories_kernels import get_backend
from factories_model import AttentionCase

from kernels.attention import AttentionMetadata
from kernels.native.library import ISAS

DTYPES = [torch.float32, torch.bfloat16]
MIXED = ((1, 1, 1, 17, 130, 5), (0, 33, 600, 0, 100, 16))


@pytest.fixture(autouse=True)
def _poison_new_tensors() -> Iterator[None]:
    """Memory that a kernel forgets to write is not a number, not by luck a plausible one."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _attend(
    case: AttentionCase, isa: str | None = None, *, window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    backend = get_backend("native", case.q.dtype, isa)
    metadata = backend.prepare(case.metadata, dtype=case.q.dtype)
    return backend.attend(case.q, case.k, case.v, case.kv_cache, metadata, case.scale, window=window, softcap=softcap)


def _plain_torch(
    case: AttentionCase, dtype: torch.dtype, window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    """Matrix product, softmax, matrix product, each rounded to ``dtype``; in fp64 the truth."""
    outputs, row = [], 0
    for index, (query_len, context_len) in enumerate(
        zip(case.metadata.query_lens, case.metadata.context_lens, strict=True)
    ):
        seq_len = context_len + query_len
        blocks = case.metadata.block_tables[index].long()
        keys, values = case.kv_cache[:, blocks].flatten(1, 2)[:, :seq_len].transpose(1, 2)
        query, keys, values = case.q[row : row + query_len].transpose(0, 1).to(dtype), keys.to(dtype), values.to(dtype)
        group_size = query.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(group_size, 0), values.repeat_interleave(group_size, 0)
        scores = query @ keys.transpose(1, 2) * case.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        ones = torch.ones(query_len, seq_len, dtype=torch.bool)
        mask = ones.tril(context_len) if window is None else ones.tril(context_len).triu(context_len - window + 1)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        outputs.append((weights @ values).transpose(0, 1))
        row += query_len
    return torch.cat(outputs)


def _assert_close(
    case: AttentionCase, actual: torch.Tensor, *, window: int | None = None, softcap: float | None = None
) -> None:
    """An error at most twice that of plain torch in the same dtype, or the rounding of the result itself."""
    expected = _plain_torch(case, torch.float64, window, softcap)
    plain = float((_plain_torch(case, case.q.dtype, window, softcap) - expected).abs().max())
    rounding = torch.finfo(case.q.dtype).eps * float(expected.abs().max())
    assert torch.isfinite(actual).all()
    assert float((actual - expected).abs().max()) <= 2 * plain + rounding


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 64, 16), (8, 1, 128, 32), (10, 2, 80, 8), (14, 2, 40, 1), (16, 1, 256, 16), (3, 3, 20, 4)],
)
def test_every_instruction_set_agrees_with_the_reference(
    isa: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = AttentionCase(
        *MIXED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        magnitude=2.0,
    )
    _assert_close(case, _attend(case, isa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (37, None), (300, None), (None, 5.0), (100, 5.0)])
def test_every_instruction_set_keeps_window_and_soft_cap(
    isa: str, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    case = AttentionCase(*MIXED, num_heads=6, num_kv_heads=2, dtype=dtype, magnitude=2.0)
    actual = _attend(case, isa, window=window, softcap=softcap)
    _assert_close(case, actual, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [*range(1, 36), 63, 64, 65, 127, 128, 129, 255, 257, 500])
def test_every_length_around_a_vector_or_block_is_exact(dtype: torch.dtype, length: int) -> None:
    case = AttentionCase((length,), (0,), num_heads=6, num_kv_heads=2, dtype=dtype)
    _assert_close(case, _attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query_len", "context_len"), [(1, 8000), (40, 7950), (2, 4095), (1024, 1024)])
def test_long_contexts_agree_with_the_reference(dtype: torch.dtype, query_len: int, context_len: int) -> None:
    case = AttentionCase((query_len,), (context_len,), num_heads=3, num_kv_heads=1, dtype=dtype)
    _assert_close(case, _attend(case))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_of_no_token_are_never_read(isa: str, dtype: torch.dtype) -> None:
    case = AttentionCase(*MIXED, num_heads=6, num_kv_heads=2, dtype=dtype)
    expected = _attend(case, isa)
    block_size = case.metadata.block_size
    is_used = torch.zeros(case.kv_cache.shape[1] * block_size, dtype=torch.bool)
    for index, seq_len in enumerate(case.metadata.seq_lens.tolist()):
        for position in range(seq_len):
            block = int(case.metadata.block_tables[index, position // block_size])
            is_used[block * block_size + position % block_size] = True
    case.kv_cache.flatten(1, 2)[:, ~is_used] = float("nan")
    assert torch.equal(_attend(case, isa), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("query_lens", [(1,), (70,)])
def test_what_is_not_a_number_does_not_pass_unseen(isa: str, query_lens: tuple[int, ...]) -> None:
    case = AttentionCase(query_lens, (40,), num_heads=2, num_kv_heads=1)
    case.kv_cache.flatten(1, 2)[0, int(case.metadata.block_tables[0, 1]) * 16 + 3] = float("nan")
    assert torch.isnan(_attend(case, isa)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [2, 7, 64, 100])
def test_chunks_give_the_bits_of_the_whole_prompt(dtype: torch.dtype, chunk_size: int) -> None:
    case = AttentionCase((302,), (0,), num_heads=9, num_kv_heads=3, dtype=dtype)
    whole = _attend(case)
    blocks = [case.metadata.block_tables[0].tolist()]
    backend = get_backend("native", dtype)
    for start in range(0, 302, chunk_size):
        rows = slice(start, min(start + chunk_size, 302))
        if rows.stop - rows.start == 1:
            continue
        metadata = AttentionMetadata.build([rows.stop - rows.start], [start], blocks, 16)
        part = backend.attend(case.q[rows], case.k[rows], case.v[rows], case.kv_cache, metadata, case.scale)
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_number_of_threads_does_not_change_a_bit(dtype: torch.dtype) -> None:
    case = AttentionCase(*MIXED, num_heads=9, num_kv_heads=3, dtype=dtype)
    num_threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(_attend(case))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_may_lie_anywhere(isa: str, dtype: torch.dtype) -> None:
    case = AttentionCase((1, 50), (20, 30), num_heads=4, num_kv_heads=2, dtype=dtype)
    expected = _attend(case, isa)
    # an odd address, gaps between heads, tokens in descending memory order of heads
    spread = torch.full((51, 4, 64 + 3), float("nan"), dtype=dtype)
    spread[..., 1:65] = case.q
    case.q = spread[..., 1:65]
    assert torch.equal(_attend(case, isa), expected)


def test_gap_in_the_last_dimension_is_refused() -> None:
    case = AttentionCase((5,), (0,))
    case.q = torch.randn(5, 4, 128)[..., ::2]
    with pytest.raises(AssertionError, match="last dimension of q must be contiguous, its stride is 2"):
        _attend(case)


def test_more_sequences_than_packed_memory_holds_are_computed_in_rounds() -> None:
    # 24 chunks behind 3,000 tokens: packed keys and values of all take more than one round's 64 MiB
    case = AttentionCase((3,) * 24, (3000,) * 24, num_heads=8, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)
    _assert_close(case, _attend(case))
