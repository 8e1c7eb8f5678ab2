"""``POST /v1/embeddings``: vectors of the encoder that ranks passages."""

import base64
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from litestar import Controller, Response, post
from msgspec import Meta

from app.completion_request import convert_body, decode_object
from app.errors import InvalidRequestError, NotFoundError
from app.gateway import Gateway
from app.http_io import GatewayRequest, gateway_of, json_response, read_arrival, unless_disconnected

MAX_NUM_INPUTS = 2048


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request for embeddings."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_NUM_INPUTS)]
    model: str
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector, of length 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or little-endian float32 in base64."""


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as the served model counts them; the encoder's own count may differ."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/embeddings``."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class EmbeddingsController(Controller):
    """Embeds texts."""

    @post("/v1/embeddings", status_code=200)
    async def create(self, request: GatewayRequest) -> Response[bytes]:
        """One vector for each text, in order. Charges a request and its tokens."""
        gateway = gateway_of(request)
        with gateway.drain.interruptible():
            arrival = await read_arrival(request)
            lease = await gateway.admission.admit(arrival.principal)
            num_tokens = 0
            try:
                body = convert_body(decode_object(arrival.body), EmbeddingsBody)
                texts = [body.input] if isinstance(body.input, str) else body.input
                num_tokens = await gateway.workers.run(_count, gateway, texts)
                await lease.reserve(num_tokens, 0)
                # A thread of its own: embedding thousands of texts must not hold up small requests.
                job = gateway.workers.run_large(_embed, gateway, body, texts, num_tokens)
                answer = await unless_disconnected(request.receive, job)
            except BaseException:
                lease.settle()
                raise
            lease.settle(num_tokens, 0)
        return json_response(answer)


def _count(gateway: Gateway, texts: Sequence[str]) -> int:
    return sum(gateway.backend.encoder.count_text(text) for text in texts)


def _embed(gateway: Gateway, body: EmbeddingsBody, texts: Sequence[str], num_tokens: int) -> EmbeddingList:
    name = gateway.settings.encoder.model
    if body.model not in (name, gateway.served_model.name):
        raise NotFoundError(
            f"The model {body.model!r} does not exist; the encoder is {name!r}.", param="model", code="model_not_found"
        )
    if gateway.encoder is None:
        raise InvalidRequestError("No encoder is loaded (encoder.enabled).", param="model", code="unsupported_value")
    if any(not text for text in texts):
        raise InvalidRequestError(
            "Invalid 'input': it must not hold an empty text.", param="input", code="invalid_value"
        )
    vectors = gateway.encoder.encode(texts)
    if body.dimensions not in (None, vectors.shape[1]):
        text = f"Invalid 'dimensions': the encoder has {vectors.shape[1]}, got {body.dimensions}."
        raise InvalidRequestError(text, param="dimensions", code="invalid_value")
    data = [
        Embedding(
            index=index,
            embedding=base64.b64encode(row.astype("<f4").tobytes()).decode()
            if body.encoding_format == "base64"
            else row.tolist(),
        )
        for index, row in enumerate(vectors)
    ]
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return EmbeddingList(data=data, model=name, usage=usage)
