"""Every family on tiny random weights against transformers in fp32: logits, greedy tokens, chunks, cached prefixes.

The windows of Mistral and Gemma 3 are shorter than the prompts, and end inside a block of the cache.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from factories_model import generate, make_model, make_runner, save_llama, save_llama_gguf

NUM_TOKENS = 24
PROMPT = torch.randint(0, 128, (70,), generator=torch.Generator().manual_seed(1)).tolist()
BLOCKS = list(range(40))[::-1]

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2, yarn with mscale": ("qwen2", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "qwen2, yarn not truncated": ("qwen2", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0}}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied, bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "gemma3": ("gemma3", {}),
    "gemma3, one head": ("gemma3", {"num_key_value_heads": 1, "head_dim": 64}),
    "gemma3, soft caps": ("gemma3", {"final_logit_softcapping": 5.0}),
    "gemma3, untied": ("gemma3", {"tie_word_embeddings": False}),
    "gemma3, linear rope": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}


class Case:
    """One model on disk and what transformers computes with it."""

    def __init__(self, name: str, folder: Path) -> None:
        family, settings = MODELS[name]
        self.model = make_model(family, **settings)
        self.folder = save_llama(folder, self.model)
        with torch.inference_mode():
            self.logits: torch.Tensor = self.model(torch.tensor([PROMPT])).logits[0]
            tokens = list(PROMPT)
            for _ in range(NUM_TOKENS):
                tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        self.tokens = tokens[len(PROMPT) :]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("attention_backend", ["reference", "sdpa", "tiled"])
def test_logits_agree_with_transformers(case: Case, attention_backend: str) -> None:
    runner = make_runner(case.folder, attention_backend=attention_backend)
    assert case.logits.std() > 0.5
    torch.testing.assert_close(runner.logits(PROMPT), case.logits, rtol=1e-4, atol=3e-4)


def test_greedy_tokens_agree_whole_in_chunks_and_behind_a_cached_prefix(case: Case) -> None:
    runner = make_runner(case.folder)
    assert len(set(case.tokens)) > 2
    for chunk_size in (None, 1, 7, 33):
        outputs = generate(runner, {"a": PROMPT}, NUM_TOKENS, block_ids={"a": BLOCKS[:6]}, chunk_size=chunk_size)
        assert outputs == {"a": case.tokens}, f"chunks of {chunk_size}"
    other = [*PROMPT[:48], 3, 1, 4]
    generate(runner, {"other": other}, 2, block_ids={"other": [5, 6, 7, 8]})
    outputs = generate(runner, {"a": PROMPT}, NUM_TOKENS, block_ids={"a": [5, 6, 7, 20, 21, 22]}, num_cached=48)
    assert outputs == {"a": case.tokens}


def test_greedy_tokens_agree_in_a_batch_of_different_lengths(case: Case) -> None:
    runner = make_runner(case.folder)
    prompts = {"a": PROMPT, "b": PROMPT[:3], "c": PROMPT[:20], "d": PROMPT[:45]}
    blocks = {name: BLOCKS[index * 8 : index * 8 + 8] for index, name in enumerate(prompts)}
    outputs = generate(runner, prompts, NUM_TOKENS, block_ids=blocks, chunk_size=30)
    assert outputs["a"] == case.tokens
    for name in ("b", "d"):
        alone = generate(runner, {name: prompts[name]}, NUM_TOKENS, block_ids=blocks)
        assert alone[name] == outputs[name]


@pytest.mark.parametrize(
    "name", ["mistral", "qwen2", "qwen2, tied", "qwen3", "qwen3, tied, bias", "gemma3", "gemma3, one head"]
)
def test_gguf_file_gives_the_logits_of_the_folder(tmp_path: Path, name: str) -> None:
    family, settings = MODELS[name]
    if family == "gemma3":  # the files do not say by what scores are divided; all but the largest take the head size
        settings = {**settings, "query_pre_attn_scalar": settings.get("head_dim", 32)}
    model = make_model(family, **settings)
    runner = make_runner(save_llama_gguf(tmp_path / "m.gguf", model))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(runner.logits(PROMPT), expected, rtol=1e-4, atol=3e-4)


def test_yarn_of_a_gguf_file_agrees_with_transformers(tmp_path: Path) -> None:
    model = make_model("qwen3", rope_parameters=YARN)
    metadata = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 64,
    }
    runner = make_runner(save_llama_gguf(tmp_path / "m.gguf", model, metadata=metadata))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(runner.logits(PROMPT), expected, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_tokens_before_every_window_do_not_matter_and_those_inside_do(tmp_path: Path, family: str) -> None:
    windows = {"layer_types": ["sliding_attention"] * 3} if family == "gemma3" else {}
    runner = make_runner(save_llama(tmp_path, make_model(family, **windows)))
    reach = 3 * 23  # three layers, each passes on what 23 earlier keys hold
    prompt = [*PROMPT, *PROMPT[:30]]
    last = runner.logits(prompt)[-1]
    outside, inside = [*prompt], [*prompt]
    outside[len(prompt) - 2 - reach] = (outside[len(prompt) - 2 - reach] + 1) % 128
    inside[len(prompt) - 1 - reach] = (inside[len(prompt) - 1 - reach] + 1) % 128
    torch.testing.assert_close(runner.logits(outside)[-1], last, rtol=1e-5, atol=1e-5)
    assert not torch.equal(runner.logits(inside)[-1], last)


def test_bf16_of_gemma_errs_no_more_than_transformers_in_bf16(tmp_path: Path) -> None:
    model = make_model("gemma3")
    folder = save_llama(tmp_path, model)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
        theirs = model.to(torch.bfloat16)(torch.tensor([PROMPT])).logits[0].float()
    ours = make_runner(folder, dtype="bf16").logits(PROMPT)
    assert (ours - expected).pow(2).mean() <= 1.5 * (theirs - expected).pow(2).mean()
