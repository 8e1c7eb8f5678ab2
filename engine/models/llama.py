"""The Llama family: SmolLM2, Llama 2 and 3, Mistral, Qwen2 and 2.5, Qwen3.

    embed -> [ RMSNorm -> q, k, v -> RoPE -> store K, V -> attention -> o -> +
               RMSNorm -> gate, up -> silu * -> down -> + ] x num_layers -> RMSNorm -> output projection

They differ in what the spec says: biases, a window of attention, norms of the query and key heads.
"""

import torch

from engine.model_spec import ModelSpec
from engine.models.decoder import DecoderLayer, DecoderModel
from engine.models.layers import WeightSlots
from kernels.attention import AttentionBackend
from kernels.rms_norm import add_rms_norm_


class LlamaLayer(DecoderLayer):
    """One decoder layer; see ``engine.models.decoder.DecoderLayer``."""

    __slots__ = ("mlp_norm",)
    post_attention_norm = None
    post_mlp_norm = None

    def __init__(
        self, spec: ModelSpec, index: int, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, index, backend, dtype=dtype, device=device)
        self.mlp_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)

    def slots(self, prefix: str) -> WeightSlots:
        """See ``DecoderLayer``."""
        return {
            **super().slots(prefix),
            f"{prefix}.post_attention_layernorm.weight": self.mlp_norm,
        }

    def add(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See ``DecoderLayer``."""
        x = add_rms_norm_(residual, attended, self.mlp_norm, self.eps)
        return self.mlp.add_to_(residual, x)


class LlamaForCausalLM(DecoderModel):
    """See ``engine.models.registry.CausalLM``."""

    make_layer = LlamaLayer
