"""Rotary embedding of new queries and keys and the store of keys and values into the paged cache, in one pass.

Models that normalise their query and key heads have that done in the same pass by the native kernel.
"""

from typing import NamedTuple

import torch

from kernels.kv_quantization import is_quantized_kv, store_quantized_kv
from kernels.native.library import RotaryStoreArgs, dtype_code, kernels_for
from kernels.rms_norm import rms_norm, rms_norm_ref
from kernels.rotary import RotaryTables, rotary, rotary_ref
from kernels.store_kv import store_kv, store_kv_ref
from kernels.triton_kernels.runtime import uses_triton


class HeadNorms(NamedTuple):
    """RMSNorm of every query and key head."""

    q_weight: torch.Tensor
    """(head_dim,), dtype of the queries, contiguous."""
    k_weight: torch.Tensor
    """Likewise."""
    eps: float


def rotary_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: RotaryTables,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn queries and keys, store keys and values; ``q`` and ``k`` may be overwritten.

    Args:
        q: (num_tokens, num_heads, head_dim), strided heads with a contiguous last dimension.
        k, v: (num_tokens, num_kv_heads, head_dim), likewise, dtype of ``kv_cache`` unless that is quantized.
        tables: of the same tokens, in the dtype of ``q``.
        kv_cache: (2, num_blocks, block_size, num_kv_heads, head_dim), contiguous; see ``store_kv``, or for one of 8
            bits ``store_quantized_kv``.
        slot_mapping: (num_tokens,), int64, contiguous. The Triton kernel stores nothing for a negative slot, as in the
            empty rows of a recorded step.
        norms: of the query and key heads, before they are turned; ``None`` for models without.

    Returns:
        The turned queries and keys, shapes as given.
    """
    is_triton, kernels = uses_triton(q), kernels_for(q)
    is_dense = q.stride(2) == k.stride(2) == v.stride(2) == 1
    is_native = kernels is not None and is_dense and q.shape[2] % 2 == 0 and not is_quantized_kv(kv_cache)
    if norms is not None and (is_triton or not is_native):
        q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
    if is_quantized_kv(kv_cache):
        q, k = rotary(q, tables), rotary(k, tables)
        store_quantized_kv(k, v, kv_cache, slot_mapping)
        return q, k
    if (kernels is None and not is_triton) or not is_dense or q.shape[2] % 2:
        q, k = rotary(q, tables), rotary(k, tables)
        store_kv(k, v, kv_cache, slot_mapping)
        return q, k
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert kv_cache.is_contiguous(), "the KV cache must be contiguous"
    assert k.shape == v.shape == (slot_mapping.shape[0], *kv_cache.shape[3:]), (
        f"k {tuple(k.shape)}, v {tuple(v.shape)}, {slot_mapping.shape[0]} slots, cache {tuple(kv_cache.shape)}"
    )
    assert k.shape == (num_tokens, num_kv_heads, head_dim), f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    assert q.dtype == k.dtype == v.dtype == kv_cache.dtype, (
        f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}, the cache is {kv_cache.dtype}"
    )
    assert tables.half_cos.shape == (num_tokens, head_dim // 2), f"tables {tuple(tables.half_cos.shape)}"
    if is_triton:
        from kernels.triton_kernels import rotary_store as triton_rotary_store

        triton_rotary_store.rotary_store(q, k, v, tables.half_cos, tables.half_sin, kv_cache, slot_mapping)
        return q, k
    assert kernels is not None
    assert norms is None or (
        norms.q_weight.shape == norms.k_weight.shape == (head_dim,)
        and norms.q_weight.dtype == norms.k_weight.dtype == q.dtype
        and norms.q_weight.is_contiguous()
        and norms.k_weight.is_contiguous()
    ), f"head norms need contiguous weights of {head_dim} in {q.dtype}"
    keys, values = kv_cache[0], kv_cache[1]
    arguments = RotaryStoreArgs(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        cos=tables.half_cos.data_ptr(),
        sin=tables.half_sin.data_ptr(),
        q_norm=None if norms is None else norms.q_weight.data_ptr(),
        k_norm=None if norms is None else norms.k_weight.data_ptr(),
        k_cache=keys.data_ptr(),
        v_cache=values.data_ptr(),
        slots=slot_mapping.data_ptr(),
        num_tokens=num_tokens,
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        k_token_stride=k.stride(0),
        k_head_stride=k.stride(1),
        v_token_stride=v.stride(0),
        v_head_stride=v.stride(1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype_code(q.dtype),
        num_threads=torch.get_num_threads(),
        eps=0.0 if norms is None else norms.eps,
    )
    kernels.call("rotary_store", arguments)
    return q, k


def rotary_store_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the formulas in fp32; the cache takes the keys in its own dtype. Returns fp32."""
    if norms is not None:
        q, k = rms_norm_ref(q, norms.q_weight, norms.eps), rms_norm_ref(k, norms.k_weight, norms.eps)
    q, k = rotary_ref(q, positions, inv_freq), rotary_ref(k, positions, inv_freq)
    store_kv_ref(k.to(kv_cache.dtype), v, kv_cache, slot_mapping)
    return q, k
