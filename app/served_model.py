"""The names under which the one model is served."""

import time
from pathlib import PurePath

import msgspec

from app.errors import NotFoundError
from app.settings import Settings
from engine.outputs import ModelInfo


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``GET /v1/models``."""

    id: str
    object: str = "model"
    created: int
    max_model_len: int
    """Window in tokens that is really admitted, prompt and output together."""
    root: str
    """The model behind the name."""
    dtype: str
    """Of the computation."""
    quantization: str
    """Of the weights; ``none`` where they are as loaded."""
    kv_cache_dtype: str
    """Of keys and values; ``auto`` is ``dtype``."""
    quantization_gate: str
    """``none`` (nothing is quantized), ``passed``, or served by force: ``forced_failed``, ``forced_unmeasured``."""
    owned_by: str = "firsttoken"


class ServedModel:
    """Knows the served name and the model's own name as an alias."""

    def __init__(self, settings: Settings) -> None:
        self.name = settings.server.served_model_name
        is_embedded = settings.backend.kind == "embedded"
        self.own_name = _own_name(settings.engine.model.model) if is_embedded else settings.backend.model
        self._created = int(time.time())

    @property
    def names(self) -> tuple[str, ...]:
        """All names that ``model`` may have, the served one first."""
        return tuple(dict.fromkeys((self.name, self.own_name)))

    def check(self, name: str) -> None:
        """Raises ``NotFoundError`` for a model that is not served."""
        if name not in self.names:
            raise NotFoundError(
                f"The model {name!r} does not exist; served: {', '.join(self.names)}.",
                param="model",
                code="model_not_found",
            )

    def cards(self, info: ModelInfo) -> list[ModelCard]:
        """An entry for every name."""
        return [self.card(name, info) for name in self.names]

    def card(self, name: str, info: ModelInfo) -> ModelCard:
        """The entry of one name. Raises ``NotFoundError`` where it is not served."""
        self.check(name)
        return ModelCard(
            id=name,
            created=self._created,
            max_model_len=info.max_model_len,
            root=self.own_name,
            dtype=info.dtype,
            quantization=info.quantization,
            kv_cache_dtype=info.kv_cache_dtype,
            quantization_gate=info.quantization_gate,
        )


def _own_name(model: str) -> str:
    """A catalogue name or Hugging Face id as it is; of a path only the last part, which says nothing of the machine."""
    path = PurePath(model)
    is_path = path.is_absolute() or model.startswith((".", "~")) or model.endswith(".gguf")
    return (path.stem if path.suffix == ".gguf" else path.name) if is_path else model
