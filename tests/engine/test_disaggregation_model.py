"""Prefill and decode in two engines over a real forward pass in fp32: greedy tokens are those of a single engine."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from factories_disaggregation_model import save_tiny_llama
from factories_engine import make_model_info, make_request

from engine.config import CacheConfig, EngineConfig, KVCacheDType, KVTransferConfig, ModelConfig, SchedulerConfig
from engine.cost_model import kv_cache_bytes
from engine.disaggregated_client import DisaggregatedClient
from engine.disaggregation.block_memory import TensorBlockMemory
from engine.kv_cache import KVCache
from engine.llm_engine import LLMEngine
from engine.model_spec import ModelSpec
from engine.outputs import GenerateRequest, RequestOutput
from engine.process import RestartPolicy
from engine.received_blocks import KVReceive
from engine.weights import open_checkpoint

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def spec(tiny_llama: Path) -> ModelSpec:
    return open_checkpoint(tiny_llama).spec


def make_config(model: Path, role: str, dtype: str = "fp32") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype=dtype),  # type: ignore[arg-type]
        cache=CacheConfig(num_blocks=64, block_size=4),
        scheduler=SchedulerConfig(long_prefill_token_threshold=16),
        kv_transfer=KVTransferConfig(role=role, min_transfer_tokens=8),  # type: ignore[arg-type]
        num_threads=1,
    )


@contextmanager
def loaded(model: Path, role: str, dtype: str = "fp32") -> Iterator[LLMEngine]:
    engine = LLMEngine.from_config(make_config(model, role, dtype))
    try:
        yield engine
    finally:
        engine.close()


def answer(engine: LLMEngine, request: GenerateRequest) -> list[RequestOutput]:
    engine.add_request(request)
    outputs: list[RequestOutput] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while not outputs or outputs[-1].finish_reason is None:
        assert time.monotonic() < deadline_s
        outputs += engine.step()
        engine.scheduler.check_integrity()
        time.sleep(0.001)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_greedy_tokens_do_not_depend_on_which_engine_computed_the_prompt(tiny_llama: Path, dtype: str) -> None:
    prompts = [[(3 * i + n) % 120 for i in range(n)] for n in (13, 40, 63)]
    with (
        loaded(tiny_llama, "both", dtype) as single,
        loaded(tiny_llama, "prefill", dtype) as prefill,
        loaded(tiny_llama, "decode", dtype) as decode,
    ):
        for index, prompt in enumerate(prompts):
            request = make_request(prompt, request_id=f"r{index}", max_tokens=12, ignore_eos=True)
            expected = tokens_of(answer(single, request))
            first = msgspec.structs.replace(
                request, sampling=msgspec.structs.replace(request.sampling, max_tokens=1), do_remote_decode=True
            )
            offered = answer(prefill, first)
            assert tokens_of(offered) == expected[:1]
            outputs = answer(decode, msgspec.structs.replace(request, remote_prefill=offered[-1].kv_offer))
            assert outputs[0].num_transferred_tokens == (len(prompt) - 1) // 4 * 4 - outputs[0].num_cached_tokens
            assert tokens_of(outputs) == expected


async def test_two_engine_processes_answer_as_one_and_do_so_again_after_the_death_of_one(tiny_llama: Path) -> None:
    prompts = [[(5 * i + n) % 120 for i in range(n)] for n in (50, 61)]
    requests = [
        make_request(prompt, request_id=f"r{index}", max_tokens=8, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    with loaded(tiny_llama, "both") as single:
        expected = [tokens_of(answer(single, request)) for request in requests]
    client = await DisaggregatedClient.start(
        [make_config(tiny_llama, "prefill")],
        [make_config(tiny_llama, "decode")],
        restart=RestartPolicy(first_delay_s=0.05, start_timeout_s=120),
    )
    try:
        outputs = [output async for output in client.generate(requests[0])]
        assert tokens_of(outputs) == expected[0]
        assert outputs[0].num_transferred_tokens == 48
        prefill, decode = (engine.client for engine in client._engines)
        assert prefill.pid is not None
        assert prefill.pid != decode.pid
        os.kill(prefill.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while not prefill.num_restarts:
                await asyncio.sleep(0.01)
        outputs = [output async for output in client.generate(requests[1])]
        assert tokens_of(outputs) == expected[1]
        assert outputs[0].num_transferred_tokens == 60
    finally:
        await client.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_come_out_of_another_cache_bit_by_bit(spec: ModelSpec, dtype: torch.dtype) -> None:
    one, other = (KVCache(spec, num_blocks=6, block_size=4, dtype=dtype) for _ in range(2))
    for layer in one.layers:
        layer.copy_(torch.randn(layer.shape))
    source, target = TensorBlockMemory(one), TensorBlockMemory(other)
    data = memoryview(source.read_blocks([4, 1]))
    assert source.layout == target.layout
    assert len(data) == 2 * source.block_bytes
    halves = data[: source.block_bytes], data[source.block_bytes :]
    target.write_blocks([KVReceive(0, halves[0]), KVReceive(5, halves[1])])
    for from_layer, to_layer in zip(one.layers, other.layers, strict=True):
        assert torch.equal(to_layer[:, [0, 5]], from_layer[:, [4, 1]])
        assert not to_layer[:, [1, 2, 3, 4]].any()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_quantized_blocks_come_with_their_scales(spec: ModelSpec, kv_cache_dtype: KVCacheDType) -> None:
    one, other = (
        KVCache(spec, num_blocks=4, block_size=4, dtype=torch.float32, kv_cache_dtype=kv_cache_dtype) for _ in range(2)
    )
    for layer in one.layers:
        layer.view(torch.uint8).random_(0, 255)
    source, target = TensorBlockMemory(one), TensorBlockMemory(other)
    target.write_blocks([KVReceive(2, source.read_blocks([1]))])
    info = make_model_info(num_layers=2, num_kv_heads=2, head_dim=64, kv_cache_dtype=kv_cache_dtype)
    assert kv_cache_bytes(info, 4) == source.block_bytes
    for from_layer, to_layer in zip(one.layers, other.layers, strict=True):
        assert torch.equal(to_layer.view(torch.uint8)[:, 2], from_layer.view(torch.uint8)[:, 1])


def test_layout_tells_types_and_shapes_apart(spec: ModelSpec) -> None:
    layouts = {
        TensorBlockMemory(KVCache(spec, num_blocks=1, block_size=size, dtype=dtype)).layout
        for size in (4, 8)
        for dtype in (torch.bfloat16, torch.float16)
    }
    assert len(layouts) == 4
