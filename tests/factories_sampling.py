"""Sequences for logits processors, and a tiny model with random weights that an engine serves with its tokenizer."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from factories_model import make_scheduled
from factories_tokenizer import write_byte_level_folder
from safetensors.torch import save_file

from engine.chat_template import ChatTokenizer
from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from engine.scheduler_output import ScheduledSequence

HIDDEN, FFN, NUM_HEADS = 32, 64, 4


def make_sampled(
    sampling: SamplingParams, *, request_id: str = "a", prompt: Sequence[int] = (1, 2), output: Sequence[int] = ()
) -> ScheduledSequence:
    """A sequence whose next token is to be chosen."""
    return make_scheduled(
        request_id,
        token_ids=[1],
        block_ids=[0],
        sampling=sampling,
        num_output_tokens=len(output),
        known_token_ids=[*prompt, *output],
    )


def write_tiny_model(folder: Path, *, num_spare_logits: int = 0) -> Path:
    """A Hugging Face folder: byte-level tokenizer, one Llama layer of random weights, window of 512.

    ``num_spare_logits`` are logits that stand for no token, as many models have them.
    """
    write_byte_level_folder(folder)
    vocab_size = ChatTokenizer.from_path(folder).tokenizer.vocab_size + num_spare_logits
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul(2.0 / math.sqrt(shape[-1]))

    prefix = "model.layers.0"
    weights = {
        "model.embed_tokens.weight": random(vocab_size, HIDDEN),
        "lm_head.weight": random(vocab_size, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        **{f"{prefix}.self_attn.{name}_proj.weight": random(HIDDEN, HIDDEN) for name in "qkvo"},
        f"{prefix}.mlp.gate_proj.weight": random(FFN, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": random(FFN, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": random(HIDDEN, FFN),
        f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def load_engine(path: Path, *, num_blocks: int = 256, block_size: int = 8) -> LLMEngine:
    """An engine in this process, fp32."""
    return LLMEngine.from_config(
        EngineConfig(
            model=ModelConfig(model=str(path), dtype="fp32"),
            cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
            num_threads=1,
        )
    )
