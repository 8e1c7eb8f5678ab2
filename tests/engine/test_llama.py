"""The Llama model on tiny random weights against transformers, in fp32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories_model import make_llama, make_runner, save_llama, save_llama_gguf

PROMPT = torch.randint(0, 128, (70,), generator=torch.Generator().manual_seed(1)).tolist()

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _expected_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.mark.parametrize("attention_backend", ["reference", "sdpa", "tiled"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
        {"rope_parameters": LLAMA3_ROPE},
        {"rms_norm_eps": 0.01},
    ],
    ids=lambda settings: ",".join(settings) or "untied",
)
def test_logits_agree_with_transformers(tmp_path: Path, settings: dict[str, Any], attention_backend: str) -> None:
    model = make_llama(**settings)
    runner = make_runner(save_llama(tmp_path, model), attention_backend=attention_backend)
    expected = _expected_logits(model, PROMPT)
    assert expected.std() > 1
    torch.testing.assert_close(runner.logits(PROMPT), expected, rtol=1e-4, atol=2e-4)


def test_logits_agree_with_transformers_beyond_one_attention_tile(tmp_path: Path) -> None:
    model = make_llama()
    prompt = torch.randint(0, 128, (400,), generator=torch.Generator().manual_seed(2)).tolist()
    runner = make_runner(save_llama(tmp_path, model), attention_backend="tiled")
    torch.testing.assert_close(runner.logits(prompt), _expected_logits(model, prompt), rtol=1e-4, atol=5e-4)


def test_mistral_folder_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=None,
        initializer_range=0.2,
    )
    model = MistralForCausalLM(config).eval()
    runner = make_runner(save_llama(tmp_path, model))
    torch.testing.assert_close(runner.logits(PROMPT), _expected_logits(model, PROMPT), rtol=1e-4, atol=2e-4)


def test_gguf_file_agrees_with_transformers(tmp_path: Path) -> None:
    model = make_llama()
    runner = make_runner(save_llama_gguf(tmp_path / "m.gguf", model))
    torch.testing.assert_close(runner.logits(PROMPT), _expected_logits(model, PROMPT), rtol=1e-4, atol=2e-4)


def test_gguf_frequency_divisors_act_like_the_scaling_they_come_from(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = make_llama(rope_parameters=LLAMA3_ROPE)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config)
    plain = 1.0 / (10_000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    divisors = (plain / scaled).numpy().astype(np.float32)
    file = save_llama_gguf(tmp_path / "m.gguf", model, extra_tensors={"rope_freqs.weight": (divisors, "F32")})
    expected = _expected_logits(model, PROMPT)
    torch.testing.assert_close(make_runner(file).logits(PROMPT), expected, rtol=1e-4, atol=2e-4)


def test_gguf_linear_scaling_agrees_with_transformers(tmp_path: Path) -> None:
    model = make_llama(rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0})
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    runner = make_runner(save_llama_gguf(tmp_path / "m.gguf", model, metadata=metadata))
    torch.testing.assert_close(runner.logits(PROMPT), _expected_logits(model, PROMPT), rtol=1e-4, atol=2e-4)


def test_bf16_errs_no_more_than_transformers_in_bf16(tmp_path: Path) -> None:
    model = make_llama()
    folder = save_llama(tmp_path, model)
    expected = _expected_logits(model, PROMPT)
    actual = make_runner(folder, dtype="bf16").logits(PROMPT)
    theirs = _expected_logits(model.to(torch.bfloat16), PROMPT).float()
    assert (actual - expected).pow(2).mean() <= 1.5 * (theirs - expected).pow(2).mean()
