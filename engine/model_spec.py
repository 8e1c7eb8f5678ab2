"""What a checkpoint says about its model, the same for Hugging Face folders and GGUF files.

    config.json   --from_hf_config-->      ModelSpec  <--from_gguf_metadata--  GGUF key-values

Everything the forward pass does not do exactly is refused here, with the name of the setting, rather than ignored.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelError

RopeType = Literal["default", "linear", "llama3"]

# Architecture names of config.json and GGUF that our registry computes, by our name of them.
_HF_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"}
_GGUF_ARCHITECTURES = {"llama": "llama"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions become angles: ``angle = position * inv_freq[i]``."""

    theta: float
    """Base of the frequencies."""
    type: RopeType = "default"
    factor: float = 1.0
    """``linear``: all frequencies are divided by it. ``llama3``: the low ones."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    """``llama3``: positions of the pre-training, from which "low" and "high" are judged."""
    frequency_divisors: tuple[float, ...] | None = None
    """One divisor per frequency, as GGUF files store a scaling that was worked out before; ``type`` is ``default``."""

    @property
    def key(self) -> str:
        """All settings in one short text, equal only for equal angles: part of the prefix cache's key."""
        text = repr(sorted(asdict(self).items()))
        return f"{self.type}-theta{self.theta:g}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


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

    @property
    def num_kv_values_per_token(self) -> int:
        """Numbers that one token adds to the KV cache: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


class _Settings:
    """Reads settings of one file, and names file and setting when something is wrong with them."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"{self.path} has no {name}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {name} must be a number, got {value!r}")
        if value < 0:
            raise ModelError(f"{self.path}: {name} must not be negative, got {value!r}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.path}: {name} must be a positive integer, got {value!r}")
        return int(value)

    def refuse(self, name: str, value: object, supported: str) -> ModelError:
        return ModelError(f"{self.path}: {name} {value!r} is not supported; {supported}")


