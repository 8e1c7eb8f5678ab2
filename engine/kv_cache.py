"""The tensors that hold keys and values, in blocks that the scheduler hands out by number."""

import torch

from engine.config import CacheConfig, KVCacheDType
from engine.cpu_runtime import lazy_zeros
from engine.errors import ModelError
from engine.memory import free_memory_bytes
from engine.model_spec import ModelSpec
from kernels.kv_quantization import SCALE_BYTES, is_quantized_kv, kv_row_size, kv_storage_dtype

_GIB = 1 << 30


class KVCache:
    """Keys and values of all layers; block ``b`` of a sequence is block ``b`` in every layer."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> None:
        """Reserve the memory; the operating system gives it page by page as blocks are first used.

        Raises:
            ModelError: this torch, or the heads of this model, cannot have a cache of ``kv_cache_dtype``.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        row_size, dtype = _row_format(spec, dtype, kv_cache_dtype)
        shape = (2, num_blocks, block_size, spec.num_kv_heads, row_size)
        # Zeros, not empty: masked values are multiplied with weight 0, and 0 * NaN would be NaN.
        self.layers = [lazy_zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        """Per layer (2, num_blocks, block_size, num_kv_heads, head_dim), keys first; where they are quantized, rows as
        ``kernels.kv_quantization`` describes them."""

    @property
    def num_bytes(self) -> int:
        """Memory of all blocks."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def clear_non_finite(self, block_ids: list[int]) -> list[int]:
        """Zero what is not finite in some blocks, so that it cannot reach the sequences that will use them next.

        Returns:
            The blocks in which there was such a value: what they hold is no prefix any more.
        """
        is_dirty = torch.zeros(len(block_ids), dtype=torch.bool, device=self.layers[0].device)
        for layer in self.layers:
            values = layer[:, block_ids]
            numbers = values
            if is_quantized_kv(layer):
                numbers = values[..., -SCALE_BYTES:].contiguous().view(torch.float32)
            is_finite = torch.isfinite(numbers)
            is_dirty |= ~is_finite.all(dim=0).flatten(1).all(dim=1)
            layer[:, block_ids] = torch.where(is_finite, values, torch.zeros((), dtype=layer.dtype))
        return [block_id for block_id, dirty in zip(block_ids, is_dirty.tolist(), strict=True) if dirty]


def kv_block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype, kv_cache_dtype: KVCacheDType = "auto") -> int:
    """Bytes of one block over all layers: ``2 * L * H_kv * D_head * block_size * itemsize``, and scales if quantized.

    Raises:
        ModelError: such a cache is not possible.
    """
    row_size, dtype = _row_format(spec, dtype, kv_cache_dtype)
    return spec.num_kv_values_per_token // spec.head_dim * row_size * block_size * dtype.itemsize


def _row_format(spec: ModelSpec, dtype: torch.dtype, kv_cache_dtype: KVCacheDType) -> tuple[int, torch.dtype]:
    """Elements of the row of one head, and their dtype."""
    if kv_cache_dtype == "auto":
        return spec.head_dim, dtype
    try:
        return kv_row_size(spec.head_dim), kv_storage_dtype(kv_cache_dtype)
    except ValueError as error:
        raise ModelError(f"kv_cache_dtype {kv_cache_dtype!r}: {error}") from error


def num_kv_blocks(
    spec: ModelSpec,
    cache: CacheConfig,
    dtype: torch.dtype,
    *,
    max_num_tokens: int | None = None,
    device: torch.device | str = "cpu",
) -> int:
    """Blocks of the pool: as configured, else as many as fit into ``memory_gib``, else into a share of what is free.

    Args:
        spec: sizes of the model, whose weights are loaded already.
        cache: configured sizes.
        dtype: of keys and values where ``cache`` does not quantize them.
        max_num_tokens: tokens that can be of use at once; a pool sized by free memory holds no more.
        device: whose memory is asked for.

    Raises:
        ModelError: not even one block fits.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = kv_block_bytes(spec, cache.block_size, dtype, cache.kv_cache_dtype)
    if cache.memory_gib is not None:
        num_blocks = int(cache.memory_gib * _GIB) // block_bytes
        source = f"memory_gib {cache.memory_gib}"
    else:
        free_bytes = free_memory_bytes(device)
        num_blocks = int(free_bytes * cache.free_memory_share) // block_bytes
        source = f"free_memory_share {cache.free_memory_share} of {free_bytes} free bytes"
        if max_num_tokens is not None:
            num_blocks = min(num_blocks, -(-max_num_tokens // cache.block_size))
    if num_blocks < 1:
        raise ModelError(f"{source} holds no KV block of {cache.block_size} tokens ({block_bytes} bytes)")
    return num_blocks
