"""Gemma 3 text: most layers attend within a window, and every block is normalised on its way in and out.

    embed * sqrt(hidden) -> [ RMSNorm -> q, k, v -> head norms -> RoPE -> store K, V -> attention -> o -> RMSNorm -> +
                              RMSNorm -> gate, up -> gelu * -> down -> RMSNorm -> + ] x num_layers
                         -> RMSNorm -> output projection, which is the embedding table

Layers with a window turn by frequencies of their own (``ModelSpec.local_rope``).
"""

import torch

from engine.model_spec import ModelSpec
from engine.models.attention import SelfAttention
from engine.models.decoder import DecoderModel
from engine.models.layers import GatedMLP, WeightSlots
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.linear import Quantization
from kernels.rms_norm import rms_norm
from kernels.rotary import RotaryTables


class Gemma3Layer:
    """One decoder layer; see ``engine.models.decoder.DecoderLayer``."""

    __slots__ = ("attention", "eps", "input_norm", "mlp", "post_attention_norm", "post_mlp_norm", "pre_mlp_norm")

    def __init__(
        self, spec: ModelSpec, index: int, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.eps = spec.rms_norm_eps
        self.input_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.post_attention_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.pre_mlp_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.post_mlp_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.attention = SelfAttention(spec, index, backend, dtype=dtype, device=device)
        self.mlp = GatedMLP(spec, dtype=dtype, device=device)

    @property
    def is_local(self) -> bool:
        """See ``DecoderLayer``."""
        return self.attention.is_local

    def slots(self, prefix: str) -> WeightSlots:
        """Where the weights of this layer go."""
        return {
            f"{prefix}.input_layernorm.weight": self.input_norm,
            f"{prefix}.post_attention_layernorm.weight": self.post_attention_norm,
            f"{prefix}.pre_feedforward_layernorm.weight": self.pre_mlp_norm,
            f"{prefix}.post_feedforward_layernorm.weight": self.post_mlp_norm,
            **self.attention.slots(f"{prefix}.self_attn"),
            **self.mlp.slots(f"{prefix}.mlp"),
        }

    def pack(self, quantization: Quantization) -> None:
        """Lay the filled weights out for the processor."""
        self.attention.pack(quantization)
        self.mlp.pack(quantization)

    def __call__(
        self,
        residual: torch.Tensor,
        tables: RotaryTables,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        output_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``DecoderLayer``."""
        attended = self.attention.attend(rms_norm(residual, self.input_norm, self.eps), tables, kv_cache, metadata)
        if output_rows is not None:
            residual, attended = residual[output_rows], attended[output_rows]
        residual += rms_norm(self.attention.o(attended), self.post_attention_norm, self.eps)
        inner = self.mlp(rms_norm(residual, self.pre_mlp_norm, self.eps))
        residual += rms_norm(inner, self.post_mlp_norm, self.eps)
        return residual


class Gemma3ForCausalLM(DecoderModel):
    """See ``engine.models.registry.CausalLM``."""

    make_layer = Gemma3Layer
