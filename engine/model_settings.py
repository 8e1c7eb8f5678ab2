"""Reads single settings of a model's configuration, and names file and setting when something is wrong with one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError


class Settings:
    """The settings of one file; a setting that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or ``default`` where there is none."""
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> float:
        """A number of at least 0. Raises ModelError for anything else, and where there is neither value nor default."""
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"{self.path} has no {name}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {name} must be a number, got {value!r}")
        if value < 0:
            raise ModelError(f"{self.path}: {name} must not be negative, got {value!r}")
        return value

    def optional_number(self, name: str) -> float | None:
        """A number of at least 0, or ``None`` where there is no value."""
        return None if self.get(name) is None else self.number(name)

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError as ``number`` does."""
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.path}: {name} must be a positive integer, got {value!r}")
        return int(value)

    def refuse(self, name: str, value: object, supported: str) -> ModelError:
        """The error for a value that our models do not compute."""
        return ModelError(f"{self.path}: {name} {value!r} is not supported; {supported}")
