"""Reads the key-value part of a GGUF file, quickly and without touching its tensors.

The ``gguf`` package builds a Python object for every string of every array: two seconds for a vocabulary of 49,152
tokens. The tokenizer only needs the values, and a start should not wait for them, so this reader walks the bytes once
(about 60 ms). Layout, little endian::

    magic "GGUF" | version u32 | tensor_count u64 | kv_count u64 | kv_count x (key string, type u32, value) | tensors
    string = length u64, bytes          array = element type u32, length u64, elements
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from engine.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SUPPORTED_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ARRAY_HEADER = struct.Struct("<IQ")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All metadata of ``path``: numbers, booleans and strings as such, arrays as lists.

    Raises ModelError naming the file when it cannot be opened, is not GGUF, has another version or ends too early.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).read()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (struct.error, ValueError, IndexError) as error:
        # ValueError covers an empty file (mmap), bytes that are not UTF-8 and a length past the end
        raise ModelError(f"{path} is not a whole GGUF file: {error}") from error


class _Reader:
    """A cursor over the mapped file."""

    __slots__ = ("_data", "_path", "_position")

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._position = 0

    def read(self) -> dict[str, Any]:
        magic, version, _, num_entries = _HEADER.unpack_from(self._data, 0)
        if magic != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file: it starts with {magic!r}")
        if version not in _SUPPORTED_VERSIONS:
            raise ModelError(f"{self._path} has GGUF version {version}; versions 2 and 3 (little endian) are read")
        self._position = _HEADER.size
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._number(_U32))
        return metadata

    def _number(self, layout: struct.Struct) -> int:
        (value,) = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return int(value)

    def _string(self) -> str:
        length = self._number(_U64)
        end = self._position + length
        if end > len(self._data):
            raise ValueError(f"a string of {length} bytes runs past its end")
        text = self._data[self._position : end].decode("utf-8")
        self._position = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element_kind, length = _ARRAY_HEADER.unpack_from(self._data, self._position)
            self._position += _ARRAY_HEADER.size
            # every element takes at least a byte: a corrupt length must not build a huge list or format first
            if length > len(self._data) - self._position:
                raise ValueError(f"an array of {length} elements runs past its end")
            if element_kind in (_STRING, _ARRAY):
                return [self._value(element_kind) for _ in range(length)]
            layout = struct.Struct(f"<{length}{self._format(element_kind)}")
            values = list(layout.unpack_from(self._data, self._position))
            self._position += layout.size
            return values
        layout = struct.Struct(f"<{self._format(kind)}")
        (value,) = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return value

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind} at byte {self._position}")
        return _SCALARS[kind]
