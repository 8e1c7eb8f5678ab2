"""The building blocks of the models: linear layers, fused projections, the gated MLP, the frequencies of RoPE.

They hold tensors and no autograd state. A model lists where each weight of the checkpoint goes, so that loading is one
loop for all models and a fused projection is filled slice by slice::

    qkv.weight    rows [0, q)            <- model.layers.0.self_attn.q_proj.weight
                  rows [q, q + kv)       <- model.layers.0.self_attn.k_proj.weight
                  rows [q + kv, ...)     <- model.layers.0.self_attn.v_proj.weight
"""

import math
from collections.abc import Sequence

import torch

from engine.cpu_runtime import lazy_zeros
from engine.model_spec import Activation, ModelSpec
from engine.rope_spec import RopeSpec
from kernels.gated_linear import gated_linear, pack_gated_weight
from kernels.linear import Quantization, Weight, linear, linear_add_, pack_weight

WeightSlots = dict[str, torch.Tensor]
"""Name in the checkpoint to the memory that takes its values."""


class Linear:
    """``y = x W^T + b`` for one or several projections of the same input, which come out side by side."""

    __slots__ = ("_sizes", "bias", "weight")

    def __init__(
        self, in_features: int, out_features: Sequence[int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate, to be filled; ``out_features`` has one entry per projection."""
        self._sizes = list(out_features)
        total = sum(self._sizes)
        self.weight: Weight = lazy_zeros((total, in_features), dtype=dtype, device=device)
        self.bias = lazy_zeros((total,), dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, in_features). Returns (num_tokens, sum of out_features)."""
        return linear(x, self.weight, self.bias)

    def add_to_(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the projections of ``x`` to ``residual``, (num_tokens, sum of out_features), in place; returns it."""
        return linear_add_(residual, x, self.weight, self.bias)

    def pack(self, quantization: Quantization = "none") -> None:
        """Lay the filled weights out for the processor; ``slots`` is of no use afterwards."""
        assert isinstance(self.weight, torch.Tensor), "the weights are packed already"
        self.weight = pack_weight(self.weight, quantization)

    def pack_gated(self, activation: Activation, quantization: Quantization) -> None:
        """``pack`` for the gate and up of an MLP; from then on only ``gated_linear`` reads weight and bias."""
        assert isinstance(self.weight, torch.Tensor), "the weights are packed already"
        self.weight, self.bias = pack_gated_weight(self.weight, self.bias, activation, quantization)

    def slots(self, *names: str) -> WeightSlots:
        """Where the weights (and biases) of the named projections go, in the order of ``out_features``."""
        assert isinstance(self.weight, torch.Tensor), "packed weights have no slots"
        slots = {
            f"{name}.weight": part for name, part in zip(names, torch.split(self.weight, self._sizes), strict=True)
        }
        if self.bias is not None:
            biases = torch.split(self.bias, self._sizes)
            slots |= {f"{name}.bias": part for name, part in zip(names, biases, strict=True)}
        return slots


class GatedMLP:
    """``down(act(gate(x)) * up(x))``."""

    __slots__ = ("_activation", "down", "gate_up")

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._activation = spec.activation
        self.gate_up = Linear(hidden, (inner, inner), bias=spec.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(inner, (hidden,), bias=spec.mlp_bias, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, hidden_size). Returns the same shape."""
        return self.down(self._gated(x))

    def add_to_(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the output for ``x`` to ``residual``, in place; returns it."""
        return self.down.add_to_(residual, self._gated(x))

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        return gated_linear(x, self.gate_up.weight, self.gate_up.bias, self._activation)

    def pack(self, quantization: Quantization) -> None:
        """Lay the filled weights out for the processor."""
        self.gate_up.pack_gated(self._activation, quantization)
        self.down.pack(quantization)

    def slots(self, prefix: str) -> WeightSlots:
        """Where the weights go."""
        return {
            **self.gate_up.slots(f"{prefix}.gate_proj", f"{prefix}.up_proj"),
            **self.down.slots(f"{prefix}.down_proj"),
        }


def rope_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of elements: (head_dim / 2,), fp32.

    ``llama3`` keeps the fast frequencies, divides the slow ones by ``factor``, and blends in between, judged by how
    often a frequency turns within the positions of the pre-training; ``yarn`` likewise, along the index of the
    frequency instead of its turns. Within its window, ``dynamic`` is no scaling.
    """
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.frequency_divisors is not None:
        inv_freq /= torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    if rope.type == "linear":
        return inv_freq / rope.factor
    if rope.type == "llama3":
        num_turns = rope.original_max_position * inv_freq / (2 * math.pi)
        kept = (num_turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return inv_freq * (kept + (1.0 - kept) / rope.factor)
    if rope.type == "yarn":
        low, high = _yarn_range(rope, head_dim)
        divided = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
        return inv_freq / rope.factor * divided + inv_freq * (1.0 - divided)
    return inv_freq


def _yarn_range(rope: RopeSpec, head_dim: int) -> tuple[float, float]:
    """The frequencies, by index, between which ``yarn`` goes from keeping to dividing."""

    def index_of(num_turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001
