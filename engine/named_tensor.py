"""The value between a checkpoint reader and a model: one tensor, its name, and where it came from."""

from typing import NamedTuple

import torch


class NamedTensor(NamedTuple):
    """One weight of a checkpoint."""

    name: str
    """As Hugging Face names it, e.g. ``model.layers.0.mlp.down_proj.weight``."""
    values: torch.Tensor
    origin: str
    """File and the tensor's name in it, for errors."""
