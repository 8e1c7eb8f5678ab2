"""Builds gateways for tests: settings with two tenants, an echo engine over bytes, a server on a real socket."""

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
from litestar import Litestar

from app.asgi import create_app
from app.backends.base import BackendRequest
from app.operator_settings import StorageSettings
from app.settings import EncoderSettings, KeySettings, Settings, TenantSettings
from engine.errors import EngineDeadError
from engine.outputs import EngineStats, FinishReason, ModelInfo, RequestOutput, RequestTimings
from engine.token_logprobs import PositionLogprobs, TokenLogprob

ACME_KEY = "sk-acme-demo"
GLOBEX_KEY = "sk-globex-demo"
OUTSIDER_KEY = "sk-acme-outsider"
"""A key of acme without groups."""


def make_key(key: str, *, groups: tuple[str, ...] = ("staff", "public"), name: str = "demo") -> KeySettings:
    return KeySettings(sha256=hashlib.sha256(key.encode()).hexdigest(), groups=groups, name=name)


def make_settings(*, acme: dict[str, Any] | None = None, **changes: Any) -> Settings:
    """Settings without an encoder and a database; ``acme`` changes the limits of that tenant."""
    tenants = {
        "acme": TenantSettings(keys=(make_key(ACME_KEY), make_key(OUTSIDER_KEY, groups=())), **(acme or {})),
        "globex": TenantSettings(keys=(make_key(GLOBEX_KEY),)),
    }
    without = {"encoder": EncoderSettings(enabled=False), "storage": StorageSettings(enabled=False)}
    return Settings(**{"tenants": tenants, **without, **changes})


def make_model_info(**changes: Any) -> ModelInfo:
    info = ModelInfo(
        model="bytes",
        architecture="echo",
        dtype="fp32",
        num_parameters=0,
        max_model_len=4096,
        vocab_size=256,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        intermediate_size=1,
        block_size=16,
        num_blocks=256,
        weights_digest="0",
        attention_backend="none",
    )
    return msgspec.structs.replace(info, **changes)


class ByteEncoder:
    """One token a byte; a message is ``<role>content``, tools are JSON in front, ``<assistant>`` is at the end."""

    max_token_bytes = 1
    counting = "exact"

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def count_text(self, text: str) -> int:
        return len(text.encode())

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> list[int]:
        if "refuse" in kwargs:
            raise ValueError("conversation roles must alternate")
        parts = [msgspec.json.encode([tools, kwargs]).decode()] if tools or kwargs else []
        parts += [f"<{message['role']}>{self._content(message)}" for message in messages]
        return list("".join([*parts, "<assistant>"]).encode())

    def count_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> int:
        return len(self.encode_chat(messages, tools, **kwargs))

    @staticmethod
    def _content(message: Mapping[str, Any]) -> str:
        content = message.get("content")
        if isinstance(content, list):
            return "\n".join(part["text"] for part in content)
        return content or ""


@dataclass
class EchoBackend:
    """Answers with the words of ``reply``, one a step, and remembers what it was asked and what was aborted."""

    reply: str = "Hello, wörld! 你好 😀"
    step_s: float = 0.0
    """Pause before every output."""
    fail_after: int | None = None
    """Outputs after which a request fails."""
    start_error: Exception | None = None
    """Raised when a request comes."""
    info: ModelInfo = field(default_factory=make_model_info)
    encoder: ByteEncoder = field(default_factory=ByteEncoder)
    requests: list[BackendRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    is_alive: bool = False
    num_running: int = 0
    cached_prefixes: dict[str, list[int]] = field(default_factory=dict)

    async def start(self) -> None:
        self.is_alive = True

    async def close(self) -> None:
        self.is_alive = False

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.num_running,
            num_waiting=0,
            kv_cache_usage=0.0,
            prompt_tokens=0,
            cached_prompt_tokens=0,
            generation_tokens=0,
            num_preemptions=0,
            num_steps=0,
        )

    async def generate(self, request: BackendRequest) -> AsyncIterator[RequestOutput]:
        if not self.is_alive:
            raise EngineDeadError("it has been killed", 3.0)
        if self.start_error is not None:
            raise self.start_error
        self.requests.append(request)
        self.num_running += 1
        has_ended = False
        try:
            prompt = self.encoder.encode_chat(request.messages, request.tools, **request.template_kwargs)
            num_cached = self._num_cached(request.cache_salt, prompt)
            words = self.reply.split(" ")[: request.sampling.max_tokens]
            is_cut = len(words) < len(self.reply.split(" "))
            for index, word in enumerate(words):
                await asyncio.sleep(self.step_s)
                is_last = index == len(words) - 1
                reason: FinishReason | None = ("length" if is_cut else "stop") if is_last else None
                if self.fail_after is not None and index >= self.fail_after:
                    reason = "error"
                has_ended = reason is not None
                yield RequestOutput(
                    request_id=request.request_id,
                    text="" if reason == "error" else word if index == 0 else f" {word}",
                    new_token_ids=[index],
                    num_prompt_tokens=len(prompt),
                    num_cached_tokens=num_cached,
                    num_output_tokens=index + 1,
                    finish_reason=reason,
                    error="allocation failed" if reason == "error" else None,
                    logprobs=_word_logprobs(request, index, word),
                    timings=RequestTimings(
                        queue_ms=1.0, prefill_ms=5.0, decode_ms=index * 2.0, num_chunks=1, num_preemptions=0
                    ),
                )
                if has_ended:
                    return
        finally:
            self.num_running -= 1
            if not has_ended:
                self.aborted.append(request.request_id)

    def _num_cached(self, salt: str, prompt: list[int]) -> int:
        """Whole blocks of 16 that the salt's last prompt shares, never the last token."""
        before = self.cached_prefixes.get(salt, [])
        shared = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before))
        self.cached_prefixes[salt] = prompt
        return min(shared, len(prompt) - 1) // 16 * 16


def _word_logprobs(request: BackendRequest, index: int, word: str) -> list[PositionLogprobs] | None:
    """Of one word: -0.5 for itself, then one less for each further one."""
    num_top = request.sampling.top_logprobs
    if num_top is None:
        return None
    text = (word if index == 0 else f" {word}").encode()
    top = [
        TokenLogprob(token_id=place, logprob=-0.5 - place, text=text if place == 0 else b"\xe4")
        for place in range(num_top)
    ]
    return [PositionLogprobs(chosen=TokenLogprob(token_id=0, logprob=-0.5, text=text), top=top)]


def make_app(settings: Settings | None = None, backend: EchoBackend | None = None) -> Litestar:
    return create_app(settings or make_settings(), backend or EchoBackend())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def make_body(text: str = "What is a widget?", **fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [user(text)], **fields}


def make_tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """A function that takes a city."""
    schema = parameters or {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": schema}}


def make_documents(num_documents: int, *, num_words: int = 40) -> list[dict[str, Any]]:
    """Documents that are all different; the one about widgets comes last."""
    documents = [
        {"id": f"d{i}", "text": " ".join(f"word{i}x{j}" for j in range(num_words)) + "."}
        for i in range(num_documents - 1)
    ]
    return [*documents, {"id": "gold", "text": "A widget is a small gadget made in Ghent."}]


def bearer(key: str = ACME_KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextlib.contextmanager
def served(app: Litestar) -> Iterator[str]:
    """The application on a free port of this machine, in a thread; yields its URL."""
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server ended while it started"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def wait_until(condition: Any, timeout_s: float = 5.0) -> bool:
    """Whether ``condition()`` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())
