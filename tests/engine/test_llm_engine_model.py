"""The engine over a real forward pass in fp32: greedy tokens do not depend on how they were computed.

A tiny Llama with random weights always; the default model on real prompts where it has been pulled. The reference is
the whole sequence computed in one step, without chunks, cache, batch or decode.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from factories_engine import make_request, run_to_end
from factories_tokenizer import find_smollm2, write_byte_level_folder
from safetensors.torch import save_file

from engine.chat_template import ChatTokenizer
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from engine.outputs import RequestOutput

HIDDEN, FFN, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 64, 2, 4, 2, 8
WINDOW = 160


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: byte-level tokenizer, config, random weights."""
    folder = write_byte_level_folder(tmp_path_factory.mktemp("models") / "tiny-llama")
    vocab_size = ChatTokenizer.from_path(folder).tokenizer.vocab_size
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": WINDOW,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul(2.0 / math.sqrt(shape[-1]))

    weights = {
        "model.embed_tokens.weight": random(vocab_size, HIDDEN),
        "lm_head.weight": random(vocab_size, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": random(NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": random(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": random(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": random(HIDDEN, NUM_HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": random(FFN, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": random(FFN, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": random(HIDDEN, FFN),
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(weights, folder / "model.safetensors")
    return folder


def load(
    model: Path | str,
    *,
    chunk: int = 0,
    num_blocks: int = 128,
    block_size: int = 4,
    max_num_seqs: int = 8,
    enable_prefix_caching: bool = True,
    **cache: Any,
) -> LLMEngine:
    return LLMEngine.from_config(
        EngineConfig(
            model=ModelConfig(model=str(model), dtype="fp32"),
            cache=CacheConfig(
                num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching, **cache
            ),
            scheduler=SchedulerConfig(long_prefill_token_threshold=chunk, max_num_seqs=max_num_seqs),
            num_threads=1,
        )
    )


def greedy(engine: LLMEngine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Recompute everything for every token."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(runner.logits(token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def generate(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], num_tokens: int, name: str = "r", salt: str = "acme"
) -> list[list[RequestOutput]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(
            make_request(prompt, request_id=f"{name}{index}", max_tokens=num_tokens, ignore_eos=True, cache_salt=salt)
        )
    outputs = run_to_end(engine)
    return [outputs[f"{name}{index}"] for index in range(len(prompts))]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


PROMPTS = [[*range(10, 40), *range(100 + index, 100 + 3 * index)] for index in range(1, 9)]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[int]]:
    engine = load(tiny_llama)
    return [greedy(engine, prompt, NUM_TOKENS) for prompt in PROMPTS]


def test_reference_depends_on_the_prompt(expected: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert all(len(set(tokens)) > 4 for tokens in expected)


@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 17])
def test_tokens_do_not_depend_on_the_chunk_size(tiny_llama: Path, expected: list[list[int]], chunk: int) -> None:
    outputs = generate(load(tiny_llama, chunk=chunk), PROMPTS, NUM_TOKENS)
    assert [tokens_of(output) for output in outputs] == expected


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_tokens_do_not_depend_on_the_batch(tiny_llama: Path, expected: list[list[int]], max_num_seqs: int) -> None:
    engine = load(tiny_llama, max_num_seqs=max_num_seqs, enable_prefix_caching=False)
    assert [tokens_of(output) for output in generate(engine, PROMPTS, NUM_TOKENS)] == expected


def test_tokens_do_not_depend_on_a_prefix_hit(tiny_llama: Path, expected: list[list[int]]) -> None:
    engine = load(tiny_llama)
    generate(engine, PROMPTS, NUM_TOKENS, "cold")
    outputs = generate(engine, PROMPTS, NUM_TOKENS, "warm")
    assert [tokens_of(output) for output in outputs] == expected
    assert [output[0].num_cached_tokens for output in outputs] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]


def test_tokens_do_not_depend_on_preemption(tiny_llama: Path, expected: list[list[int]]) -> None:
    engine = load(tiny_llama, num_blocks=24, chunk=8)
    outputs = generate(engine, PROMPTS, NUM_TOKENS)
    assert engine.stats().num_preemptions > 0
    assert [tokens_of(output) for output in outputs] == expected


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_tokens_do_not_depend_on_blocks_that_come_back_from_the_second_tier(
    tiny_llama: Path, expected: list[list[int]], kind: str
) -> None:
    hits = {}
    for second_tier in ("none", kind):
        engine = load(tiny_llama, num_blocks=24, max_num_seqs=1, second_tier=second_tier, second_tier_gib=0.01)
        for name in ("cold", "warm"):
            for index, prompt in enumerate(PROMPTS):
                # Each prompt of its own tenant: nothing is shared, and eight of them do not fit into the pool.
                (outputs,) = generate(engine, [prompt], NUM_TOKENS, f"{name}{index}-", salt=f"tenant-{index}")
                assert tokens_of(outputs) == expected[index]
        engine.scheduler.check_integrity()
        hits[second_tier] = sum(
            generate(engine, [prompt], 1, f"again{index}-", salt=f"tenant-{index}")[0][0].num_cached_tokens
            for index, prompt in enumerate(PROMPTS)
        )
    assert hits[kind] == sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    assert hits["none"] < hits[kind]


def test_public_system_message_is_shared_by_tenants_and_what_follows_is_not(tiny_llama: Path) -> None:
    text = "Answer only from the handbook."
    engine = load(tiny_llama, public_prefixes=(text,))
    chat = ChatTokenizer.from_path(tiny_llama)
    prompt = chat.encode_chat([{"role": "system", "content": text}, {"role": "user", "content": "How many days?"}])
    (public,) = engine.scheduler.kv_cache_manager.public_prefixes
    first, second, again = (
        generate(engine, [prompt], 4, f"{place}-{salt}-", salt=salt)[0]
        for place, salt in enumerate(("acme", "globex", "globex"))
    )
    assert first[0].num_cached_tokens == 0
    assert second[0].num_cached_tokens == len(public) // 4 * 4
    assert again[0].num_cached_tokens == (len(prompt) - 1) // 4 * 4
    assert tokens_of(first) == tokens_of(second) == tokens_of(again) == greedy(engine, prompt, 4)


def test_another_tenant_does_not_hit_and_gets_the_same_tokens(tiny_llama: Path, expected: list[list[int]]) -> None:
    engine = load(tiny_llama)
    generate(engine, PROMPTS[:1], NUM_TOKENS, "acme", salt="acme")
    (outputs,) = generate(engine, PROMPTS[:1], NUM_TOKENS, "globex", salt="globex")
    assert outputs[0].num_cached_tokens == 0
    assert tokens_of(outputs) == expected[0]


def test_output_up_to_the_end_of_the_window(tiny_llama: Path) -> None:
    engine = load(tiny_llama)
    assert engine.info.max_model_len == WINDOW
    prompt = list(range(WINDOW - 3))
    (outputs,) = generate(engine, [prompt], 50)
    assert tokens_of(outputs) == greedy(engine, prompt, 3)
    assert outputs[-1].finish_reason == "length"


def test_key_of_the_cache_names_weights_tokenizer_template_and_settings(tiny_llama: Path) -> None:
    engine = load(tiny_llama)
    key = engine.scheduler.kv_cache_manager.cache_key
    assert (key.weights_digest, key.dtype, key.quantization) == (engine.info.weights_digest, "fp32", "none")
    chat = ChatTokenizer.from_path(tiny_llama)
    assert (key.tokenizer_digest, key.template_version) == (chat.tokenizer.digest, chat.version)
    assert "theta10000" in key.rope


@pytest.mark.skipif(find_smollm2() is None, reason="the default model has not been pulled")
def test_default_model_answers_alike_alone_in_chunks_in_a_batch_and_after_a_hit() -> None:
    path = find_smollm2()
    assert path is not None
    chat = ChatTokenizer.from_path(path)
    questions = (
        "What is the capital of France? Answer in one sentence.",
        "Name three colours.",
        "法国的首都是哪里？",
        "Why is the sky blue?",
    )
    prompts = [chat.encode_chat([{"role": "user", "content": question}]) for question in questions]
    engine = load(path, num_blocks=64, block_size=16)
    alone = [tokens_of(generate(engine, [prompt], 12, f"alone{i}-")[0]) for i, prompt in enumerate(prompts)]
    assert alone[0] == greedy(engine, prompts[0], 12)
    assert "Paris" in chat.tokenizer.decode(alone[0])
    warm = generate(engine, prompts, 12, "warm")
    assert all(outputs[0].num_cached_tokens >= 16 for outputs in warm)
    assert [tokens_of(outputs) for outputs in warm] == alone
    chunked = load(path, num_blocks=64, block_size=16, chunk=7)
    assert [tokens_of(outputs) for outputs in generate(chunked, prompts, 12)] == alone
