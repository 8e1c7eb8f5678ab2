"""All layers in one call of the native kernels: the same numbers as layer by layer, for every family and batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from factories_kernels import get_kernels
from factories_model import make_model, make_runner, save_llama

from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.models.decoder import DecoderModel
from kernels.attention import AttentionMetadata
from kernels.native.library import DecoderTimes

BLOCK_SIZE = 16
BATCHES = {
    "one token": ((1,), (0,)),
    "decodes": ((1, 1, 1), (5, 40, 30)),
    "prompt": ((70,), (0,)),
    "mixed": ((1, 1, 37, 12), (33, 2, 0, 20)),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3": {},
}


def _model(folder: Path, family: str, dtype: str, quantization: str) -> DecoderModel:
    get_kernels()
    runner: ModelRunner = make_runner(
        save_llama(folder, make_model(family.split()[0], **FAMILIES[family])),
        attention_backend="native",
        dtype=dtype,
        quantization=quantization,
    )
    model = runner._model
    assert isinstance(model, DecoderModel)
    return model


def _forward(
    model: DecoderModel, query_lens: Sequence[int], context_lens: Sequence[int], rows: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a step leaves: hidden states of ``rows``, and the cache of each layer."""
    generator = torch.Generator().manual_seed(3)
    counts = [-(-(query + context) // BLOCK_SIZE) for query, context in zip(query_lens, context_lens, strict=True)]
    ids = torch.randperm(sum(counts), generator=generator).tolist()
    tables = [ids[sum(counts[:index]) :][:count] for index, count in enumerate(counts)]
    cache = KVCache(model.spec, num_blocks=sum(counts), block_size=BLOCK_SIZE, dtype=model.dtype)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    metadata = AttentionMetadata.build(query_lens, context_lens, tables, BLOCK_SIZE)
    positions = torch.cat(
        [torch.arange(context, context + query) for query, context in zip(query_lens, context_lens, strict=True)]
    )
    token_ids = torch.randint(0, model.spec.vocab_size, positions.shape, generator=generator)
    with torch.inference_mode():
        hidden = model.forward(token_ids, positions, cache, metadata, torch.tensor(rows, dtype=torch.int64))
    return hidden, cache.layers


@pytest.fixture(autouse=True)
def _poison_new_tensors() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_joined_layers_compute_what_single_layers_compute(
    tmp_path: Path, family: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(tmp_path, family, "bf16", quantization)
    if model._native is None:
        pytest.skip("this processor multiplies bf16 by another library")
    for query_lens, context_lens in BATCHES.values():
        num_tokens = sum(query_lens)
        rows = sorted({0, num_tokens // 2, num_tokens - 1})
        joined, joined_caches = _forward(model, query_lens, context_lens, rows)
        with monkeypatch.context() as patch:
            patch.setattr(model, "_native", None)
            single, single_caches = _forward(model, query_lens, context_lens, rows)
        assert joined.isfinite().all()
        assert torch.equal(joined, single)
        assert all(torch.equal(a, b) for a, b in zip(joined_caches, single_caches, strict=True))


def test_joined_layers_without_output_rows_still_store_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(tmp_path, "llama", "fp32", "int8")
    joined, joined_caches = _forward(model, (30,), (7,), [])
    assert model._native is not None
    assert joined.shape == (0, model.spec.hidden_size)
    monkeypatch.setattr(model, "_native", None)
    _, single_caches = _forward(model, (30,), (7,), [])
    assert all(torch.equal(a, b) for a, b in zip(joined_caches, single_caches, strict=True))


def test_times_of_a_step_are_added_up_where_somebody_asks(tmp_path: Path) -> None:
    model = _model(tmp_path, "llama", "fp32", "int8")
    assert model._native is not None
    times = DecoderTimes()
    model._native.times = times
    _forward(model, (70,), (0,), [69])
    assert min(times.products, times.attention, times.norms, times.rotary) > 0
    first = times.products
    _forward(model, (70,), (0,), [69])
    assert times.products > first


def test_layers_of_another_backend_are_computed_one_by_one(tmp_path: Path) -> None:
    runner = make_runner(save_llama(tmp_path, make_model("llama")), attention_backend="sdpa", dtype="bf16")
    model = runner._model
    assert isinstance(model, DecoderModel)
    assert model._native is None
