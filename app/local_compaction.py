"""Compacts a prompt in this process, with tokenizer and encoder but without an engine."""

import msgspec

from app.answers import compact_answer
from app.auth import Authenticator
from app.compaction import Compactor
from app.completion_request import read_completion
from app.errors import ConfigError
from app.gateway import load_encoder
from app.receipts import new_receipt_id
from app.settings import Settings


def compact_here(settings: Settings, api_key: str, body: bytes) -> bytes:
    """The answer of ``POST /v1/compact`` as JSON. Raises what the gateway would answer with."""
    from app.backends.embedded import ChatEncoder
    from engine.chat_template import ChatTokenizer
    from engine.model_store import resolve_model
    from engine.weights import open_checkpoint

    principal = Authenticator(settings).authenticate(f"Bearer {api_key}")
    request = read_completion(body)
    path = resolve_model(settings.engine.model.model)
    window = open_checkpoint(path).spec.max_position
    if settings.engine.model.max_model_len is not None:
        window = min(window, settings.engine.model.max_model_len)
    encoder = None
    if settings.encoder.enabled:
        try:
            encoder = load_encoder(settings)
        except ConfigError:
            if settings.encoder.required:
                raise
    compactor = Compactor(settings, ChatEncoder(ChatTokenizer.from_path(path)), window, encoder)
    policy = compactor.choose_policy(request, principal)
    compaction = compactor.compact(
        request,
        principal,
        policy.name,
        compactor.input_budget(request, principal, policy.settings, None),
        new_receipt_id(),
        bypass=bool(request.overrides.bypass),
    )
    return msgspec.json.encode(compact_answer(compaction))
