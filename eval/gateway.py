"""HTTP client of the gateway: compact, chat, and stream with the time to the first token.

Times are taken here, at the client, from the moment a request is sent. TTFT ends with the first non-empty content.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from eval.errors import ContextLengthError, GatewayError

DEMO_KEYS = ("sk-acme-demo", "sk-globex-demo")
"""Keys of the two tenants of the example configuration."""

_MAX_TRIES = 6
_MAX_WAIT_S = 60.0
_RETRIED = (429, 503)

T = TypeVar("T")


class DocumentDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway says it did with one document."""

    id: str
    action: str
    reason: str = ""
    score: float | None = None
    label: str | None = None
    tokens_before: int = 0
    tokens_after: int = 0
    spans: list[tuple[int, int]] = []
    merged_into: str | None = None
    sources: list[str] = []


class TurnDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway says it did with one message of the history."""

    index: int
    action: str
    reason: str = ""
    tokens_before: int = 0
    tokens_after: int = 0


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the reduction."""

    stage: str
    tokens_before: int
    tokens_after: int
    ms: float
    degraded: str | None = None


class BudgetInForce(msgspec.Struct, frozen=True, kw_only=True):
    """The limit on prompt tokens and where it came from."""

    max_input_tokens: int
    source: str


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/v1/compact``."""

    messages: list[dict[str, Any]]
    prompt_tokens: int
    original_prompt_tokens: int
    budget: BudgetInForce
    documents: list[DocumentDecision] = []
    denied_documents: int = 0
    turns: list[TurnDecision] = []
    stages: list[Stage] = []


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``/v1/models``."""

    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ServedModel]


class _PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    message: _Message = _Message()
    delta: _Message = _Message()
    finish_reason: str | None = None


class _Completion(msgspec.Struct, frozen=True, kw_only=True):
    choices: list[_Choice]
    usage: _Usage | None = None


class _ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str = ""
    code: str | int | None = None


