"""Gemma 3 text: most layers attend within a window, and every block is normalised on its way in and out.

    embed * sqrt(hidden) -> [ RMSNorm -> q, k, v -> head norms -> RoPE -> store K, V -> attention -> o -> RMSNorm -> +
                              RMSNorm -> gate, up -> gelu * -> down -> RMSNorm -> + ] x num_layers
                         -> RMSNorm -> output projection, which is the embedding table

Layers with a window turn by frequencies of their own (``ModelSpec.local_rope``).
"""

import torch

from engine.model_spec import ModelSpec
from engine.models.decoder import DecoderLayer, DecoderModel
from engine.models.layers import WeightSlots
from kernels.attention import AttentionBackend
from kernels.rms_norm import rms_norm


class Gemma3Layer(DecoderLayer):
    """One decoder layer; see ``engine.models.decoder.DecoderLayer``."""

    __slots__ = ("mlp_norm", "post_attention_norm", "post_mlp_norm")

    post_attention_norm: torch.Tensor
    post_mlp_norm: torch.Tensor

    def __init__(
        self, spec: ModelSpec, index: int, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, index, backend, dtype=dtype, device=device)
        self.post_attention_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.mlp_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.post_mlp_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)

    def slots(self, prefix: str) -> WeightSlots:
        """See ``DecoderLayer``."""
        return {
            **super().slots(prefix),
            f"{prefix}.post_attention_layernorm.weight": self.post_attention_norm,
            f"{prefix}.pre_feedforward_layernorm.weight": self.mlp_norm,
            f"{prefix}.post_feedforward_layernorm.weight": self.post_mlp_norm,
        }

    def add(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See ``DecoderLayer``."""
        residual += rms_norm(attended, self.post_attention_norm, self.eps)
        inner = self.mlp(rms_norm(residual, self.mlp_norm, self.eps))
        residual += rms_norm(inner, self.post_mlp_norm, self.eps)
        return residual


class Gemma3ForCausalLM(DecoderModel):
    """See ``engine.models.registry.CausalLM``."""

    make_layer = Gemma3Layer
