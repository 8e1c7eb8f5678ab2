"""The routes beside completions: probes, models, tokenize, and what the framework answers itself."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from factories_app import EchoBackend, bearer, make_app, make_model_info, user
from litestar.testing import AsyncTestClient

URL = "/v1/chat/completions"


def client(backend: EchoBackend | None = None) -> AsyncTestClient[Any]:
    return AsyncTestClient(make_app(backend=backend))


@pytest.fixture
async def http() -> AsyncIterator[AsyncTestClient[Any]]:
    async with client() as http:
        yield http


@pytest.mark.parametrize("url", ["/health", "/ready", "/readyz", "/livez", "/ping", "/health/readiness"])
@pytest.mark.parametrize("is_alive", [False, True])
async def test_a_probe_with_head_has_the_answer_to_get_without_its_body(url: str, is_alive: bool) -> None:
    backend = EchoBackend()
    async with client(backend=backend) as http:
        backend.is_alive = is_alive
        head, get = await http.head(url), await http.get(url)
    assert head.content == b""
    assert head.status_code == get.status_code
    for name in ("content-type", "content-length", "retry-after"):
        assert head.headers.get(name) == get.headers.get(name)


async def test_request_ids_are_taken_over_where_harmless_and_made_where_not(http: AsyncTestClient[Any]) -> None:
    given = await http.get("/health", headers={"x-request-id": "abc-1"})
    odd = await http.get("/nowhere", headers={"x-request-id": "a b\t<script>"})
    assert given.headers["x-request-id"] == "abc-1"
    assert odd.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(("method", "url", "status"), [("GET", "/v2", 404), ("GET", URL, 405), ("PUT", URL, 405)])
async def test_the_frameworks_own_errors_are_openai_shaped(
    http: AsyncTestClient[Any], method: str, url: str, status: int
) -> None:
    response = await http.request(method, url)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_models_are_listed_under_each_name_with_the_admitted_window() -> None:
    async with client(backend=EchoBackend(info=make_model_info(max_model_len=777))) as http:
        listed = (await http.get("/v1/models", headers=bearer())).json()
        one = (await http.get("/v1/models/default", headers=bearer())).json()
        unknown = await http.get("/v1/models/org/other", headers=bearer())
        anonymous = await http.get("/v1/models")
    assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [
        ("default", 777),
        ("smollm2-135m-instruct", 777),
    ]
    assert one == listed["data"][0]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert anonymous.status_code == 401


async def test_tokenize_counts_a_text_and_a_conversation(http: AsyncTestClient[Any]) -> None:
    text = (await http.post("/tokenize", json={"prompt": "añ"}, headers=bearer())).json()
    chat = (await http.post("/v1/tokenize", json={"messages": [user("hi")]}, headers=bearer())).json()
    both = await http.post("/tokenize", json={"prompt": "a", "messages": [user("hi")]}, headers=bearer())
    assert (text["count"], text["tokens"], text["max_model_len"]) == (3, [97, 195, 177], 4096)
    assert chat["count"] == len("<user>hi<assistant>")
    assert both.status_code == 400
