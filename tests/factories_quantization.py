"""Tiny models with a tokenizer, healthy or with planted outliers, and records of the quantization gate."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from factories_tokenizer import write_byte_level_folder
from safetensors.torch import save_file

from engine.chat_template import ChatTokenizer
from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.quantization_gate import GateFigure, GateKey, GateRecord
from eval.benches.bench_quantization import QuantizationOptions, RealText, measure_quantization
from eval.datasets import Dataset
from eval.quantization import QuantizationReport
from eval.samples import Case, Chunk

HIDDEN, FFN, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 64, 2, 4, 2, 8
WINDOW = 512
_SUBJECTS = ("tides", "sourdough", "lighthouses", "bees", "glaciers", "railways", "violins")
_VERBS = ("love", "fear", "teach", "forget", "repair")


def save_tiny_llama(folder: Path, *, seed: int = 7, key_outlier: float = 0.0, weight_outlier: float = 0.0) -> Path:
    """A Hugging Face folder: byte-level tokenizer, config, random weights.

    Args:
        key_outlier: bias of two elements of every key. Softmax does not see what all keys share, so the model computes
            nearly the same, but a key's row has one element that dwarfs the others.
        weight_outlier: added to one column of every ``down_proj`` whose input is dead, so likewise without effect.
    """
    write_byte_level_folder(folder)
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
        # the slowest pair of elements hardly turns within the window, so a bias on it stays what all keys share
        "rope_theta": 1e8,
        "attention_bias": True,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 2.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul(scale / math.sqrt(shape[-1]))

    weights = {
        "model.embed_tokens.weight": random(vocab_size, HIDDEN),
        "lm_head.weight": random(vocab_size, HIDDEN, scale=6.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        key_bias = torch.zeros(NUM_KV_HEADS, HEAD_DIM)
        key_bias[:, HEAD_DIM // 2 - 1] = key_outlier
        gate, up, down = random(FFN, HIDDEN), random(FFN, HIDDEN), random(HIDDEN, FFN)
        gate[0] = up[0] = 0.0
        down[:, 0] = weight_outlier
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": random(NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": random(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": random(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": random(HIDDEN, NUM_HEADS * HEAD_DIM),
            f"{prefix}.self_attn.q_proj.bias": torch.zeros(NUM_HEADS * HEAD_DIM),
            f"{prefix}.self_attn.k_proj.bias": key_bias.flatten(),
            f"{prefix}.self_attn.v_proj.bias": torch.zeros(NUM_KV_HEADS * HEAD_DIM),
            f"{prefix}.self_attn.o_proj.bias": torch.zeros(HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": down,
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(weights, folder / "model.safetensors")
    return folder


def make_config(
    model: Path, *, quantization: Any = "none", kv_cache_dtype: Any = "auto", force: bool = False, **changes: Any
) -> EngineConfig:
    """An engine in fp32 with a small KV cache."""
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype="fp32", quantization=quantization, force_quantization=force),
        cache=CacheConfig(num_blocks=64, kv_cache_dtype=kv_cache_dtype),
        **changes,
    )


def make_gate_key(**changes: str) -> GateKey:
    """A key of nothing real."""
    fields = {"weights_digest": "ab" * 32, "quantization": "int8", "dtype": "fp32", "code_version": "cd" * 32}
    return GateKey(**(fields | changes))


def make_gate_record(key: GateKey, *, passes: bool, max_length: int = 2048) -> GateRecord:
    """A record with a figure on each side."""
    perplexity = 0.001 if passes else 0.5
    return GateRecord(
        key=key,
        model="tiny",
        date="2026-01-01T00:00:00+00:00",
        max_length=max_length,
        figures=[
            GateFigure(name="top-1 agreement", value=0.99, limit=0.9, bound="at least"),
            GateFigure(name="perplexity increase", value=perplexity, limit=0.03, bound="at most"),
        ],
    )


TEXT = " ".join(
    f"Chapter {number} deals with {subject}, and lists {number * 7 % 23} rules for those who {verb} it."
    for number in range(1, 60)
    for subject, verb in [(_SUBJECTS[number % 7], _VERBS[number % 5])]
)
"""Prose of some thousand tokens."""


def measure_tiny(model: Path, *, num_cases: int = 0, **options: Any) -> tuple[QuantizationReport, GateRecord]:
    """One small run of the gate on a model of ``save_tiny_llama``."""
    settings: dict[str, Any] = {"max_length": 200, "num_texts": 4, "needles_per_cell": 1, "depths": (0.2, 0.8)}
    cases = [
        Case(
            id=f"case-{place}",
            question="Which chapter?",
            answers=[str(place)],
            chunks=[Chunk(id="a", text=f"Chapter {place}.", gold=True), Chunk(id="b", text="Nothing. " * 300)],
        )
        for place in range(num_cases)
    ]
    dataset = Dataset("cases.jsonl", "0" * 64, cases, num_cases) if cases else None
    chosen = QuantizationOptions(model=str(model), dtype="fp32", **(settings | options))
    return measure_quantization(chosen, RealText("chapters", TEXT), dataset)
