"""``GET /v1/models``, ``POST /tokenize`` and ``/detokenize``: what is served, and how it counts."""

import msgspec
from litestar import Controller, Response, get, post

from app.chat_service import LARGE_BODY_BYTES
from app.compaction import template_refusal
from app.completion_request import convert_body, decode_object
from app.errors import InvalidRequestError
from app.gateway import Gateway
from app.http_io import GatewayRequest, authenticated, gateway_of, json_response, read_arrival
from app.schemas import DetokenizeBody, TokenizeBody
from app.served_model import ModelCard


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/models``."""

    object: str = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizedText(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    prompt: str


class ModelsController(Controller):
    """The served model under each of its names."""

    @get("/v1/models")
    async def list_models(self, request: GatewayRequest) -> Response[bytes]:
        """All names with the window that is really admitted."""
        await authenticated(request)
        gateway = gateway_of(request)
        return json_response(ModelList(data=gateway.served_model.cards(gateway.backend.info)))

    @get("/v1/models/{model_name:path}")
    async def show_model(self, request: GatewayRequest) -> Response[bytes]:
        """One name; Hugging Face ids hold a slash."""
        await authenticated(request)
        gateway = gateway_of(request)
        name = str(request.path_params["model_name"]).removeprefix("/")
        return json_response(gateway.served_model.card(name, gateway.backend.info))

    @post(["/tokenize", "/v1/tokenize"], status_code=200)
    async def tokenize(self, request: GatewayRequest) -> Response[bytes]:
        """Token ids of a text, or of a conversation with template and tools."""
        gateway = gateway_of(request)
        with gateway.drain.interruptible():
            arrival = await read_arrival(request)
            run = gateway.workers.run_large if len(arrival.body) > LARGE_BODY_BYTES else gateway.workers.run
            return json_response(await run(_tokenize, gateway, arrival.body))

    @post(["/detokenize", "/v1/detokenize"], status_code=200)
    async def detokenize(self, request: GatewayRequest) -> Response[bytes]:
        """The text of token ids."""
        gateway = gateway_of(request)
        with gateway.drain.interruptible():
            arrival = await read_arrival(request)
            run = gateway.workers.run_large if len(arrival.body) > LARGE_BODY_BYTES else gateway.workers.run
            return json_response(await run(_detokenize, gateway, arrival.body))


def _detokenize(gateway: Gateway, body: bytes) -> DetokenizedText:
    checked = convert_body(decode_object(body), DetokenizeBody)
    if checked.model is not None:
        gateway.served_model.check(checked.model)
    try:
        return DetokenizedText(prompt=gateway.backend.encoder.decode(checked.tokens))
    except (ValueError, KeyError, IndexError, OverflowError):
        raise InvalidRequestError(
            "Invalid 'tokens': an id is outside the vocabulary.", param="tokens", code="invalid_value"
        ) from None


def _tokenize(gateway: Gateway, body: bytes) -> Tokens:
    raw = decode_object(body)
    checked = convert_body(raw, TokenizeBody)
    if checked.model is not None:
        gateway.served_model.check(checked.model)
    if (checked.prompt is None) == (checked.messages is None):
        raise InvalidRequestError(
            "Exactly one of 'prompt' and 'messages' is required.", param="prompt", code="invalid_value"
        )
    encoder = gateway.backend.encoder
    if checked.prompt is not None:
        token_ids = encoder.encode_text(checked.prompt)
    else:
        try:
            token_ids = encoder.encode_chat(raw["messages"], raw.get("tools") or ())
        except ValueError as error:
            raise template_refusal(error) from None
    return Tokens(count=len(token_ids), max_model_len=gateway.backend.info.max_model_len, tokens=token_ids)
