"""Reads the tensors of GGUF files, dequantized, under the names that Hugging Face gives them.

Layout, little endian; the key-values are skipped here (``engine.gguf_metadata`` reads them)::

    magic, version, tensor_count, kv_count | key-values | tensor table | padding | tensor data
    table entry = name, num_dims u32, dims u64 (fastest first), type u32, offset u64 from the start of the data

Big models come as ``name-00001-of-00003.gguf``; every part has its own table, the first one the key-values.

For the Llama architecture llama.cpp rotates neighbouring elements where Hugging Face rotates halves, so its converter
interleaved the rows of the query and key projections; they are put back here: head rows ``[0, h, 1, h + 1, ...]`` turn
into ``[0, 1, ..., h, ...]``. Weights of Gemma's norms are stored whole, where Hugging Face stores them less one.
"""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.errors import ModelError
from engine.gguf_metadata import read_gguf_metadata
from engine.model_spec import spec_from_gguf_metadata
from engine.named_tensor import NamedTensor

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_HEADER = struct.Struct("<4sIQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_TYPE_AND_OFFSET = struct.Struct("<IQ")
_MAX_DIMS = 4

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma has four norms a layer, and gives one of the names above to another of them.
_GEMMA_LAYER_NAMES = {
    **_LAYER_NAMES,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_INTERLEAVED = ("llama",)
_ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of a tensor table."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as torch counts."""
    type_id: int
    offset: int
    """Bytes from the start of the file."""
    path: Path


class GGUFCheckpoint:
    """The weights of one model in one or several GGUF files."""

    def __init__(self, path: Path) -> None:
        """Read key-values and tensor tables; no weights yet.

        Args:
            path: the file, or any part of a split model.

        Raises:
            ModelError: a part is missing, broken, or the model is not supported.
        """
        self.files = gguf_parts(path)
        self.path = self.files[0]
        self._table = {tensor.name: tensor for file in self.files for tensor in read_tensor_table(file)}
        divisors = None
        if _ROPE_FREQS in self._table:
            divisors = tuple(float(value) for value in _load(self._table[_ROPE_FREQS]))
        self.spec = spec_from_gguf_metadata(
            read_gguf_metadata(self.path),
            self.path,
            tensor_shapes={name: tensor.shape for name, tensor in self._table.items()},
            frequency_divisors=divisors,
        )

    def tensors(self) -> Iterator[NamedTensor]:
        """All weights in file order, fp32. Raises ModelError naming file and tensor."""
        for tensor in self._table.values():
            if tensor.name == _ROPE_FREQS:
                continue  # part of the spec
            values = _load(tensor)
            kind = tensor.name.split(".")[-2]
            if self.spec.architecture in _INTERLEAVED and kind in ("attn_q", "attn_k"):
                num_heads = self.spec.num_heads if kind == "attn_q" else self.spec.num_kv_heads
                values = _undo_interleave(values, num_heads)
            name = _hf_name(tensor.name, self.spec.architecture)
            yield NamedTensor(name, torch.from_numpy(values), f"{tensor.path}: {tensor.name}")


def gguf_parts(path: Path) -> list[Path]:
    """All files of the model that ``path`` belongs to, in order. Raises ModelError if one is missing."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelError(f"{path} is one of {count} parts, and {part} is missing")
    return parts


def read_tensor_table(path: Path) -> list[GGUFTensor]:
    """Names, shapes, types and places of the tensors of one file. Raises ModelError naming the file."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r").data
        return _TableReader(data, path).read()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is not a whole GGUF file: {error}") from error


class _TableReader:
    """A cursor over the mapped file that skips the key-values."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self._data = data
        self._path = path
        self._position = 0
        self._alignment = 32

    def read(self) -> list[GGUFTensor]:
        magic, version, num_tensors, num_entries = _HEADER.unpack_from(self._data, 0)
        if magic != b"GGUF" or version not in (2, 3):
            raise ModelError(f"{self._path} is not a GGUF file of version 2 or 3: {bytes(magic)!r}, version {version}")
        self._position = _HEADER.size
        for _ in range(num_entries):
            key = self._string()
            kind = self._number(_U32)
            if key == b"general.alignment":
                (self._alignment,) = _U32.unpack_from(self._data, self._position)
            self._skip(kind)
        entries = [self._entry() for _ in range(num_tensors)]
        if self._alignment < 1:
            raise ValueError(f"general.alignment is {self._alignment}")
        start = -(-self._position // self._alignment) * self._alignment
        return [GGUFTensor(name, shape, kind, start + offset, self._path) for name, shape, kind, offset in entries]

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string().decode("utf-8")
        num_dims = self._number(_U32)
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self._number(_U64) for _ in range(num_dims))[::-1]
        kind, offset = _TYPE_AND_OFFSET.unpack_from(self._data, self._position)
        self._position += _TYPE_AND_OFFSET.size
        return name, shape, kind, offset

    def _number(self, layout: struct.Struct) -> int:
        (value,) = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return int(value)

    def _string(self) -> bytes:
        length = self._number(_U64)
        end = self._position + length
        if end > len(self._data):
            raise ValueError(f"a string of {length} bytes runs past its end")
        text = bytes(self._data[self._position : end])
        self._position = end
        return text

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            length = self._number(_U64)
            self._position += length
        elif kind == _ARRAY:
            element_kind, length = self._number(_U32), self._number(_U64)
            if length > len(self._data) - self._position:
                raise ValueError(f"an array of {length} elements runs past its end")
            if element_kind in (_STRING, _ARRAY):
                for _ in range(length):
                    self._skip(element_kind)
            else:
                self._position += length * _SCALAR_BYTES[element_kind]
        else:
            self._position += _SCALAR_BYTES[kind]


def _load(tensor: GGUFTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The values of one tensor, fp32, in memory of their own."""
    try:
        kind = GGMLQuantizationType(tensor.type_id)
    except ValueError:
        kind = None
    if kind is None or kind.name not in SUPPORTED_TYPES:
        name = f"of unknown type {tensor.type_id}" if kind is None else kind.name
        raise ModelError(f"{tensor.path}: tensor {tensor.name} is {name}; there are {', '.join(SUPPORTED_TYPES)}")
    values_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
    row = tensor.shape[-1] if tensor.shape else 1
    if row % values_per_block:
        raise ModelError(
            f"{tensor.path}: tensor {tensor.name} has rows of {row} values, not blocks of {values_per_block}"
        )
    num_bytes = math.prod(tensor.shape) // values_per_block * bytes_per_block
    size = tensor.path.stat().st_size
    if tensor.offset + num_bytes > size:
        raise ModelError(
            f"{tensor.path}: tensor {tensor.name} ends at byte {tensor.offset + num_bytes}, the file at {size}"
        )
    raw = np.fromfile(tensor.path, dtype=np.uint8, count=num_bytes, offset=tensor.offset)
    values = dequantize(raw.reshape(*tensor.shape[:-1], row // values_per_block * bytes_per_block), kind)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)


def _undo_interleave(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], num_heads: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Rows of each head from ``(pair, half)`` order back to ``(half, pair)``."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _hf_name(name: str, architecture: str) -> str:
    """The Hugging Face name; a name we do not know stays, and is refused where the model misses a place for it."""
    names = _GEMMA_LAYER_NAMES if architecture == "gemma3" else _LAYER_NAMES
    match = re.fullmatch(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)", name)
    if match and match[2] in names:
        return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{suffix}" if stem in _TOP_NAMES else name
