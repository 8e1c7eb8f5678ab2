"""Blocks of the KV cache as bytes, all layers of a block together, to and from other engines."""

from collections.abc import Sequence

import torch

from engine.kv_cache import KVCache
from engine.received_blocks import KVReceive


class TensorBlockMemory:
    """Reads and writes whole blocks of a KV cache on any device."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._layers = kv_cache.layers
        layer = self._layers[0]
        self._shape = (len(self._layers), 2, *layer.shape[2:])
        """Of one block: layers, keys and values, tokens, KV heads, head dimension."""
        self._dtype = layer.dtype

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers together."""
        return torch.Size(self._shape).numel() * self._dtype.itemsize

    @property
    def layout(self) -> str:
        """Element type and shape of a block."""
        return f"{str(self._dtype).removeprefix('torch.')}:{'x'.join(map(str, self._shape))}"

    @torch.inference_mode()
    def read_blocks(self, block_ids: Sequence[int]) -> bytes:
        """Bytes of some blocks, one after the other. Safe beside a step, which writes into none that is full."""
        blocks = torch.empty((len(block_ids), *self._shape), dtype=self._dtype)
        ids = list(block_ids)
        for index, layer in enumerate(self._layers):
            blocks[:, index] = layer[:, ids].transpose(0, 1).to(blocks.device)
        return blocks.view(torch.uint8).numpy().tobytes()

    @torch.inference_mode()
    def write_blocks(self, receives: Sequence[KVReceive]) -> None:
        """Fill blocks with what came for them. To be called before a step computes anything."""
        # One copy into memory that torch may own; what arrived is read-only.
        data = torch.frombuffer(bytearray().join(receive.data for receive in receives), dtype=self._dtype)
        blocks = data.view(len(receives), *self._shape)
        ids = [receive.block_id for receive in receives]
        for index, layer in enumerate(self._layers):
            layer[:, ids] = blocks[:, index].transpose(0, 1).to(layer.device)
