"""Quantized formats at the start of an engine: refused without a passed record, served by force, and told apart."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from factories_model import GREEDY, generate, make_llama, make_runner, save_llama
from factories_quantization import make_config, make_gate_key, make_gate_record, save_tiny_llama

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.errors import ModelError
from engine.kv_cache import KVCache, kv_block_bytes
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner, gate_key
from engine.quantization_gate import (
    GateFigure,
    check_gate,
    gate_file,
    kernel_code_version,
    quantization_format,
    read_gate_record,
    write_gate_record,
)
from engine.weights import open_checkpoint

INT8_KV = {"kv_cache_dtype": "int8"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with a tokenizer, and a cache folder without records."""
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path / "cache"))
    return save_tiny_llama(tmp_path / "tiny")


def record_of(config: EngineConfig, path: Path, *, passes: bool) -> None:
    """Keeps a record for what ``config`` would serve."""
    write_gate_record(make_gate_record(gate_key(config, path), passes=passes))


def test_what_is_not_quantized_needs_no_record(model: Path) -> None:
    assert LLMEngine.from_config(make_config(model)).info.quantization_gate == "none"


def test_a_format_without_a_record_is_refused_and_told_how_to_get_one(model: Path) -> None:
    with pytest.raises(ModelError) as refusal:
        LLMEngine.from_config(make_config(model, quantization="fp8", **INT8_KV))
    text = str(refusal.value)
    assert "quantization fp8+kv_int8 of tiny in fp32 has not been measured" in text
    assert f"firsttoken eval quantization --model {model} --dtype fp32 --quantization fp8 --kv-cache-dtype int8" in text
    assert "--force-quantization" in text


def test_a_failed_record_is_refused_with_its_figures(model: Path) -> None:
    config = make_config(model, **INT8_KV)
    record_of(config, model, passes=False)
    with pytest.raises(ModelError) as refusal:
        LLMEngine.from_config(config)
    lines = str(refusal.value).splitlines()
    assert "has failed its regression gate of 2026-01-01" in lines[0]
    assert lines[1].strip().startswith("FAILED perplexity increase: 0.5, at most 0.03")
    assert any("ok     top-1 agreement: 0.99, at least 0.9" in line for line in lines)


def test_a_passed_record_serves_and_the_info_says_in_what(model: Path) -> None:
    config = make_config(model, **INT8_KV)
    record_of(config, model, passes=True)
    info = LLMEngine.from_config(config).info
    assert (info.quantization, info.kv_cache_dtype, info.quantization_gate) == ("none", "int8", "passed")
    assert info.attention_backend.endswith(", int8 KV")


@pytest.mark.parametrize(("has_record", "status"), [(True, "forced_failed"), (False, "forced_unmeasured")])
def test_force_serves_and_says_so(model: Path, caplog: pytest.LogCaptureFixture, has_record: bool, status: str) -> None:
    config = make_config(model, force=True, **INT8_KV)
    if has_record:
        record_of(config, model, passes=False)
    with caplog.at_level(logging.WARNING):
        assert LLMEngine.from_config(config).info.quantization_gate == status
    (said,) = [record.getMessage() for record in caplog.records if "served by force" in record.getMessage()]
    assert ("FAILED perplexity increase" in said) == has_record


def test_a_window_beyond_what_was_measured_is_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(model, **INT8_KV)
    key = gate_key(config, model)
    write_gate_record(make_gate_record(key, passes=True, max_length=64))
    with caplog.at_level(logging.WARNING):
        assert check_gate(config, key) == "passed"
    assert "prompts of more than 64 tokens have not been measured" in caplog.text


@pytest.mark.parametrize("field", ["weights_digest", "quantization", "dtype", "code_version"])
def test_a_record_of_anything_else_is_not_taken_over(tmp_path: Path, field: str) -> None:
    key = make_gate_key()
    write_gate_record(make_gate_record(key, passes=True), tmp_path)
    assert read_gate_record(key, tmp_path) is not None
    other = msgspec.structs.replace(key, **{field: "another"})
    assert read_gate_record(other, tmp_path) is None
    # nor where somebody puts the file in its place
    gate_file(key, tmp_path).rename(gate_file(other, tmp_path))
    assert read_gate_record(other, tmp_path) is None


def test_other_weights_of_the_same_shape_need_a_record_of_their_own(model: Path) -> None:
    config = make_config(model, **INT8_KV)
    record_of(config, model, passes=True)
    assert LLMEngine.from_config(config).info.quantization_gate == "passed"
    save_tiny_llama(model, seed=1)
    with pytest.raises(ModelError, match="has not been measured with these weights"):
        LLMEngine.from_config(config)


