"""Compacts a prompt in this process, with tokenizer and encoder but without an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app.answers import compact_answer
from app.backends.base import PromptEncoder
from app.compaction import Compactor, RequestCounter
from app.completion_request import read_completion, read_relayed
from app.errors import ConfigError
from app.gateway import load_encoder, load_reranker
from app.receipts import new_receipt_id
from app.settings import Settings
from app.snapshot import LiveConfig
from reducer.encoder import Encoder
from reducer.reranker import Reranker


@dataclass(frozen=True, slots=True)
class LocalModels:
    """What a reduction needs of the models, without the engine."""

    prompt_encoder: PromptEncoder
    window: int
    encoder: Encoder | None
    reranker: Reranker | None

    @classmethod
    def load(cls, settings: Settings) -> "LocalModels":
        """Loads tokenizer, encoder and cross-encoder; takes seconds. Raises ``ConfigError`` as the gateway would."""
        prompt_encoder, window = _counter(settings)
        encoder, reranker = None, None
        if settings.encoder.enabled:
            try:
                encoder = load_encoder(settings)
            except ConfigError:
                if settings.encoder.required:
                    raise
        if settings.reranker.model is not None:
            try:
                reranker = load_reranker(settings)
            except ConfigError:
                if settings.reranker.required:
                    raise
        return cls(prompt_encoder, window, encoder, reranker)

    def counter(
        self, template_kwargs: Mapping[str, Any], unsent_tools: Sequence[Mapping[str, Any]] = ()
    ) -> RequestCounter:
        """Counts as the gateway does for a request with these template variables."""
        return RequestCounter(self.prompt_encoder, template_kwargs, unsent_tools)


def compact_here(settings: Settings, api_key: str, body: bytes) -> bytes:
    """The answer of ``POST /v1/compact`` as JSON. Raises what the gateway would answer with."""
    snapshot = LiveConfig(settings).current
    principal = snapshot.authenticator.authenticate(f"Bearer {api_key}")
    request = (read_relayed if settings.backend.kind == "openai" else read_completion)(body)
    models = LocalModels.load(settings)
    compactor = Compactor(models.prompt_encoder, models.window, models.encoder, models.reranker)
    policy = compactor.choose_policy(snapshot, request, principal)
    compaction = compactor.compact(
        snapshot,
        request,
        principal,
        policy,
        compactor.input_budget(snapshot, request, principal, policy.settings, None),
        new_receipt_id(),
        bypass=bool(request.overrides.bypass),
    )
    return msgspec.json.encode(compact_answer(compaction))


def _counter(settings: Settings) -> tuple[PromptEncoder, int]:
    """How the served model counts, and its window."""
    if settings.backend.kind == "openai":
        from app.backends.upstream_counting import load_counting_encoder

        if settings.backend.max_model_len is None:
            raise ConfigError("backend.max_model_len is not set, and only a running gateway asks the replicas for it")
        return load_counting_encoder(settings.backend), settings.backend.max_model_len
    from app.backends.embedded import ChatEncoder
    from engine.chat_template import ChatTokenizer
    from engine.model_store import resolve_model
    from engine.weights import open_checkpoint

    path = resolve_model(settings.engine.model.model)
    window = open_checkpoint(path).spec.max_position
    if settings.engine.model.max_model_len is not None:
        window = min(window, settings.engine.model.max_model_len)
    return ChatEncoder(ChatTokenizer.from_path(path)), window
