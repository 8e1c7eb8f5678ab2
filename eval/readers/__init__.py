"""Readers of public data formats; each turns a file or folder into cases. ``read_cases`` finds the right one."""

from eval.readers.registry import FORMATS, detect_format, read_cases

__all__ = ("FORMATS", "detect_format", "read_cases")
