"""The Llama family: SmolLM2, Llama 2 and 3, Mistral, Qwen2 and 2.5, Qwen3.

    embed -> [ RMSNorm -> q, k, v -> RoPE -> store K, V -> attention -> o -> +
               RMSNorm -> gate, up -> silu * -> down -> + ] x num_layers -> RMSNorm -> output projection

They differ in what the spec says: biases, a window of attention, norms of the query and key heads.
"""

import torch

from engine.model_spec import ModelSpec
from engine.models.attention import SelfAttention
from engine.models.decoder import DecoderModel
from engine.models.layers import GatedMLP, WeightSlots
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.linear import Quantization
from kernels.rms_norm import add_rms_norm_, rms_norm
from kernels.rotary import RotaryTables


class LlamaLayer:
    """One decoder layer; see ``engine.models.decoder.DecoderLayer``."""

    __slots__ = ("attention", "eps", "input_norm", "mlp", "post_norm")

    def __init__(
        self, spec: ModelSpec, index: int, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.eps = spec.rms_norm_eps
        self.input_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.post_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
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
            f"{prefix}.post_attention_layernorm.weight": self.post_norm,
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
        x = add_rms_norm_(residual, self.attention.o(attended), self.post_norm, self.eps)
        return self.mlp.add_to_(residual, x)


class LlamaForCausalLM(DecoderModel):
    """See ``engine.models.registry.CausalLM``."""

    make_layer = LlamaLayer
