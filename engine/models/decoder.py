"""What all decoder-only models share: embedding, layers one after the other, last norm, output projection.

The tokens of a step lie flattened, (num_tokens, hidden_size); which sequence a row belongs to, only attention knows.
After the attention of the last layer, rows whose logits nobody asked for are dropped: a prompt needs one of them.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from engine.cpu_runtime import lazy_zeros
from engine.kv_cache import KVCache
from engine.model_spec import ModelSpec
from engine.models.attention import SelfAttention
from engine.models.layers import GatedMLP, Linear, WeightSlots, rope_frequencies
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.attention.native import NativeAttention
from kernels.linear import Quantization
from kernels.native.decoder import DecoderLayerWeights, DecoderShape, NativeDecoder, can_join_layers
from kernels.rms_norm import rms_norm
from kernels.rotary import RotaryTables, rotary_tables


class DecoderLayer(ABC):
    """One layer: attention and MLP; a family says which norms stand around them."""

    __slots__ = ("attention", "eps", "input_norm", "mlp")

    def __init__(
        self, spec: ModelSpec, index: int, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.eps = spec.rms_norm_eps
        self.input_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.attention = SelfAttention(spec, index, backend, dtype=dtype, device=device)
        self.mlp = GatedMLP(spec, dtype=dtype, device=device)

    @property
    def is_local(self) -> bool:
        """The layer turns by ``spec.local_rope``."""
        return self.attention.is_local

    def slots(self, prefix: str) -> WeightSlots:
        """Where the weights of this layer go."""
        return {
            f"{prefix}.input_layernorm.weight": self.input_norm,
            **self.attention.slots(f"{prefix}.self_attn"),
            **self.mlp.slots(f"{prefix}.mlp"),
        }

    def pack(self, quantization: Quantization) -> None:
        """Lay the filled weights out for the processor."""
        self.attention.pack(quantization)
        self.mlp.pack(quantization)

    mlp_norm: torch.Tensor
    """Of the residual, before the MLP: (hidden_size,)."""
    post_attention_norm: torch.Tensor | None
    """Of what attention gives, before it is added; ``None`` for families without."""
    post_mlp_norm: torch.Tensor | None
    """Of what the MLP gives, likewise."""

    def weights(self) -> DecoderLayerWeights:
        """The packed weights, for kernels that compute whole layers."""
        attention, mlp = self.attention, self.mlp
        return DecoderLayerWeights(
            input_norm=self.input_norm,
            qkv=(attention.qkv.weight, attention.qkv.bias),
            head_norms=attention.head_norms,
            o=(attention.o.weight, attention.o.bias),
            post_attention_norm=self.post_attention_norm,
            mlp_norm=self.mlp_norm,
            gate_up=(mlp.gate_up.weight, mlp.gate_up.bias),
            down=(mlp.down.weight, mlp.down.bias),
            post_mlp_norm=self.post_mlp_norm,
            window=attention.window,
            is_local=self.is_local,
        )

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
        attended = self.attention.attend(rms_norm(residual, self.input_norm, self.eps), tables, kv_cache, metadata)
        if output_rows is not None:
            residual, attended = residual[output_rows], attended[output_rows]
        return self.add(residual, self.attention.o(attended))

    @abstractmethod
    def add(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add what attention gave, then the MLP's contribution, both (num_rows, hidden_size), to ``residual``."""


class DecoderModel:
    """See ``engine.models.registry.CausalLM``; a family says what its layers are."""

    make_layer: type[DecoderLayer]

    def __init__(
        self, spec: ModelSpec, attention: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.embedding = lazy_zeros((spec.vocab_size, spec.hidden_size), dtype=dtype, device=device)
        self.layers = [
            self.make_layer(spec, index, attention, dtype=dtype, device=device) for index in range(spec.num_layers)
        ]
        self.norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.lm_head = Linear(spec.hidden_size, (spec.vocab_size,), bias=False, dtype=dtype, device=device)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embedding
        self.inv_freq = rope_frequencies(spec.rope, spec.head_dim).to(device)
        self.local_inv_freq: torch.Tensor | None = None
        if spec.local_rope is not None and any(layer.is_local for layer in self.layers):
            self.local_inv_freq = rope_frequencies(spec.local_rope, spec.head_dim).to(device)
        self._attention = attention
        self._native: NativeDecoder | None = None
        """Computes all layers in one call, where the kernels can."""
        self.num_parameters = sum(slot.numel() for slot in self.weight_slots().values())

    def weight_slots(self) -> WeightSlots:
        """Where each weight of the checkpoint goes."""
        slots = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.spec.tie_word_embeddings:
            slots |= self.lm_head.slots("lm_head")
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{index}")
        return slots

    def finish_loading(self, quantization: Quantization = "none") -> None:
        """See ``CausalLM.finish_loading``. The embedding table stays plain for looking up rows."""
        for layer in self.layers:
            layer.pack(quantization)
        self.lm_head.pack()
        self._native = self._join_layers()

    def _join_layers(self) -> NativeDecoder | None:
        if not isinstance(self._attention, NativeAttention):
            return None
        kernels, spec = self._attention.kernels, self.spec
        scales = {layer.attention.scale for layer in self.layers}
        if len(scales) != 1:  # local and global frequencies with different factors
            return None
        shape = DecoderShape(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            activation=spec.activation,
            attention_scale=scales.pop(),
            attention_softcap=spec.attention_softcap,
            eps=spec.rms_norm_eps,
            dtype=self.dtype,
        )
        layers = [layer.weights() for layer in self.layers]
        return NativeDecoder(kernels, shape, layers) if can_join_layers(kernels, shape, layers) else None

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
        if self.spec.embedding_scale != 1.0:
            # in the dtype of the table, as the model was trained
            residual *= torch.tensor(self.spec.embedding_scale, dtype=self.dtype)
        tables = rotary_tables(positions, self.inv_freq, self.dtype)
        local_tables = tables
        if self.local_inv_freq is not None:
            local_tables = rotary_tables(positions, self.local_inv_freq, self.dtype)
        if self._native is not None:
            residual = self._native.run(residual, tables, local_tables, kv_cache.layers, metadata, output_rows)
            return rms_norm(residual, self.norm, self.spec.rms_norm_eps)
        last = len(self.layers) - 1
        for index, (layer, layer_cache) in enumerate(zip(self.layers, kv_cache.layers, strict=True)):
            residual = layer(
                residual,
                local_tables if layer.is_local else tables,
                layer_cache,
                metadata,
                output_rows if index == last else None,
            )
        return rms_norm(residual, self.norm, self.spec.rms_norm_eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (num_rows, hidden_size) from ``forward``. Returns (num_rows, vocab_size), fp32."""
        logits = self.lm_head(hidden).float()
        softcap = self.spec.logit_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