class _ErrorEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    error: _ErrorBody


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One request as the application sends it, before any reduction."""

    messages: Sequence[Mapping[str, str]]
    documents: Sequence[Mapping[str, Any]] = ()
    policy: str | None = None
    max_input_tokens: int | None = None
    bypass: bool = False
    max_tokens: int | None = None
    """Most output tokens. The gateway keeps that much of the window free, so it shapes a compaction too."""

    def body(self, model: str) -> dict[str, Any]:
        """JSON body shared by compaction and completion."""
        body: dict[str, Any] = {"model": model, "messages": list(self.messages)}
        if self.documents:
            body["documents"] = list(self.documents)
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        options = {"policy": self.policy, "max_input_tokens": self.max_input_tokens, "bypass": self.bypass or None}
        if given := {name: value for name, value in options.items() if value is not None}:
            body["firsttoken"] = given
        return body


@dataclass(frozen=True, slots=True)
class Generation:
    """What the model answered, and when."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    """Request sent to first non-empty content; ``None`` where nothing was generated or nothing was streamed."""
    total_ms: float
    finish_reason: str | None


@dataclass(slots=True)
class GatewayClient:
    """Talks to one gateway as one tenant. Waits as told and tries again where the gateway is busy (429, 503)."""

    url: str
    api_key: str
    model: str = "default"
    timeout_s: float = 900.0
    sleep: Callable[[float], None] = time.sleep
    _http: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._http = httpx.Client(
            base_url=self.url.rstrip("/"),
            headers={"Authorization": f"Bearer {self.api_key}"},
            timeout=httpx.Timeout(self.timeout_s, connect=10.0),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def models(self) -> list[ServedModel]:
        """The served models."""
        with self._send("GET", "/v1/models", None) as (response, _):
            return _decode(response.read(), _ModelList).data

    def compact(self, request: PromptRequest) -> Compaction:
        """The reduction without a generation."""
        with self._send("POST", "/v1/compact", request.body(self.model)) as (response, _):
            return _decode(response.read(), Compaction)

    def chat(self, request: PromptRequest) -> Generation:
        """A greedy completion in one piece."""
        body = request.body(self.model) | {"temperature": 0}
        with self._send("POST", "/v1/chat/completions", body) as (response, sent):
            completion = _decode(response.read(), _Completion)
        total_ms = _ms_since(sent)
        if not completion.choices or completion.usage is None:
            raise GatewayError("the completion has no choice or no usage", status=200)
        choice = completion.choices[0]
        return _generation(choice.message.content or "", completion.usage, None, total_ms, choice.finish_reason)

    def stream(self, request: PromptRequest) -> Generation:
        """A greedy completion, streamed, so that the time to the first token is known."""
        body = request.body(self.model) | {
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces: list[str] = []
        ttft_ms: float | None = None
        usage: _Usage | None = None
        finish_reason: str | None = None
        with self._send("POST", "/v1/chat/completions", body) as (response, sent):
            for data in _events(response):
                chunk = _decode_event(data)
                usage = chunk.usage or usage
                for choice in chunk.choices[:1]:
                    finish_reason = choice.finish_reason or finish_reason
                    if choice.delta.content:
                        ttft_ms = ttft_ms if ttft_ms is not None else _ms_since(sent)
                        pieces.append(choice.delta.content)
        total_ms = _ms_since(sent)
        if usage is None:
            raise GatewayError("the stream ended without usage", status=200)
        return _generation("".join(pieces), usage, ttft_ms, total_ms, finish_reason)

    @contextmanager
    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[tuple[httpx.Response, float]]:
        """The successful response and when its request was sent. Raises GatewayError for everything else."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            for attempt in range(_MAX_TRIES):
                sent = time.perf_counter()
                with self._http.stream(method, path, content=content, headers=headers) as response:
                    if response.is_success:
                        yield response, sent
                        return
                    response.read()
                    if response.status_code not in _RETRIED or attempt == _MAX_TRIES - 1:
                        raise _error(response)
                    wait_s = _retry_after_s(response)
                self.sleep(wait_s)
        except httpx.HTTPError as error:
            raise GatewayError(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
        raise AssertionError("the last attempt returns or raises")


def timed(call: Callable[[PromptRequest], T], request: PromptRequest) -> tuple[T, float]:
    """The answer of ``call`` and how long it took, in ms."""
    start = time.perf_counter()
    answer = call(request)
    return answer, _ms_since(start)


def _events(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield data


def _decode_event(data: str) -> _Completion:
    if data.startswith('{"error"'):
        envelope = _decode(data.encode(), _ErrorEnvelope)
        raise GatewayError(f"the stream broke off: {envelope.error.message}", status=200, code=_code(envelope.error))
    return _decode(data.encode(), _Completion)


def _decode(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GatewayError(f"unexpected answer: {error}: {content[:200]!r}", status=200) from None


def _generation(
    text: str, usage: _Usage, ttft_ms: float | None, total_ms: float, finish_reason: str | None
) -> Generation:
    details = usage.prompt_tokens_details
    return Generation(
        text=text,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        completion_tokens=usage.completion_tokens,
        ttft_ms=ttft_ms,
        total_ms=total_ms,
        finish_reason=finish_reason,
    )


def _error(response: httpx.Response) -> GatewayError:
    try:
        body = msgspec.json.decode(response.content, type=_ErrorEnvelope).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = _ErrorBody(message=response.text[:200])
    message = f"HTTP {response.status_code}: {body.message}"
    kind = ContextLengthError if _code(body) == "context_length_exceeded" else GatewayError
    return kind(message, status=response.status_code, code=_code(body))


def _code(body: _ErrorBody) -> str | None:
    return None if body.code is None else str(body.code)


def _retry_after_s(response: httpx.Response) -> float:
    try:
        wanted = float(response.headers.get("Retry-After", "1"))
    except ValueError:
        wanted = 1.0
    return min(max(wanted, 0.1), _MAX_WAIT_S)


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1000.0
