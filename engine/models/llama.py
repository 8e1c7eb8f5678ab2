"""The Llama family: SmolLM2, Llama 2 and 3, Mistral within its window.

    embed -> [ RMSNorm -> q, k, v -> RoPE -> store K, V -> attention -> o -> +
               RMSNorm -> gate, up -> silu * -> down -> + ] x num_layers -> RMSNorm -> output projection

The tokens of a step lie flattened, (num_tokens, hidden_size); which sequence a row belongs to, only attention knows.
After the attention of the last layer, rows whose logits nobody asked for are dropped: a prompt needs one of them.
"""

import torch
import torch.nn.functional as F

from engine.cpu_runtime import lazy_zeros
from engine.kv_cache import KVCache
from engine.model_spec import ModelSpec
from engine.models.layers import Linear, WeightSlots, rope_frequencies
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.rms_norm import rms_norm
from kernels.rotary import RotaryTables, rotary, rotary_tables
from kernels.silu_mul import silu_mul
from kernels.store_kv import store_kv


class LlamaLayer:
    """One decoder layer."""

    __slots__ = (
        "attention",
        "down",
        "eps",
        "gate_up",
        "input_norm",
        "num_heads",
        "num_kv_heads",
        "o",
        "post_norm",
        "qk_size",
        "qkv",
        "scale",
    )

    def __init__(
        self, spec: ModelSpec, attention: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qk_size = q_size + kv_size
        self.eps = spec.rms_norm_eps
        self.scale = spec.head_dim**-0.5
        self.attention = attention
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.input_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.post_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.qkv = Linear(hidden, (q_size, kv_size, kv_size), bias=spec.qkv_bias, dtype=dtype, device=device)
        self.o = Linear(q_size, (hidden,), bias=spec.o_bias, dtype=dtype, device=device)
        self.gate_up = Linear(hidden, (inner, inner), bias=spec.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(inner, (hidden,), bias=spec.mlp_bias, dtype=dtype, device=device)

    def slots(self, prefix: str) -> WeightSlots:
        """Where the weights of this layer go."""
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return {
            f"{prefix}.input_layernorm.weight": self.input_norm,
            f"{prefix}.post_attention_layernorm.weight": self.post_norm,
            **self.qkv.slots(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            **self.o.slots(f"{attention}.o_proj"),
            **self.gate_up.slots(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            **self.down.slots(f"{mlp}.down_proj"),
        }

    def pack(self) -> None:
        """Lay the filled weights out for the processor."""
        for projection in (self.qkv, self.o, self.gate_up, self.down):
            projection.pack()

    def __call__(
        self,
        residual: torch.Tensor,
        tables: RotaryTables,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        output_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add this layer's contributions to ``residual``, in place unless rows are dropped.

        Args:
            residual: (num_tokens, hidden_size).
            tables: cosines and sines of the tokens' positions.
            kv_cache: of this layer, see ``KVCache.layers``.
            metadata: of this step.
            output_rows: (num_output_rows,), int64: the rows to go on with after attention; ``None`` is all.

        Returns:
            (num_tokens or num_output_rows, hidden_size).
        """
        num_tokens = residual.shape[0]
        qkv = self.qkv(rms_norm(residual, self.input_norm, self.eps))
        heads = self.num_heads + self.num_kv_heads
        qk = rotary(qkv[:, : self.qk_size].view(num_tokens, heads, -1), tables)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        v = qkv[:, self.qk_size :].view(num_tokens, self.num_kv_heads, -1)
        store_kv(k, v, kv_cache, metadata.slot_mapping)
        attended = self.attention.attend(q, k, v, kv_cache, metadata, self.scale).flatten(1)
        if output_rows is not None:
            residual, attended = residual[output_rows], attended[output_rows]
        residual += self.o(attended)
        residual += self.down(silu_mul(self.gate_up(rms_norm(residual, self.post_norm, self.eps))))
        return residual


class LlamaForCausalLM:
    """See ``engine.models.registry.CausalLM``."""

    def __init__(
        self, spec: ModelSpec, attention: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.embedding = lazy_zeros((spec.vocab_size, spec.hidden_size), dtype=dtype, device=device)
        self.layers = [LlamaLayer(spec, attention, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        self.norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.lm_head = Linear(spec.hidden_size, (spec.vocab_size,), bias=False, dtype=dtype, device=device)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embedding
        self.inv_freq = rope_frequencies(spec.rope, spec.head_dim).to(device)
        self.num_parameters = sum(slot.numel() for slot in self.weight_slots().values())

    def weight_slots(self) -> WeightSlots:
        """Where each weight of the checkpoint goes."""
        slots = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.spec.tie_word_embeddings:
            slots |= self.lm_head.slots("lm_head")
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{index}")
        return slots

    def finish_loading(self) -> None:
        """See ``CausalLM.finish_loading``. The embedding table stays plain for looking up rows."""
        for layer in self.layers:
            layer.pack()
        self.lm_head.pack()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the tokens of one step and store their keys and values; see ``CausalLM.forward``."""
        residual = F.embedding(token_ids, self.embedding)
        tables = rotary_tables(positions, self.inv_freq, self.dtype)
        last = len(self.layers) - 1
        for index, (layer, layer_cache) in enumerate(zip(self.layers, kv_cache.layers, strict=True)):
            residual = layer(residual, tables, layer_cache, metadata, output_rows if index == last else None)
        return rms_norm(residual, self.norm, self.spec.rms_norm_eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (num_rows, hidden_size) from ``forward``. Returns (num_rows, vocab_size), fp32."""
        return self.lm_head(hidden).float()
