"""Benches: each prints a table to read and one JSON document as its last line."""

__all__: tuple[str, ...] = ()
