"""Reads the tensors of a Hugging Face folder: ``config.json`` and safetensors, in one file or in shards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.model_spec import spec_from_hf_config
from engine.named_tensor import NamedTensor

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """The weights of one model in a folder."""

    def __init__(self, path: Path) -> None:
        """Read the configuration and find the files; no weights yet.

        Raises:
            ModelError: a file is missing or broken, or the model is not supported.
        """
        self.path = path
        self.files = safetensors_files(path)
        self.spec = spec_from_hf_config(_read_json(path / "config.json"), path / "config.json")

    def tensors(self) -> Iterator[NamedTensor]:
        """All weights, file by file, in the dtype they are stored in. Raises ModelError naming file and tensor.

        Weights of norms that are stored less ``spec.stored_norm_offset`` come whole, in fp32.
        """
        offset = self.spec.stored_norm_offset
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as weights:
                    for name in weights.keys():  # noqa: SIM118 - not a mapping
                        values = weights.get_tensor(name)
                        if values.dtype not in SUPPORTED_DTYPES:
                            raise ModelError(f"{file}: tensor {name} is {values.dtype}; there are F32, F16, BF16")
                        if offset and name.endswith("norm.weight"):
                            values = values.float() + offset
                        yield NamedTensor(name, values, f"{file}: {name}")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {file}: {error}") from error


def safetensors_files(path: Path) -> list[Path]:
    """The weights files of a folder, in order: those the index names, else ``model.safetensors``, else all.

    Raises:
        ModelError: the folder has none, or one that the index names is missing.
    """
    if (path / _INDEX).is_file():
        weight_map = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{path / _INDEX} has no weight_map")
        files = [path / name for name in sorted(set(weight_map.values()))]
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} holds no safetensors")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{path / _INDEX} names {file.name}, which is missing")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds {type(values).__name__}, not an object")
    return values
