"""The memory of the second tier: one record per block, in memory of the host or in a mapped file without a name."""

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch

from engine.config import CacheConfig
from engine.cpu_runtime import lazy_zeros
from engine.errors import ModelError
from engine.kv_cache import KVCache
from engine.second_tier import KVTransfer

_GIB = 1 << 30


class SecondTierMemory:
    """Slots of one KV block each, all layers together; copies to and from a KV cache on any device."""

    def __init__(self, config: CacheConfig, kv_cache: KVCache) -> None:
        """Reserve the memory.

        Raises:
            ModelError: not even one block fits, or the file cannot be made.
        """
        layer = kv_cache.layers[0]
        shape = (len(kv_cache.layers), 2, *layer.shape[2:])
        slot_bytes = torch.Size(shape).numel() * layer.element_size()
        self.num_slots = int(config.second_tier_gib * _GIB) // slot_bytes
        """Blocks that fit."""
        if self.num_slots < 1:
            raise ModelError(f"second_tier_gib {config.second_tier_gib} holds no KV block ({slot_bytes} bytes)")
        if config.second_tier == "memory":
            self._slots = lazy_zeros((self.num_slots, *shape), dtype=layer.dtype)
        else:
            self._slots = _mapped_file((self.num_slots, *shape), layer.dtype, config.second_tier_folder)
        self._kv_cache = kv_cache

    def execute(self, stores: Sequence[KVTransfer], loads: Sequence[KVTransfer]) -> None:
        """Copy blocks to slots, then slots to blocks. To be called before a step computes anything."""
        if stores:
            block_ids, slots = [store.block_id for store in stores], [store.slot for store in stores]
            for index, layer in enumerate(self._kv_cache.layers):
                self._slots[slots, index] = layer[:, block_ids].transpose(0, 1).to(self._slots.device)
        if loads:
            block_ids, slots = [load.block_id for load in loads], [load.slot for load in loads]
            for index, layer in enumerate(self._kv_cache.layers):
                layer[:, block_ids] = self._slots[slots, index].transpose(0, 1).to(layer.device)


def _mapped_file(shape: Sequence[int], dtype: torch.dtype, folder: str | None) -> torch.Tensor:
    """A tensor over a sparse file. It is unlinked at once: nobody else can read it, and it never outlives us."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    try:
        with tempfile.TemporaryFile(prefix="firsttoken-kv-", dir=folder) as file:
            os.ftruncate(file.fileno(), num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise ModelError(
            f"cannot map a second tier of {num_bytes} bytes in {folder or 'the temporary folder'}: {error}"
        ) from error
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
