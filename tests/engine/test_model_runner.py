"""The model runner driven by hand-made steps on a tiny model: paging, chunks, batches, sharing, failures."""

from pathlib import Path

import pytest
import torch
from factories_kernels import get_kernels
from factories_model import (
    GREEDY,
    generate,
    make_engine_config,
    make_llama,
    make_runner,
    make_scheduled,
    save_llama,
)

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.errors import ModelError
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduler_output import SchedulerOutput
from kernels.attention import get_attention_backend
from kernels.capabilities import default_dtype

NUM_TOKENS = 12


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), make_llama())


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return make_runner(folder, num_blocks=64)


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> list[int]:
    """Greedy tokens of the 50-token prompt, without any cache: one full pass per token."""
    tokens = _prompt(50)
    for _ in range(NUM_TOKENS):
        tokens.append(int(runner.logits(tokens)[-1].argmax()))
    return tokens[50:]


def test_whole_prompt_then_decode_gives_the_tokens_of_full_passes(runner: ModelRunner, expected: list[int]) -> None:
    assert len(set(expected)) > 3
    assert generate(runner, {"a": _prompt(50)}, NUM_TOKENS, block_ids={"a": [3, 9, 1, 0]}) == {"a": expected}


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 33])
def test_chunks_leave_the_tokens_unchanged(runner: ModelRunner, expected: list[int], chunk_size: int) -> None:
    blocks = {"a": [60, 2, 31, 30]}
    assert generate(runner, {"a": _prompt(50)}, NUM_TOKENS, block_ids=blocks, chunk_size=chunk_size) == {"a": expected}


def test_batch_leaves_the_tokens_unchanged(runner: ModelRunner, expected: list[int]) -> None:
    prompts = {"a": _prompt(50), **{f"other {index}": _prompt(3 + 9 * index, index) for index in range(1, 8)}}
    blocks = {request_id: list(range(8 * index, 8 * index + 8)) for index, request_id in enumerate(prompts)}
    outputs = generate(runner, prompts, NUM_TOKENS, block_ids=blocks, chunk_size=20)
    assert outputs["a"] == expected
    for request_id in ("other 1", "other 7"):
        alone = generate(runner, {request_id: prompts[request_id]}, NUM_TOKENS, block_ids=blocks)
        assert alone[request_id] == outputs[request_id]


def test_shared_prefix_blocks_leave_the_tokens_unchanged(runner: ModelRunner, expected: list[int]) -> None:
    first = _prompt(50)[:32] + _prompt(10, 7)
    generate(runner, {"first": first}, 4, block_ids={"first": [5, 6, 7]})
    outputs = generate(runner, {"a": _prompt(50)}, NUM_TOKENS, block_ids={"a": [5, 6, 20, 21]}, num_cached=32)
    assert outputs == {"a": expected}


def test_content_of_freed_blocks_does_not_matter(runner: ModelRunner, expected: list[int]) -> None:
    for layer in runner.kv_cache.layers:
        layer[:, 40:44] = 1e3
    assert generate(runner, {"a": _prompt(50)}, NUM_TOKENS, block_ids={"a": [40, 41, 42, 43]}) == {"a": expected}


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_block_size_leaves_the_tokens_unchanged(folder: Path, expected: list[int], block_size: int) -> None:
    runner = make_runner(folder, block_size=block_size, num_blocks=64)
    blocks = {"a": list(range(64))[:: -1 if block_size == 1 else 1]}
    assert generate(runner, {"a": _prompt(50)}, NUM_TOKENS, block_ids=blocks) == {"a": expected}


def test_seed_gives_the_same_tokens_in_any_batch_and_any_chunks(runner: ModelRunner) -> None:
    seeded = SamplingParams(seed=5, temperature=1.0, top_p=0.95)
    alone = generate(runner, {"a": _prompt(50)}, NUM_TOKENS, block_ids={"a": [0, 1, 2, 3]}, sampling=seeded)
    prompts = {"b": _prompt(30, 1), "a": _prompt(50), "c": _prompt(5, 2)}
    sampling = {"b": SamplingParams(seed=9), "a": seeded, "c": SamplingParams()}
    blocks = {"b": [4, 5, 6], "a": [7, 8, 9, 10], "c": [11, 12]}
    batch = generate(runner, prompts, NUM_TOKENS, block_ids=blocks, chunk_size=13, sampling=sampling)
    assert batch["a"] == alone["a"]
    other = SamplingParams(seed=6, temperature=1.0, top_p=0.95)
    assert generate(runner, {"a": _prompt(50)}, NUM_TOKENS, block_ids={"a": [0, 1, 2, 3]}, sampling=other) != alone


def test_step_without_a_finished_prompt_samples_nothing(runner: ModelRunner) -> None:
    chunk = make_scheduled(token_ids=_prompt(16), block_ids=[0], needs_sample=False)
    assert runner.execute(SchedulerOutput(scheduled=[chunk])).sampled == {}


def test_empty_step_samples_nothing(runner: ModelRunner) -> None:
    assert runner.execute(SchedulerOutput(scheduled=[])).sampled == {}


def test_logits_of_a_prompt_leave_the_served_cache_alone(runner: ModelRunner) -> None:
    before = [layer.clone() for layer in runner.kv_cache.layers]
    runner.logits(_prompt(100))
    assert all(torch.equal(old, new) for old, new in zip(before, runner.kv_cache.layers, strict=True))


