"""Builds tiny models of every family on disk (safetensors, GGUF), steps for the model runner, attention batches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.model_runner import ModelRunner
from engine.model_store import cache_dir
from engine.sampling_params import SamplingParams
from engine.scheduler_output import ScheduledSequence, SchedulerOutput
from kernels.attention import AttentionMetadata

GREEDY = SamplingParams(temperature=0.0)
VOCAB_SIZE = 128


def make_llama(**overrides: Any) -> Any:
    """A transformers Llama with random weights, 2 layers, 4 query and 2 KV heads of 64, eval mode, fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        # large enough for logits that differ, so that greedy tokens are not a matter of rounding
        "initializer_range": 0.2,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    return _randomised(LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})))


def make_model(family: str, **overrides: Any) -> Any:
    """A transformers model of ``llama``, ``mistral``, ``qwen2``, ``qwen3`` or ``gemma3`` as small as ``make_llama``.

    Where the family has a window it is shorter than the prompts of the tests.
    """
    import transformers

    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
    }
    if family in ("mistral", "gemma3"):
        settings["sliding_window"] = 24
    if family == "gemma3":
        settings |= {"query_pre_attn_scalar": 24, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig" if family == "gemma3" else f"{name}Config")
    return _randomised(getattr(transformers, f"{name}ForCausalLM")(config(**{**settings, **overrides})))


def _randomised(model: Any) -> Any:
    """Norms and biases that do something; Gemma adds one to what its norms store."""
    is_gemma = "Gemma" in type(model).__name__
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(-0.5 if is_gemma else 0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            elif is_gemma and "embed_tokens" in name:
                parameter.mul_(0.25)  # scaled up and tied, it would make each token predict itself
    return model.eval()


def save_llama(folder: Path, model: Any | None = None, **save_options: Any) -> Path:
    """Write a model (by default ``make_llama()``) as config.json and safetensors."""
    (model if model is not None else make_llama()).save_pretrained(folder, **save_options)
    return folder


def save_llama_gguf(
    file: Path,
    model: Any,
    *,
    tensor_type: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, tuple[np.ndarray, str]] | None = None,
    skip: Sequence[str] = (),
    split_max_tensors: int = 0,
) -> Path:
    """Write a transformers model as GGUF, as llama.cpp's converter does.

    Args:
        tensor_type: of all matrices; vectors are F32.
        metadata: more key-values, or other values of those written anyway.
        extra_tensors: GGUF name to raw data and type, in addition to or in place of the model's own.
        skip: GGUF names of tensors to leave out.
        split_max_tensors: tensors per part; 0 is one file. The parts are named ``file-00001-of-0000N.gguf``.
    """
    config = model.config
    name = config.model_type.removesuffix("_text")
    name = "llama" if name == "mistral" else name
    is_gemma = name == "gemma3"
    writer = gguf.GGUFWriter(file, name, split_max_tensors=split_max_tensors)
    rope = config.rope_parameters["full_attention"] if is_gemma else config.rope_parameters
    values: dict[str, Any] = {
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.key_length": model.model.layers[0].self_attn.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{name}.rope.freq_base": float(rope["rope_theta"]),
        f"{name}.rope.dimension_count": model.model.layers[0].self_attn.head_dim,
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(config.vocab_size)],
    }
    if name == "llama" and getattr(config, "sliding_window", None):
        values[f"{name}.attention.sliding_window"] = config.sliding_window
    if is_gemma:
        values[f"{name}.attention.sliding_window"] = config.sliding_window
        is_sliding = [kind == "sliding_attention" for kind in config.layer_types]
        values[f"{name}.attention.sliding_window_pattern"] = is_sliding
    values |= metadata or {}
    for key, value in values.items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for weight, parameter in model.state_dict().items():
        if weight == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.float().numpy()
        if name == "llama" and ".q_proj." in weight:
            array = interleave(array, config.num_attention_heads)
        elif name == "llama" and ".k_proj." in weight:
            array = interleave(array, config.num_key_value_heads)
        elif is_gemma and weight.endswith("norm.weight"):
            array = array + np.float32(1)
        kind = tensor_type if array.ndim > 1 else "F32"
        tensors[gguf_name(weight, name)] = (quantize(array, gguf.GGMLQuantizationType[kind]), kind)
    tensors |= extra_tensors or {}
    for tensor, (raw, kind) in tensors.items():
        if tensor not in skip:
            writer.add_tensor(tensor, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def interleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter: halves of a head become neighbours."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def gguf_name(name: str, architecture: str = "llama") -> str:
    """The GGUF name of a Hugging Face tensor name."""
    is_gemma = architecture == "gemma3"
    for old, new in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "post_attention_norm" if is_gemma else "ffn_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ):
        name = name.replace(old, new)
    return name


def make_engine_config(
    *,
    dtype: Any = "fp32",
    num_blocks: int = 64,
    block_size: int = 16,
    max_model_len: int | None = None,
    num_threads: int | None = None,
    quantization: Any = "none",
) -> EngineConfig:
    """A configuration with a small KV cache."""
    return EngineConfig(
        model=ModelConfig(dtype=dtype, max_model_len=max_model_len, quantization=quantization),
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
        num_threads=num_threads,
    )


def make_runner(path: Path, *, attention_backend: str | None = None, **config: Any) -> ModelRunner:
    """A model runner with a small KV cache."""
    return ModelRunner(make_engine_config(**config), path, attention_backend=attention_backend)


def make_scheduled(
    request_id: str = "a",
    *,
    token_ids: Sequence[int],
    start: int = 0,
    block_ids: Sequence[int],
    sampling: SamplingParams = GREEDY,
    needs_sample: bool = True,
    num_output_tokens: int = 0,
    known_token_ids: Sequence[int] = (),
) -> ScheduledSequence:
    """One sequence of a step."""
    return ScheduledSequence(
        request_id=request_id,
        token_ids=list(token_ids),
        start=start,
        block_ids=list(block_ids),
        sampling=sampling,
        needs_sample=needs_sample,
        num_output_tokens=num_output_tokens,
        known_token_ids=known_token_ids,
    )


def generate(
    runner: ModelRunner,
    prompts: Mapping[str, Sequence[int]],
    num_tokens: int,
    *,
    block_ids: Mapping[str, Sequence[int]],
    num_cached: int = 0,
    chunk_size: int | None = None,
    sampling: SamplingParams | Mapping[str, SamplingParams] = GREEDY,
) -> dict[str, list[int]]:
    """Drive a runner as the scheduler would: prompts together, in chunks, then one token each per step.

    Args:
        prompts: request id to prompt tokens.
        num_tokens: output tokens of each.
        block_ids: request id to block table, long enough for prompt and output.
        num_cached: leading tokens whose KV is in those blocks already.
        chunk_size: most prompt tokens of one sequence in one step; ``None`` is all.
    """
    known = {request_id: list(prompt) for request_id, prompt in prompts.items()}
    computed = dict.fromkeys(prompts, num_cached)
    outputs: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    while any(len(output) < num_tokens for output in outputs.values()):
        scheduled = []
        for request_id, tokens in known.items():
            if len(outputs[request_id]) == num_tokens:
                continue
            start = computed[request_id]
            new = tokens[start : start + chunk_size] if chunk_size else tokens[start:]
            computed[request_id] += len(new)
            scheduled.append(
                make_scheduled(
                    request_id,
                    token_ids=new,
                    start=start,
                    block_ids=block_ids[request_id],
                    sampling=sampling if isinstance(sampling, SamplingParams) else sampling[request_id],
                    needs_sample=computed[request_id] == len(tokens),
                    num_output_tokens=len(outputs[request_id]),
                    known_token_ids=tokens,
                )
            )
        result = runner.execute(SchedulerOutput(scheduled=scheduled))
        assert not result.failed, result.failed
        for request_id, token in result.sampled.items():
            known[request_id].append(token)
            outputs[request_id].append(token)
    return outputs


class AttentionCase:
    """A random mixed batch over a random paged cache."""

    def __init__(
        self,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        magnitude: float = 1.0,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(query_lens) * 1009 + sum(context_lens))
        seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
        shuffled = torch.randperm(sum(num_blocks) + 2, generator=generator).tolist()
        tables, used = [], 0
        for count in num_blocks:
            tables.append(shuffled[used : used + count])
            used += count

        def rand(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * magnitude).to(dtype)

        num_tokens = sum(query_lens)
        self.kv_cache = rand(2, len(shuffled), block_size, num_kv_heads, head_dim)
        # q, k, v as a fused projection leaves them: slices of one tensor
        qkv = rand(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        self.q, self.k, self.v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        self.metadata = AttentionMetadata.build(query_lens, context_lens, tables, block_size)
        self.scale = head_dim**-0.5
        slots = self.kv_cache.flatten(1, 2)
        slots[0, self.metadata.slot_mapping] = self.k
        slots[1, self.metadata.slot_mapping] = self.v


def default_model_path() -> Path:
    """The default model's GGUF file in the user's cache; skips the test where it is not."""
    path = cache_dir() / "models" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip("the default model is not in the cache; `firsttoken models pull` fetches it")
    return path
