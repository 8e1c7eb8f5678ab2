"""What a checkpoint says about its model, the same for Hugging Face folders and GGUF files.

    config.json   --from_hf_config-->      ModelSpec  <--from_gguf_metadata--  GGUF key-values

Everything the forward pass does not do exactly is refused here, with the name of the setting, rather than ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelError
from engine.model_settings import Settings
from engine.rope_spec import RopeSpec, rope_from_gguf, rope_from_hf_config, rope_from_hf_values

Activation = Literal["silu", "gelu_tanh"]

# Architecture names of config.json and GGUF that our registry computes, by our name of them.
_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
_GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_GLOBAL_THETA = 1_000_000.0
_GEMMA3_WINDOW_PATTERN = 6
# Gemma 3 of 27 billion parameters, the one whose scores are not scaled by the size of its heads.
_GEMMA3_27B_LAYERS = 62
# What transformers takes where a config.json leaves a setting out; null in a file is something else.
_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Gemma3ForCausalLM": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_theta": _GEMMA3_GLOBAL_THETA,
        "rope_local_base_freq": _GEMMA3_LOCAL_THETA,
        "sliding_window_pattern": _GEMMA3_WINDOW_PATTERN,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes and settings of a decoder-only transformer."""

    architecture: str
    """Our name of it, a key of the model registry."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Positions that the model computes exactly: its window."""
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    """The output projection is the embedding table."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False
    """Query and key heads are normalised before they turn."""
    activation: Activation = "silu"
    """Of the gate of the MLP."""
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer the keys that a token sees, its own included; ``None``, and no entries at all, is full attention."""
    local_rope: RopeSpec | None = None
    """Of the layers with a window, where they turn otherwise than the others."""
    attention_scale: float | None = None
    """Factor of the scores; ``None`` is ``head_dim ** -0.5``."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    """Scores, or logits, become ``cap * tanh(x / cap)``."""
    embedding_scale: float = 1.0
    """Factor of the rows of the embedding table."""
    stored_norm_offset: float = 0.0
    """What has to be added to the weights of norms as the checkpoint stores them."""

    @property
    def num_kv_values_per_token(self) -> int:
        """Numbers that one token adds to the KV cache: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def window_of(self, layer: int) -> int | None:
        """Keys that a token sees in this layer; ``None`` is all of them."""
        return self.sliding_windows[layer] if self.sliding_windows else None