def spec_from_hf_config(config: Mapping[str, Any], path: Path) -> ModelSpec:
    """Read a ``config.json``, old (``rope_theta``, ``rope_scaling``) or new (``rope_parameters``).

    Raises:
        ModelError: a setting is missing, or asks for something our models do not compute.
    """
    settings = _Settings(config, path)
    names = settings.get("architectures", [])
    architecture = next((_HF_ARCHITECTURES[name] for name in names if name in _HF_ARCHITECTURES), None)
    if architecture is None:
        raise settings.refuse("architectures", names, f"there are {', '.join(_HF_ARCHITECTURES)}")
    if settings.get("quantization_config"):
        method = settings.get("quantization_config").get("quant_method")
        raise settings.refuse("quantization_config", method, "only unquantized safetensors are read")
    if settings.get("hidden_act", "silu") != "silu":
        raise settings.refuse("hidden_act", settings.get("hidden_act"), "only silu is computed")
    num_heads = settings.size("num_attention_heads")
    hidden_size = settings.size("hidden_size")
    max_position = settings.size("max_position_embeddings", 2048)
    # Inside its window, sliding attention is full attention.
    max_position = min(max_position, settings.size("sliding_window", max_position))
    attention_bias = bool(settings.get("attention_bias", False))
    return _checked(
        ModelSpec(
            architecture=architecture,
            vocab_size=settings.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=settings.size("intermediate_size"),
            num_layers=settings.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=settings.size("num_key_value_heads", num_heads),
            head_dim=settings.size("head_dim", max(hidden_size // num_heads, 1)),
            max_position=max_position,
            rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
            rope=_rope_from_hf_config(settings),
            tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(settings.get("mlp_bias", False)),
        ),
        path,
    )


def _rope_from_hf_config(settings: _Settings) -> RopeSpec:
    values = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    # Llama 2 era files say "type", later ones "rope_type"; theta lives beside or inside.
    scaling = _Settings({**values}, settings.path)
    theta = scaling.number("rope_theta", settings.number("rope_theta", 10_000.0))
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0)) != 1.0:
        raise settings.refuse("partial_rotary_factor", scaling.get("partial_rotary_factor"), "all of a head turns")
    if rope_type == "default":
        return RopeSpec(theta=theta)
    if rope_type == "linear":
        return RopeSpec(theta=theta, type="linear", factor=scaling.number("factor"))
    if rope_type == "llama3":
        return RopeSpec(
            theta=theta,
            type="llama3",
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position=scaling.size("original_max_position_embeddings"),
        )
    raise settings.refuse("rope_type", rope_type, "there are default, linear, llama3")


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
        raise _Settings(metadata, path).refuse(
            "general.architecture", name, f"there are {', '.join(_GGUF_ARCHITECTURES)}"
        )
    prefix = f"{name}."
    settings = _Settings(
        {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}, path
    )
    if settings.number("expert_count", 0) > 0:
        raise settings.refuse(f"{prefix}expert_count", settings.get("expert_count"), "only dense models are computed")
    num_heads = settings.size("attention.head_count")
    hidden_size = settings.size("embedding_length")
    head_dim = settings.size("attention.key_length", max(hidden_size // num_heads, 1))
    for setting in ("attention.value_length", "rope.dimension_count"):
        if settings.size(setting, head_dim) != head_dim:
            raise settings.refuse(prefix + setting, settings.get(setting), f"it must be the head size, {head_dim}")
    max_position = settings.size("context_length", 2048)
    max_position = min(max_position, settings.size("attention.sliding_window", max_position))
    embedding = tensor_shapes.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path} has no tensor token_embd.weight")
    return _checked(
        ModelSpec(
            architecture=_GGUF_ARCHITECTURES[name],
            vocab_size=embedding[0],
            hidden_size=hidden_size,
            intermediate_size=settings.size("feed_forward_length"),
            num_layers=settings.size("block_count"),
            num_heads=num_heads,
            num_kv_heads=settings.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position=max_position,
            rms_norm_eps=settings.number("attention.layer_norm_rms_epsilon", 1e-5),
            rope=_rope_from_gguf(settings, prefix, frequency_divisors),
            tie_word_embeddings="output.weight" not in tensor_shapes,
            qkv_bias="blk.0.attn_q.bias" in tensor_shapes,
            o_bias="blk.0.attn_output.bias" in tensor_shapes,
            mlp_bias="blk.0.ffn_down.bias" in tensor_shapes,
        ),
        path,
    )


def _rope_from_gguf(settings: _Settings, prefix: str, frequency_divisors: tuple[float, ...] | None) -> RopeSpec:
    theta = settings.number("rope.freq_base", 10_000.0)
    scaling_type = settings.get("rope.scaling.type", "none")
    # Files of 2023 name the factor of linear scaling alone.
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0))
    if scaling_type == "linear" or (scaling_type == "none" and settings.get("rope.scale_linear")):
        return RopeSpec(theta=theta, type="linear", factor=factor, frequency_divisors=frequency_divisors)
    if scaling_type == "none":
        return RopeSpec(theta=theta, frequency_divisors=frequency_divisors)
    raise settings.refuse(f"{prefix}rope.scaling.type", scaling_type, "there are none, linear")


def _checked(spec: ModelSpec, path: Path) -> ModelSpec:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{path}: {spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly")
    if spec.head_dim % 2:
        raise ModelError(f"{path}: rotary embedding needs an even head size, got {spec.head_dim}")
    divisors = spec.rope.frequency_divisors
    if divisors is not None and len(divisors) != spec.head_dim // 2:
        raise ModelError(f"{path}: {len(divisors)} rope_freqs for heads of {spec.head_dim}")
    if spec.rope.theta <= 0 or spec.rope.factor <= 0:
        raise ModelError(f"{path}: rope base {spec.rope.theta} and factor {spec.rope.factor} must be positive")
    return spec
