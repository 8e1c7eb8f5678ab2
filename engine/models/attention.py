"""The attention of one decoder layer over the paged cache: project, normalise heads, turn, store, attend, project."""

import torch

from engine.model_spec import ModelSpec
from engine.models.layers import Linear, WeightSlots
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.linear import Quantization
from kernels.rotary import RotaryTables
from kernels.rotary_store import HeadNorms, rotary_store


class SelfAttention:
    """Attention of the layer ``index``; everything that families do differently comes from the spec."""

    __slots__ = (
        "_backend",
        "_num_heads",
        "_num_kv_heads",
        "_qk_size",
        "_softcap",
        "head_norms",
        "is_local",
        "o",
        "qkv",
        "scale",
        "window",
    )

    def __init__(
        self, spec: ModelSpec, index: int, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._backend = backend
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._qk_size = q_size + kv_size
        self.window = spec.window_of(index)
        """Keys that a query sees at most; ``None`` is all before it."""
        self._softcap = spec.attention_softcap
        self.is_local = self.window is not None and spec.local_rope is not None
        """The layer turns by ``spec.local_rope``."""
        rope = spec.local_rope if self.is_local and spec.local_rope is not None else spec.rope
        scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        # Turned queries and keys are both multiplied by the factor, so their products are by its square.
        self.scale = scale * rope.attention_factor**2
        """Factor of the scores."""
        self.qkv = Linear(spec.hidden_size, (q_size, kv_size, kv_size), bias=spec.qkv_bias, dtype=dtype, device=device)
        self.o = Linear(q_size, (spec.hidden_size,), bias=spec.o_bias, dtype=dtype, device=device)
        self.head_norms: HeadNorms | None = None
        if spec.has_qk_norm:
            q_norm, k_norm = (torch.empty(spec.head_dim, dtype=dtype, device=device) for _ in range(2))
            self.head_norms = HeadNorms(q_norm, k_norm, spec.rms_norm_eps)

    def slots(self, prefix: str) -> WeightSlots:
        """Where the weights go."""
        slots = {
            **self.qkv.slots(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"),
            **self.o.slots(f"{prefix}.o_proj"),
        }
        if self.head_norms is not None:
            slots |= {
                f"{prefix}.q_norm.weight": self.head_norms.q_weight,
                f"{prefix}.k_norm.weight": self.head_norms.k_weight,
            }
        return slots

    def pack(self, quantization: Quantization) -> None:
        """Lay the filled weights out for the processor."""
        self.qkv.pack(quantization)
        self.o.pack(quantization)

    def attend(
        self, x: torch.Tensor, tables: RotaryTables, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Store keys and values of the tokens and attend; what comes out still has to go through ``o``.

        Args:
            x: (num_tokens, hidden_size), normalised.
            tables: cosines and sines of the tokens' positions, of the kind that ``is_local`` says.
            kv_cache: of this layer, see ``KVCache.layers``.
            metadata: of this step.

        Returns:
            (num_tokens, num_heads * head_dim).
        """
        num_tokens = x.shape[0]
        qkv = self.qkv(x)
        qk = qkv[:, : self._qk_size].view(num_tokens, self._num_heads + self._num_kv_heads, -1)
        v = qkv[:, self._qk_size :].view(num_tokens, self._num_kv_heads, -1)
        q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
        q, k = rotary_store(q, k, v, tables, kv_cache, metadata.slot_mapping, norms=self.head_norms)
        attended = self._backend.attend(
            q, k, v, kv_cache, metadata, self.scale, window=self.window, softcap=self._softcap
        )
        return attended.flatten(1)