def spec_from_hf_config(config: Mapping[str, Any], path: Path) -> ModelSpec:
    """Read a ``config.json``, old (``rope_theta``, ``rope_scaling``) or new (``rope_parameters``).

    Raises:
        ModelError: a setting is missing, or asks for something our models do not compute.
    """
    names = Settings(config, path).get("architectures", [])
    name = next((name for name in names if name in _HF_ARCHITECTURES), None)
    if name is None:
        raise Settings(config, path).refuse("architectures", names, f"there are {', '.join(_HF_ARCHITECTURES)}")
    architecture = _HF_ARCHITECTURES[name]
    settings = Settings({**_HF_DEFAULTS[name], **config}, path)
    if settings.get("quantization_config"):
        method = settings.get("quantization_config").get("quant_method")
        raise settings.refuse("quantization_config", method, "only unquantized safetensors are read")
    if settings.get("use_bidirectional_attention", False):
        raise settings.refuse("use_bidirectional_attention", True, "only causal attention is computed")
    is_gemma = architecture == "gemma3"
    num_heads = settings.size("num_attention_heads")
    hidden_size = settings.size("hidden_size")
    head_dim = settings.size("head_dim", max(hidden_size // num_heads, 1))
    rope, local_rope = _gemma_ropes_from_hf(settings) if is_gemma else (rope_from_hf_config(settings), None)
    attention_bias = bool(settings.get("attention_bias", False)) and architecture != "qwen2"
    return _checked(
        ModelSpec(
            architecture=architecture,
            vocab_size=settings.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=settings.size("intermediate_size"),
            num_layers=settings.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=settings.size("num_key_value_heads", num_heads),
            head_dim=head_dim,
            max_position=max(settings.size("max_position_embeddings", 2048), rope.stretched_max_position),
            rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
            rope=rope,
            local_rope=local_rope,
            tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(settings.get("mlp_bias", False)),
            has_qk_norm=architecture in ("qwen3", "gemma3"),
            activation=_activation_from_hf(settings, is_gemma),
            sliding_windows=_windows_from_hf(settings, name),
            attention_scale=settings.number("query_pre_attn_scalar") ** -0.5 if is_gemma else None,
            attention_softcap=settings.optional_number("attn_logit_softcapping") if is_gemma else None,
            logit_softcap=settings.optional_number("final_logit_softcapping") if is_gemma else None,
            embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
            stored_norm_offset=1.0 if is_gemma else 0.0,
        ),
        path,
    )


def _activation_from_hf(settings: Settings, is_gemma: bool) -> Activation:
    name = settings.get("hidden_activation") or settings.get("hidden_act", "silu")
    if is_gemma and name == "gelu_pytorch_tanh":
        return "gelu_tanh"
    if is_gemma or name != "silu":
        expected = "gelu_pytorch_tanh" if is_gemma else "silu"
        raise settings.refuse("hidden_act", name, f"only {expected} is computed")
    return "silu"


def _windows_from_hf(settings: Settings, name: str) -> tuple[int | None, ...]:
    num_layers = settings.size("num_hidden_layers")
    if name == "LlamaForCausalLM" or settings.get("sliding_window") is None:
        return ()
    window = settings.size("sliding_window")
    if name == "MistralForCausalLM":
        return (window,) * num_layers
    if name != "Gemma3ForCausalLM" and not settings.get("use_sliding_window", False):
        return ()
    kinds = settings.get("layer_types")
    if kinds is None and name == "Gemma3ForCausalLM":
        return _pattern(window, settings.size("sliding_window_pattern"), num_layers)
    if kinds is None:
        first = int(settings.number("max_window_layers"))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise settings.refuse("layer_types", kinds, f"there are {num_layers} layers")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise settings.refuse("layer_types", kind, "there are sliding_attention, full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _pattern(window: int, period: int, num_layers: int) -> tuple[int | None, ...]:
    """Every ``period``-th layer sees everything, the others the window."""
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


def _gemma_ropes_from_hf(settings: Settings) -> tuple[RopeSpec, RopeSpec]:
    """Of the layers that see everything, and of those with a window."""
    by_kind = settings.get("rope_parameters") or {}
    full = by_kind.get("full_attention") or settings.get("rope_scaling") or {}
    local = by_kind.get("sliding_attention") or {}
    return (
        rope_from_hf_values(Settings(full, settings.path), settings, settings.number("rope_theta")),
        rope_from_hf_values(Settings(local, settings.path), settings, settings.number("rope_local_base_freq")),
    )


def spec_from_gguf_metadata(
    metadata: Mapping[str, Any],
    path: Path,
    *,
    tensor_shapes: Mapping[str, tuple[int, ...]],
    frequency_divisors: tuple[float, ...] | None,
) -> ModelSpec:
    """Read the key-values of a GGUF file.

    Args:
        metadata: as ``read_gguf_metadata`` returns it.
        path: for errors.
        tensor_shapes: names and shapes of its tensors, which tell about biases, tied embeddings and the vocabulary.
        frequency_divisors: values of its ``rope_freqs.weight``, if it has one.

    Raises:
        ModelError: a setting is missing, or asks for something our models do not compute.
    """
    name = metadata.get("general.architecture")
    if name not in _GGUF_ARCHITECTURES:
        raise Settings(metadata, path).refuse(
            "general.architecture", name, f"there are {', '.join(_GGUF_ARCHITECTURES)}"
        )
    architecture = _GGUF_ARCHITECTURES[name]
    is_gemma = architecture == "gemma3"
    prefix = f"{name}."
    settings = Settings(
        {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}, path
    )
    if settings.number("expert_count", 0) > 0:
        raise settings.refuse(f"{prefix}expert_count", settings.get("expert_count"), "only dense models are computed")
    num_heads = settings.size("attention.head_count")
    hidden_size = settings.size("embedding_length")
    num_layers = settings.size("block_count")
    head_dim = settings.size("attention.key_length", max(hidden_size // num_heads, 1))
    for setting in ("attention.value_length", "rope.dimension_count"):
        if settings.size(setting, head_dim) != head_dim:
            raise settings.refuse(prefix + setting, settings.get(setting), f"it must be the head size, {head_dim}")
    rope = rope_from_gguf(settings, prefix, frequency_divisors)
    max_position = max(settings.size("context_length", 2048), rope.stretched_max_position)
    windows = _windows_from_gguf(settings, architecture, num_layers)
    if not windows:
        # Which layers of another family have the window, the file does not say; inside it, all attention is full.
        max_position = min(max_position, settings.size("attention.sliding_window", max_position))
    embedding = tensor_shapes.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path} has no tensor token_embd.weight")
    scaled_head_dim = hidden_size // num_heads if num_layers == _GEMMA3_27B_LAYERS else head_dim
    return _checked(
        ModelSpec(
            architecture=architecture,
            vocab_size=embedding[0],
            hidden_size=hidden_size,
            intermediate_size=settings.size("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=settings.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position=max_position,
            rms_norm_eps=settings.number("attention.layer_norm_rms_epsilon", 1e-5),
            rope=rope,
            local_rope=RopeSpec(theta=settings.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA)) if is_gemma else None,
            tie_word_embeddings="output.weight" not in tensor_shapes,
            qkv_bias="blk.0.attn_q.bias" in tensor_shapes,
            o_bias="blk.0.attn_output.bias" in tensor_shapes,
            mlp_bias="blk.0.ffn_down.bias" in tensor_shapes,
            has_qk_norm="blk.0.attn_q_norm.weight" in tensor_shapes,
            activation="gelu_tanh" if is_gemma else "silu",
            sliding_windows=windows,
            attention_scale=scaled_head_dim**-0.5 if is_gemma else None,
            attention_softcap=settings.optional_number("attn_logit_softcapping") if is_gemma else None,
            logit_softcap=settings.optional_number("final_logit_softcapping") if is_gemma else None,
            embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        ),
        path,
    )


def _windows_from_gguf(settings: Settings, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if settings.get("attention.sliding_window") is None or architecture not in ("llama", "gemma3"):
        return ()
    window = settings.size("attention.sliding_window")
    if architecture == "llama":  # Mistral: all layers alike
        return (window,) * num_layers
    pattern = settings.get("attention.sliding_window_pattern", _GEMMA3_WINDOW_PATTERN)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise settings.refuse("attention.sliding_window_pattern", pattern, f"there are {num_layers} layers")
        return tuple(window if has_window else None for has_window in pattern)
    return _pattern(window, settings.size("attention.sliding_window_pattern", _GEMMA3_WINDOW_PATTERN), num_layers)


def _checked(spec: ModelSpec, path: Path) -> ModelSpec:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{path}: {spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly")
    if spec.head_dim % 2:
        raise ModelError(f"{path}: rotary embedding needs an even head size, got {spec.head_dim}")
    divisors = spec.rope.frequency_divisors
    if divisors is not None and len(divisors) != spec.head_dim // 2:
        raise ModelError(f"{path}: {len(divisors)} rope_freqs for heads of {spec.head_dim}")
    for rope in (spec.rope, spec.local_rope):
        if rope is not None and (rope.theta <= 0 or rope.factor <= 0):
            raise ModelError(f"{path}: rope base {rope.theta} and factor {rope.factor} must be positive")
    return spec
