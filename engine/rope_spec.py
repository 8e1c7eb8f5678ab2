"""How a model turns positions into angles, and the ways in which checkpoints say so.

The scalings stretch a model to positions that it was not trained on:

- ``linear`` divides all frequencies by ``factor``.
- ``llama3`` keeps the fast frequencies and divides the slow ones, by how often each turns within the pre-training.
- ``yarn`` blends likewise, between two numbers of turns, and makes the attention sharper: rotated queries and keys are
  multiplied by ``attention_factor``.
- ``dynamic`` changes nothing within the window of the configuration, and that is the window which is served: beyond
  it the frequencies would depend on how long a prompt has become, and cached keys with them.
"""

import hashlib
import math
from dataclasses import asdict, dataclass
from typing import Literal

from engine.model_settings import Settings

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions become angles: ``angle = position * inv_freq[i]``."""

    theta: float
    """Base of the frequencies."""
    type: RopeType = "default"
    factor: float = 1.0
    """``linear``: all frequencies are divided by it. ``llama3`` and ``yarn``: the low ones."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """``yarn``: frequencies that turn more often within the pre-training are kept."""
    beta_slow: float = 1.0
    """``yarn``: those that turn less often are divided."""
    is_truncated: bool = True
    """``yarn``: the borders between the two are rounded outwards to whole frequencies."""
    attention_factor: float = 1.0
    """Of rotated queries and rotated keys alike."""
    original_max_position: int = 0
    """``llama3`` and ``yarn``: positions of the pre-training, from which "low" and "high" are judged."""
    frequency_divisors: tuple[float, ...] | None = None
    """One divisor per frequency, as GGUF files store a scaling that was worked out before; ``type`` is ``default``."""

    @property
    def key(self) -> str:
        """All settings in one short text, equal only for equal angles: part of the prefix cache's key."""
        text = repr(sorted(asdict(self).items()))
        return f"{self.type}-theta{self.theta:g}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def stretched_max_position(self) -> int:
        """Positions that ``yarn`` stretches the pre-training to; 0 for all others, whose window is configured."""
        return int(self.original_max_position * self.factor) if self.type == "yarn" else 0


def rope_from_hf_config(settings: Settings) -> RopeSpec:
    """The one scaling of a ``config.json``, in the new form (``rope_parameters``) or the old ones."""
    values = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    return rope_from_hf_values(Settings(values, settings.path), settings, settings.number("rope_theta", 10_000.0))


def rope_from_hf_values(scaling: Settings, settings: Settings, default_theta: float) -> RopeSpec:
    """One scaling; ``settings`` are those of the whole model, where some files have what belongs to the scaling."""
    theta = scaling.number("rope_theta", default_theta)
    # Llama 2 era files say "type", later ones "rope_type".
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0)) != 1.0:
        raise settings.refuse("partial_rotary_factor", scaling.get("partial_rotary_factor"), "all of a head turns")
    if rope_type == "default":
        return RopeSpec(theta=theta)
    if rope_type == "linear":
        return RopeSpec(theta=theta, type="linear", factor=scaling.number("factor"))
    if rope_type == "dynamic":
        return RopeSpec(theta=theta, type="dynamic", factor=scaling.number("factor"))
    if rope_type == "llama3":
        return RopeSpec(
            theta=theta,
            type="llama3",
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position=_original_max_position(scaling, settings),
        )
    if rope_type == "yarn":
        return _yarn_from_hf(scaling, settings, theta)
    raise settings.refuse("rope_type", rope_type, "there are default, linear, dynamic, llama3, yarn")


def _original_max_position(scaling: Settings, settings: Settings) -> int:
    name = "original_max_position_embeddings"  # a value beside the scaling wins over the one inside
    source = settings if settings.get(name) is not None else scaling
    return source.size(name, settings.size("max_position_embeddings", 2048))


def _yarn_from_hf(scaling: Settings, settings: Settings, theta: float) -> RopeSpec:
    original = _original_max_position(scaling, settings)
    factor = scaling.number("factor", settings.size("max_position_embeddings", 2048) / original)
    attention_factor = scaling.optional_number("attention_factor")
    if attention_factor is None:
        sharp, total = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
        attention_factor = _sharpness(factor, 1.0)
        if sharp and total:
            attention_factor = _sharpness(factor, sharp) / _sharpness(factor, total)
    return RopeSpec(
        theta=theta,
        type="yarn",
        factor=factor,
        beta_fast=scaling.number("beta_fast", 0.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 0.0) or 1.0,
        is_truncated=bool(scaling.get("truncate", True)),
        attention_factor=attention_factor,
        original_max_position=original,
    )


def _sharpness(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rope_from_gguf(settings: Settings, prefix: str, frequency_divisors: tuple[float, ...] | None) -> RopeSpec:
    """The scaling of a GGUF file; ``prefix`` is what ``settings`` have lost of their names, for errors."""
    theta = settings.number("rope.freq_base", 10_000.0)
    scaling_type = settings.get("rope.scaling.type", "none")
    # Files of 2023 name the factor of linear scaling alone.
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0))
    if scaling_type == "linear" or (scaling_type == "none" and settings.get("rope.scale_linear")):
        return RopeSpec(theta=theta, type="linear", factor=factor, frequency_divisors=frequency_divisors)
    if scaling_type == "none":
        return RopeSpec(theta=theta, frequency_divisors=frequency_divisors)
    if scaling_type == "yarn" and frequency_divisors is None:
        if settings.number("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
            raise settings.refuse(
                f"{prefix}rope.scaling.yarn_log_multiplier", settings.get("rope.scaling.yarn_log_multiplier"), "only 0"
            )
        return RopeSpec(
            theta=theta,
            type="yarn",
            factor=factor,
            beta_fast=settings.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=_sharpness(factor, 1.0) * settings.number("rope.scaling.attn_factor", 1.0),
            original_max_position=settings.size("rope.scaling.original_context_length"),
        )
    raise settings.refuse(f"{prefix}rope.scaling.type", scaling_type, "there are none, linear, yarn")
