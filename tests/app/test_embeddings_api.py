"""Embeddings by the encoder that ranks passages, through the official client."""

from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
from factories_app import ACME_KEY, EchoBackend, bearer, make_settings, served
from factories_reducer import HashEncoder

from app import gateway as gateway_module
from app.asgi import create_app
from app.settings import EncoderSettings

TEXTS = ["A widget is a gadget.", "你好 😀", "A widget is a gadget."]


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(gateway_module, "load_encoder", lambda settings: HashEncoder(64))
    settings = make_settings(acme={"tokens_per_day": 500}, encoder=EncoderSettings(model="hash-encoder"))
    with served(create_app(settings, EchoBackend())) as url:
        yield url


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=ACME_KEY, max_retries=0, timeout=20)


def test_vectors_are_the_encoders_in_both_formats(url: str) -> None:
    expected = HashEncoder(64).encode(TEXTS)
    with client(url) as openai_client:
        numbers = openai_client.embeddings.create(model="hash-encoder", input=TEXTS, encoding_format="float")
        packed = openai_client.embeddings.create(model="hash-encoder", input=TEXTS)  # base64 inside
    for answer in (numbers, packed):
        assert [item.index for item in answer.data] == [0, 1, 2]
        np.testing.assert_array_equal(np.array([item.embedding for item in answer.data], dtype=np.float32), expected)
    assert numbers.usage.prompt_tokens == numbers.usage.total_tokens == sum(len(text.encode()) for text in TEXTS)


def test_tokens_are_charged_and_limited(url: str) -> None:
    with client(url) as openai_client:
        openai_client.embeddings.create(model="hash-encoder", input="x" * 400)
        with pytest.raises(openai.RateLimitError):
            openai_client.embeddings.create(model="hash-encoder", input="x" * 200)
        openai_client.embeddings.create(model="hash-encoder", input="x" * 100)


def test_what_cannot_be_embedded_is_refused(url: str) -> None:
    def status(**body: object) -> int:
        return httpx.post(f"{url}/v1/embeddings", json=body, headers=bearer()).status_code

    assert status(model="hash-encoder", input="") == 400
    assert status(model="hash-encoder", input=[]) == 400
    assert status(model="hash-encoder", input=[1, 2]) == 400
    assert status(model="hash-encoder", input="x", dimensions=7) == 400
    assert status(model="hash-encoder", input="x", dimensions=64) == 200
    assert status(model="nobody", input="x") == 404
    assert httpx.post(f"{url}/v1/embeddings", json={"model": "hash-encoder", "input": "x"}).status_code == 401
