"""Every kind of error as the official clients raise it: both clients and backends, whole and streamed, over sockets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest
from factories_app import ACME_KEY, EchoBackend, make_app, make_settings, served
from factories_upstream import gateway_on, running_upstream

HELLO: Any = [{"role": "user", "content": "Hi"}]
Ask = Callable[..., Any]


def ask_openai(url: str, *, key: str = ACME_KEY, stream: bool = False, model: str = "default", **fields: Any) -> Any:
    fields = {"messages": HELLO, **fields}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20) as client:
        answer: Any = client.chat.completions.create(model=model, stream=stream, **fields)
        return list(answer) if stream else answer


def ask_anthropic(url: str, *, key: str = ACME_KEY, stream: bool = False, model: str = "default", **fields: Any) -> Any:
    fields = {"messages": HELLO, "max_tokens": 16, **fields}
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=20) as client:
        answer: Any = client.messages.create(model=model, stream=stream, **fields)
        return list(answer) if stream else answer


CLIENTS: dict[str, tuple[Ask, Any]] = {"openai": (ask_openai, openai), "anthropic": (ask_anthropic, anthropic)}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> tuple[Ask, Any]:
    return CLIENTS[request.param]


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    answer: bool = request.param
    return answer


@contextmanager
def gateway(kind: str, **acme: Any) -> Iterator[str]:
    if kind == "embedded":
        with served(make_app(make_settings(acme=acme))) as url:
            yield url
        return
    with running_upstream() as upstream, gateway_on(upstream, acme=acme, max_model_len=4096) as url:
        yield url


@pytest.fixture(scope="module", params=["embedded", "upstream"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with gateway(request.param) as url:
        yield url


def test_a_wrong_key(url: str, client: tuple[Ask, Any], stream: bool) -> None:
    ask, module = client
    with pytest.raises(module.AuthenticationError):
        ask(url, key="sk-wrong", stream=stream)


def test_an_unknown_model(url: str, client: tuple[Ask, Any], stream: bool) -> None:
    ask, module = client
    with pytest.raises(module.NotFoundError, match="nobody"):
        ask(url, model="nobody", stream=stream)


def test_a_prompt_over_the_window(url: str, client: tuple[Ask, Any], stream: bool) -> None:
    ask, module = client
    with pytest.raises(module.BadRequestError, match="maximum context length is 4096 tokens"):
        ask(url, messages=[{"role": "user", "content": "xyz " * 9000}], stream=stream)


def test_a_message_of_the_wrong_shape(url: str, client: tuple[Ask, Any], stream: bool) -> None:
    ask, module = client
    with pytest.raises(module.BadRequestError, match=r"messages\[0\]\.role"):
        ask(url, messages=[{"role": "robot", "content": "Hi"}], stream=stream)


def test_a_body_over_the_limit(url: str, client: tuple[Ask, Any], stream: bool) -> None:
    ask, module = client
    with pytest.raises(module.APIStatusError) as caught:
        ask(url, messages=[{"role": "user", "content": "x" * (17 * 1024 * 1024)}], stream=stream)
    assert caught.value.status_code == 413


def test_every_error_has_a_request_id(url: str, client: tuple[Ask, Any]) -> None:
    ask, module = client
    with pytest.raises(module.NotFoundError) as caught:
        ask(url, model="nobody")
    assert caught.value.response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("kind", ["embedded", "upstream"])
def test_a_rate_limit_says_when_to_come_back(client: tuple[Ask, Any], kind: str) -> None:
    ask, module = client
    with gateway(kind, requests_per_minute=1) as url:
        ask(url)
        with pytest.raises(module.RateLimitError) as caught:
            ask(url, stream=True)
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_an_engine_that_is_down(client: tuple[Ask, Any], stream: bool) -> None:
    ask, module = client
    backend = EchoBackend()
    with served(make_app(backend=backend)) as url:
        backend.is_alive = False
        with pytest.raises(module.APIStatusError) as caught:
            ask(url, stream=stream)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_an_upstream_that_is_down(client: tuple[Ask, Any], stream: bool) -> None:
    ask, module = client
    with running_upstream() as upstream, gateway_on(upstream, max_model_len=4096) as url:
        upstream.kill()
        with pytest.raises(module.APIStatusError) as caught:
            ask(url, stream=stream)
    assert caught.value.status_code in (502, 503)


def test_an_engine_that_fails_in_a_stream(client: tuple[Ask, Any]) -> None:
    ask, module = client
    with served(make_app(backend=EchoBackend(fail_after=2))) as url:
        with pytest.raises(module.APIError, match="allocation failed"):
            ask(url, stream=True)
        with pytest.raises(module.InternalServerError, match="allocation failed"):
            ask(url)


def test_an_upstream_that_fails_in_a_stream(client: tuple[Ask, Any]) -> None:
    ask, module = client
    with (
        running_upstream() as upstream,
        gateway_on(upstream) as url,
        pytest.raises(module.APIError, match="CUDA error"),
    ):
        ask(url, stream=True, extra_body={"x_behaviour": {"error_after": 3}})