def test_sequence_with_infinite_values_fails_alone_and_leaves_no_trace(folder: Path, expected: list[int]) -> None:
    runner = make_runner(folder, num_blocks=64)
    for layer in runner.kv_cache.layers:
        layer[:, 10] = float("inf")  # the context of "bad" overflowed
    good, bad = _prompt(50), _prompt(20, 3)
    step = SchedulerOutput(
        scheduled=[
            make_scheduled("good", token_ids=good, block_ids=[0, 1, 2, 3]),
            make_scheduled("bad", token_ids=bad[16:], start=16, block_ids=[10, 11]),
        ]
    )
    result = runner.execute(step)
    assert result.sampled == {"good": expected[0]}
    assert result.failed == {"bad": "the model's logits are not finite in fp32"}
    # the next owner of those blocks is not harmed, even as padding of a batched decode
    prompts = {"good": good, "short": _prompt(17, 4)}
    outputs = generate(runner, prompts, NUM_TOKENS, block_ids={"good": [0, 1, 2, 3], "short": [10, 11]})
    assert outputs["good"] == expected


def test_all_sequences_failing_is_no_exception(folder: Path) -> None:
    runner = make_runner(folder)
    for layer in runner.kv_cache.layers:
        layer.fill_(float("nan"))
    step = SchedulerOutput(scheduled=[make_scheduled("a", token_ids=[1], start=16, block_ids=[0, 1])])
    result = runner.execute(step)
    assert (result.sampled, set(result.failed)) == ({}, {"a"})


def test_info_describes_the_model(folder: Path) -> None:
    info = make_runner(folder, num_blocks=9, max_model_len=100).info
    expected = get_attention_backend(dtype=torch.float32).name
    assert (info.architecture, info.dtype, info.attention_backend) == ("llama", "fp32", expected)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (2, 4, 2, 64)
    assert (info.block_size, info.num_blocks, info.max_model_len, info.vocab_size) == (16, 9, 100, 128)
    assert info.num_parameters == make_llama().num_parameters()
    assert len(info.weights_digest) == 64


def test_tied_parameters_are_counted_once(tmp_path: Path) -> None:
    model = make_llama(tie_word_embeddings=True)
    assert make_runner(save_llama(tmp_path, model)).info.num_parameters == model.num_parameters()


def test_auto_dtype_is_the_processors(folder: Path) -> None:
    expected_name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[default_dtype(torch.device("cpu"))]
    assert make_runner(folder, dtype="auto").info.dtype == expected_name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_generates_in_batches_and_chunks(folder: Path, dtype: str) -> None:
    runner = make_runner(folder, dtype=dtype)
    prompts = {"a": _prompt(200), "b": _prompt(40, 1)}
    blocks = {"a": list(range(15)), "b": list(range(20, 25))}
    outputs = generate(runner, prompts, 8, block_ids=blocks, chunk_size=150)
    logits = runner.logits(prompts["a"])[-1]
    # rounding may swap near-equal tokens, not more
    assert logits[outputs["a"][0]] >= logits.max() - 0.05 * logits.std() * 4
    assert all(len(tokens) == 8 for tokens in outputs.values())


def test_memory_decides_the_number_of_blocks(folder: Path) -> None:
    config = EngineConfig(model=ModelConfig(dtype="fp32"), cache=CacheConfig(memory_gib=0.01))
    # one block: 2 layers, keys and values, 16 tokens, 2 heads of 64, 4 bytes
    assert ModelRunner(config, folder).info.num_blocks == int(0.01 * 2**30) // (2 * 2 * 16 * 2 * 64 * 4)


def test_window_beyond_the_models_positions_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"max_model_len 513 exceeds the 512 positions of"):
        ModelRunner(make_engine_config(max_model_len=513), folder)


def test_threads_follow_the_configuration(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        make_runner(folder, num_threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_attention_backend_can_be_chosen_by_name(folder: Path, expected: list[int]) -> None:
    runner = make_runner(folder, attention_backend="reference")
    assert runner.info.attention_backend == "reference"
    outputs = generate(runner, {"a": _prompt(50)}, NUM_TOKENS, block_ids={"a": [0, 1, 2, 3]}, sampling=GREEDY)
    assert outputs == {"a": expected}


def test_int8_weights_keep_logits_close(folder: Path) -> None:
    plain = make_runner(folder).logits(list(range(40)))
    model = ModelConfig(dtype="fp32", quantization="int8")
    config = EngineConfig(model=model, cache=CacheConfig(num_blocks=16))
    get_kernels()
    quantized = ModelRunner(config, folder).logits(list(range(40)))
    assert not torch.equal(quantized, plain)
    # random weights amplify every rounding, so the median of the rows is what says something
    assert torch.nn.functional.cosine_similarity(quantized, plain).median() > 0.99


def test_configured_attention_backend_is_used_and_a_wrong_one_named(folder: Path) -> None:
    config = EngineConfig(model=ModelConfig(dtype="fp32", attention_backend="sdpa"), cache=CacheConfig(num_blocks=16))
    assert ModelRunner(config, folder).info.attention_backend == "sdpa"
    config = EngineConfig(model=ModelConfig(dtype="fp16", attention_backend="native"), cache=CacheConfig(num_blocks=16))
    with pytest.raises(ModelError, match="attention_backend 'native': native attention computes fp32 and bf16"):
        ModelRunner(config, folder)
