"""All decoder layers of a step in one call of the C++ kernels.

For a decode, and for a prompt of some hundred tokens, calling nine kernels per layer from Python takes as long as a
tenth of their work, on one core while the others wait. Here the addresses of weights and cache are written down once; a
step fills in its own and calls once. The numbers are those of the kernels called one by one, to the last bit.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.attention.base import AttentionMetadata
from kernels.linear import PackedWeight, Weight
from kernels.native.library import (
    ACTIVATIONS,
    Activation,
    DecoderArgs,
    DecoderLayerArgs,
    DecoderTimes,
    NativeKernels,
    WeightArgs,
    dtype_code,
)
from kernels.rotary import RotaryTables
from kernels.rotary_store import HeadNorms

Projection = tuple[Weight, torch.Tensor | None]
"""Weight and bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayerWeights:
    """What one layer computes with; norms are (hidden_size,)."""

    input_norm: torch.Tensor
    qkv: Projection
    head_norms: HeadNorms | None
    o: Projection
    post_attention_norm: torch.Tensor | None
    """Of what attention gives, before it is added to the residual; ``None`` for families without."""
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection
    post_mlp_norm: torch.Tensor | None
    """Of what the MLP gives, likewise."""
    window: int | None
    is_local: bool
    """Turns by the local tables."""

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Every product of the layer."""
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def norms(self) -> tuple[torch.Tensor, ...]:
        """Every norm of the layer."""
        found = (self.input_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        heads = () if self.head_norms is None else (self.head_norms.q_weight, self.head_norms.k_weight)
        return (*(norm for norm in found if norm is not None), *heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What all layers share."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: Activation
    attention_scale: float
    attention_softcap: float | None
    eps: float
    dtype: torch.dtype


def can_join_layers(kernels: NativeKernels, shape: DecoderShape, layers: Sequence[DecoderLayerWeights]) -> bool:
    """Whether ``NativeDecoder`` computes these layers: every weight is packed for ``kernels`` alone."""
    if not layers or not kernels.has("decoder") or shape.head_dim % 2:
        return False
    for layer in layers:
        for weight, bias in layer.projections:
            if not isinstance(weight, PackedWeight) or weight.kernels is not kernels or weight.dtype != shape.dtype:
                return False
            if bias is not None and not (bias.is_contiguous() and bias.dtype == shape.dtype):
                return False
        gate_up = layer.gate_up[0]
        if not isinstance(gate_up, PackedWeight) or gate_up.activation != shape.activation:
            return False
        if not all(norm.is_contiguous() and norm.dtype == shape.dtype for norm in layer.norms):
            return False
    return True


class NativeDecoder:
    """The layers of one model, for which ``can_join_layers`` holds. Not for several threads at once."""

    def __init__(self, kernels: NativeKernels, shape: DecoderShape, layers: Sequence[DecoderLayerWeights]) -> None:
        self.times: DecoderTimes | None = None
        """Seconds of a step are added to it, for those who want to know."""
        self.kernels = kernels
        self._shape = shape
        self._layers = list(layers)  # keeps alive what the addresses point to
        self._caches: list[torch.Tensor] = []
        self._addresses = (DecoderLayerArgs * len(layers))()
        for addresses, layer in zip(self._addresses, layers, strict=True):
            for name in ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"):
                setattr(addresses, name, _address(getattr(layer, name)))
            if layer.head_norms is not None:
                addresses.q_norm = layer.head_norms.q_weight.data_ptr()
                addresses.k_norm = layer.head_norms.k_weight.data_ptr()
            for name in ("qkv", "o", "gate_up", "down"):
                setattr(addresses, name, _weight_args(*getattr(layer, name)))
            addresses.window = layer.window or 0
            addresses.is_local = layer.is_local
        self._row_size = 2 * shape.hidden_size + shape.intermediate_size
        self._row_size += 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim

    def run(
        self,
        residual: torch.Tensor,
        tables: RotaryTables,
        local_tables: RotaryTables,
        kv_caches: list[torch.Tensor],
        metadata: AttentionMetadata,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute all layers and store keys and values.

        Args:
            residual: (num_tokens, hidden_size), contiguous; overwritten.
            tables, local_tables: cosines and sines of the tokens' positions, for layers that are not and are local.
            kv_caches: per layer (2, num_blocks, block_size, num_kv_heads, head_dim), contiguous, dtype of ``residual``.
            metadata: of this step.
            output_rows: (num_output_rows,), int64, at most ``num_tokens`` of them: the rows to go on with after the
                attention of the last layer.

        Returns:
            (num_output_rows, hidden_size).
        """
        shape = self._shape
        num_tokens = residual.shape[0]
        assert residual.shape == (num_tokens, shape.hidden_size), f"residual {tuple(residual.shape)}"
        assert residual.is_contiguous(), "the residual must be contiguous"
        assert residual.dtype == shape.dtype, f"residual is {residual.dtype}, the weights are {shape.dtype}"
        assert metadata.num_tokens == num_tokens, f"metadata of {metadata.num_tokens} tokens for {num_tokens} rows"
        assert output_rows.shape[0] <= num_tokens, f"{output_rows.shape[0]} output rows of {num_tokens} tokens"
        assert output_rows.dtype == torch.int64, f"output rows are {output_rows.dtype}"
        self._take_caches(kv_caches)
        out = torch.empty((output_rows.shape[0], shape.hidden_size), dtype=shape.dtype)
        workspace = torch.empty(num_tokens * self._row_size, dtype=shape.dtype)
        output_rows = output_rows.contiguous()
        arguments = DecoderArgs(
            layers=ctypes.addressof(self._addresses),
            residual=residual.data_ptr(),
            out=out.data_ptr(),
            workspace=workspace.data_ptr(),
            cos=tables.half_cos.data_ptr(),
            sin=tables.half_sin.data_ptr(),
            local_cos=local_tables.half_cos.data_ptr(),
            local_sin=local_tables.half_sin.data_ptr(),
            slots=metadata.slot_mapping.data_ptr(),
            block_tables=metadata.block_tables.data_ptr(),
            cu_seqlens_q=metadata.cu_seqlens_q.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            output_rows=output_rows.data_ptr(),
            times=None if self.times is None else ctypes.addressof(self.times),
            num_layers=len(self._layers),
            num_tokens=num_tokens,
            num_output_rows=output_rows.shape[0],
            hidden=shape.hidden_size,
            inner=shape.intermediate_size,
            table_stride=metadata.block_tables.stride(0),
            num_seqs=metadata.num_seqs,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=metadata.block_size,
            dtype=dtype_code(shape.dtype),
            activation=ACTIVATIONS[shape.activation],
            num_threads=torch.get_num_threads(),
            scale=shape.attention_scale,
            soft_cap=shape.attention_softcap or 0.0,
            eps=shape.eps,
        )
        self.kernels.call("decoder", arguments)
        return out

    def _take_caches(self, kv_caches: list[torch.Tensor]) -> None:
        """Write the addresses down, unless they are those of the step before."""
        if self._caches is kv_caches:
            return
        shape = self._shape
        for addresses, cache in zip(self._addresses, kv_caches, strict=True):
            assert cache.is_contiguous(), "the KV cache must be contiguous"
            assert cache.dtype == shape.dtype, f"the KV cache is {cache.dtype}, the weights are {shape.dtype}"
            assert cache.shape[3:] == (shape.num_kv_heads, shape.head_dim), f"KV cache {tuple(cache.shape)}"
            keys, values = cache[0], cache[1]
            addresses.k_cache, addresses.v_cache = keys.data_ptr(), values.data_ptr()
        self._caches = kv_caches


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _weight_args(weight: PackedWeight, bias: torch.Tensor | None) -> WeightArgs:
    return WeightArgs(
        data=weight.data.data_ptr(),
        scales=_address(weight.scales),
        sums=_address(weight.sums),
        bias=_address(bias),
        in_features=weight.in_features,
        out_features=weight.out_features,
    )
