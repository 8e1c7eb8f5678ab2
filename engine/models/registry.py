"""Finds the class for a checkpoint's architecture and fills it with the checkpoint's weights."""

import importlib
import re
from typing import Protocol

import torch

from engine.errors import ModelError
from engine.kv_cache import KVCache
from engine.model_spec import ModelSpec
from engine.models.layers import WeightSlots
from engine.weights import Checkpoint
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.linear import Quantization

# Architecture (``ModelSpec.architecture``) to module and class, imported when it is asked for.
_LLAMA = ("engine.models.llama", "LlamaForCausalLM")
_MODELS = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma3": ("engine.models.gemma3", "Gemma3ForCausalLM"),
}

# Tensors of old checkpoints that follow from the configuration.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class CausalLM(Protocol):
    """A decoder-only language model over a paged KV cache."""

    spec: ModelSpec
    dtype: torch.dtype
    num_parameters: int
    """Tied ones counted once."""

    def weight_slots(self) -> WeightSlots:
        """Where each weight of the checkpoint goes; call ``finish_loading`` once all are filled."""
        ...

    def finish_loading(self, quantization: Quantization = "none") -> None:
        """Lay the weights out for the processor; the slots are of no use afterwards."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the tokens of one step and store their keys and values.

        Args:
            token_ids: (num_tokens,), int64, the sequences of the step one after the other.
            positions: (num_tokens,), int64.
            kv_cache: holds the context of the sequences, gets the new tokens.
            metadata: where the tokens are, from ``AttentionBackend.prepare``.
            output_rows: (num_output_rows,), int64: rows whose hidden states are wanted, possibly none.

        Returns:
            (num_output_rows, hidden_size), ready for ``compute_logits``.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (num_rows, hidden_size). Returns (num_rows, vocab_size), fp32."""
        ...


def load_model(
    checkpoint: Checkpoint,
    attention: AttentionBackend,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
) -> CausalLM:
    """Build the model of a checkpoint and load its weights, converted to ``dtype``.

    Raises:
        ModelError: the architecture is unknown, or a tensor is missing, unexpected or of another shape.
    """
    spec = checkpoint.spec
    if spec.architecture not in _MODELS:
        raise ModelError(f"{checkpoint.path}: architecture {spec.architecture!r}; there are {', '.join(_MODELS)}")
    module, name = _MODELS[spec.architecture]
    model_class = getattr(importlib.import_module(module), name)
    model: CausalLM = model_class(spec, attention, dtype=dtype, device=torch.device(device))
    fill_slots(model.weight_slots(), checkpoint)
    try:
        model.finish_loading(quantization)
    except ValueError as error:
        raise ModelError(f"quantization {quantization!r}: {error}") from error
    return model


def fill_slots(slots: WeightSlots, checkpoint: Checkpoint) -> None:
    """Copy every tensor of the checkpoint to its place. Raises ModelError naming file and tensor."""
    missing = dict(slots)
    for name, values, origin in checkpoint.tensors():
        slot = missing.pop(name, None)
        if slot is None:
            if _DERIVED.fullmatch(name) or (name == "lm_head.weight" and checkpoint.spec.tie_word_embeddings):
                continue
            reason = "comes twice" if name in slots else "has no place in the model"
            raise ModelError(f"{origin} {reason} ({checkpoint.spec.architecture})")
        if values.shape != slot.shape:
            raise ModelError(f"{origin} has shape {tuple(values.shape)}, the model needs {tuple(slot.shape)}")
        slot.copy_(values)
    if missing:
        first = next(iter(missing))
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{checkpoint.path} has no tensor {first}{more}")