@pytest.mark.parametrize("content", [b"", b"{", b'{"key": 1}', b"\xff\xfe"])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    key = make_gate_key()
    file = write_gate_record(make_gate_record(key, passes=True), tmp_path)
    file.write_bytes(content)
    assert read_gate_record(key, tmp_path) is None


def test_a_figure_that_is_no_number_keeps_no_limit() -> None:
    for bound in ("at most", "at least"):
        assert not GateFigure(name="x", value=float("nan"), limit=0.0, bound=bound).is_met  # type: ignore[arg-type]


def test_a_record_without_figures_has_not_passed() -> None:
    assert not msgspec.structs.replace(make_gate_record(make_gate_key(), passes=True), figures=[]).has_passed


def test_the_code_version_is_a_digest_of_the_kernels() -> None:
    assert len(kernel_code_version()) == 64


def test_formats_differ_in_the_key_of_the_prefix_cache(model: Path) -> None:
    keys = set()
    for quantization, kv in (("none", "auto"), ("fp8", "auto"), ("none", "int8"), ("none", "fp8"), ("fp8", "fp8")):
        config = make_config(model, quantization=quantization, kv_cache_dtype=kv, force=True)
        engine = LLMEngine.from_config(config)
        key = engine.scheduler.kv_cache_manager.cache_key
        assert key.quantization == quantization_format(config)
        keys.add(key.extra("tenant"))
    assert len(keys) == 5


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_chunks_and_batches_leave_the_tokens_of_a_quantized_cache_unchanged(tmp_path: Path, kv: Any) -> None:
    folder = save_llama(tmp_path, make_llama())
    config = EngineConfig(model=ModelConfig(dtype="fp32"), cache=CacheConfig(num_blocks=32, kv_cache_dtype=kv))
    runner = ModelRunner(config, folder)
    prompt = torch.randint(0, 128, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    blocks = {"a": [3, 9, 1, 0], "b": [20, 21, 22, 23]}
    whole = generate(runner, {"a": prompt}, 8, block_ids=blocks, sampling=GREEDY)["a"]
    for chunk_size in (1, 7, 16):
        assert generate(runner, {"a": prompt}, 8, block_ids=blocks, chunk_size=chunk_size)["a"] == whole
    assert generate(runner, {"b": prompt[:30], "a": prompt}, 8, block_ids=blocks)["a"] == whole
    full = [int(row) for row in runner.logits([*prompt, *whole]).argmax(dim=-1)[49:-1]]
    assert full == whole


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_a_quantized_cache_takes_a_byte_an_element_and_a_scale(tmp_path: Path, kv: Any) -> None:
    spec = open_checkpoint(save_llama(tmp_path, make_llama())).spec
    cache = KVCache(spec, num_blocks=5, block_size=16, dtype=torch.bfloat16, kv_cache_dtype=kv)
    assert kv_block_bytes(spec, 16, torch.bfloat16, kv) == 2 * 2 * 2 * (64 + 4) * 16
    assert cache.num_bytes == 5 * kv_block_bytes(spec, 16, torch.bfloat16, kv)


def test_clearing_a_quantized_cache_finds_what_is_not_finite(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, make_llama())
    config = EngineConfig(model=ModelConfig(dtype="fp32"), cache=CacheConfig(num_blocks=8, kv_cache_dtype="fp8"))
    runner = ModelRunner(config, folder)
    generate(runner, {"a": [1, 2, 3] * 9}, 1, block_ids={"a": [4, 5]})
    before = [layer.clone() for layer in runner.kv_cache.layers]
    assert runner.kv_cache.clear_non_finite([4, 5]) == []
    assert all(torch.equal(old, new) for old, new in zip(before, runner.kv_cache.layers, strict=True))
    runner.kv_cache.layers[1][1, 5, 2, 0, -4:].view(torch.float32).fill_(float("nan"))
    assert runner.kv_cache.clear_non_finite([4, 5]) == [5]
    assert runner.kv_cache.layers[1][1, 5, 2, 0].count_nonzero() == 0


def test_parts_of_the_logits_are_the_logits(tmp_path: Path) -> None:
    runner = make_runner(save_llama(tmp_path, make_llama()))
    rows = [0, 5, 6, 19]
    parts = list(runner.logits_in_parts(list(range(20)), rows, 3))
    assert [len(part) for part in parts] == [3, 1]
    torch.testing.assert_close(torch.cat(parts), runner.logits(list(range(20)))[rows])
