"""A cache limited in bytes, least recently used first out; safe for several threads."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ByteCache(Generic[Value]):
    """Values by digest. Keys are digests, so that no text stays in memory as a key."""

    def __init__(self, max_bytes: int, size_of: Callable[[Value], int]) -> None:
        """``size_of`` tells the bytes of a value, whatever holds it included. Raises ValueError below 0 bytes."""
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be at least 0, got {max_bytes}")
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._values: OrderedDict[bytes, Value] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory in use, about."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> Value | None:
        """The value, now the most recently used."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: bytes, value: Value) -> None:
        """Keep a value; what does not fit any more goes, oldest use first. One larger than the cache is not kept."""
        size = self._size_of(value)
        with self._lock:
            replaced = self._values.pop(key, None)
            if replaced is not None:
                self._num_bytes -= self._size_of(replaced)
            if size > self._max_bytes:
                return
            self._values[key] = value
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, evicted = self._values.popitem(last=False)
                self._num_bytes -= self._size_of(evicted)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._values.clear()
            self._num_bytes = 0
