"""Replicas of an OpenAI-compatible server as a backend: vLLM, SGLang, NVIDIA Dynamo, OpenAI itself.

A request is passed on with the client's own JSON (``upstream_body``), to the replica that has its beginning in the
prefix cache (``replicas``), and tried on another one as long as none has begun to answer: up to the first event of a
stream, or to the end of an answer that does not stream, nothing has been sent to the client. From then on a failure is
the client's to see.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog

from app.backend_settings import BackendSettings
from app.backends.base import BackendRequest, PromptEncoder
from app.backends.replicas import Replica, Ring
from app.backends.upstream_answer import DONE, UpstreamAnswer, chunk_facts
from app.backends.upstream_body import RelayRequest, routing_key, upstream_body
from app.backends.upstream_client import UnreachableError, UpstreamClient, UpstreamResponse, replica_headers
from app.backends.upstream_counting import load_counting_encoder
from app.backends.upstream_errors import FAILED_STATUSES, RETRIED_STATUSES, refused_stream
from app.errors import UpstreamError
from app.waterfall import TimedJob
from app.workers import WorkerPool
from engine.errors import EngineDeadError, ModelError
from engine.outputs import EngineStats, ModelInfo, RequestOutput

INLINE_BODY_BYTES = 16 * 1024
"""A smaller body is written on the event loop: handing it to a thread would cost more."""
LARGE_BODY_BYTES = 64 * 1024
"""A larger one is written in the thread for large jobs."""


class OpenAIBackend:
    """The replicas of one model."""

    def __init__(self, settings: BackendSettings, workers: WorkerPool) -> None:
        self._settings = settings
        self._workers = workers
        self.replicas = [Replica(replica, settings) for replica in settings.replicas]
        self._ring = make_ring(self.replicas, settings)
        self._client: UpstreamClient | None = None
        self._encoder: PromptEncoder | None = None
        self._info: ModelInfo | None = None
        self._watch: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("firsttoken.upstream")

    async def start(self) -> None:
        """Opens the client, loads the tokenizer, learns the window. Raises ``ModelError`` or ``ConfigError``.

        Replicas that are down are no reason not to start, unless only they could tell the window.
        """
        assert self._client is None, "the backend starts once"
        self._client = UpstreamClient(self._settings)
        encoder = await self._workers.run(load_counting_encoder, self._settings)
        window = self._settings.max_model_len or await self._ask_window()
        self._info = make_info(self._settings, window)
        self._encoder = encoder
        await self._check_all()
        if self._settings.health_interval_s:
            self._watch = asyncio.create_task(self._watch_health())

    def check(self, settings: BackendSettings) -> None:
        """Raises ``ConfigError`` where the key of a replica is not set."""
        for replica in settings.replicas:
            replica_headers(replica)

    def use(self, settings: BackendSettings) -> None:
        """Takes other replicas, limits and times.

        A replica that stays keeps its state and its requests; one that is gone gets no request any more, and those that
        it computes go on to their end.
        """
        before = {replica.url: replica for replica in self.replicas}
        replicas = []
        for wanted in settings.replicas:
            replica = before.pop(wanted.url.rstrip("/"), None) or Replica(wanted, settings)
            replica.settings, replica.policy = wanted, settings
            replicas.append(replica)
        for gone in before.values():
            self._log.info("replica_removed", replica=gone.name, running=gone.num_running)
        self.replicas[:] = replicas  # metrics hold the list
        self._ring = make_ring(replicas, settings)
        self._settings = settings
        if self._client is None:
            return
        self._client.use(settings)
        if settings.health_interval_s and self._watch is None:
            self._watch = asyncio.create_task(self._watch_health())

    async def close(self) -> None:
        """Ends the health checks and closes all connections. May be called twice."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    @property
    def is_alive(self) -> bool:
        """Whether some replica takes requests."""
        return self._client is not None and any(replica.state != "open" for replica in self.replicas)

    @property
    def info(self) -> ModelInfo:
        """What the replicas serve, as far as it concerns the gateway. Raises ``EngineDeadError`` before the start."""
        if self._info is None:
            raise EngineDeadError("it has not been started")
        return self._info

    @property
    def encoder(self) -> PromptEncoder:
        """Counts as the served model does, or never too few; ``counting`` says which."""
        if self._encoder is None:
            raise EngineDeadError("it has not been started")
        return self._encoder

    @property
    def stats(self) -> EngineStats | None:
        """Nothing: the engines are others' and have metrics of their own."""
        return None

    async def relay(self, request: RelayRequest) -> UpstreamAnswer:
        """Sends a request and waits until its answer begins: the first event of a stream, or else all of it.

        Raises ``UpstreamError`` with what the last replica that was tried said.
        """
        body, key = await self._prepare(request)
        tried: list[Replica] = []
        failure: Exception | None = None
        for _ in range(self._settings.max_attempts):
            # The ring and the replicas of now: one that was taken out meanwhile is not tried.
            replica = self._ring.choose(key, tried)
            if replica is None and isinstance(failure, UnreachableError) and len(self.replicas) == 1:
                replica = self._ring.choose(key)  # a kept connection may have been closed by the other side
            if replica is None:
                break
            if not any(replica is other for other in tried):
                tried.append(replica)
            try:
                answer = await self._try(replica, request, body)
            except UnreachableError as error:
                replica.fail(str(error))
                failure = error
            except UpstreamError as error:
                status = error.upstream_status
                if status is None:
                    raise
                if status in FAILED_STATUSES:
                    replica.fail(f"status {status}")
                else:
                    replica.succeed()
                if status not in RETRIED_STATUSES:
                    raise
                failure = error
            else:
                replica.succeed()
                return answer
            self._log.warning("replica_failed", replica=replica.name, state=replica.state, reason=_reason(failure))
        raise self._give_up(failure)

    async def generate(self, request: BackendRequest) -> AsyncIterator[RequestOutput]:
        """The outputs of a request that the gateway itself makes, such as a summary."""
        fields: dict[str, Any] = {
            "model": self._settings.model,
            "messages": list(request.messages),
            "temperature": request.sampling.temperature,
            "stream": True,
        }
        relayed = RelayRequest(
            request_id=request.request_id,
            body=msgspec.json.encode(fields),
            messages=request.messages,
            tools=(),
            cache_salt=request.cache_salt,
            streams=True,
            max_tokens=request.sampling.max_tokens,
        )
        answer = await self.relay(relayed)
        num_prompt_tokens = num_output_tokens = 0
        finish_reason: str | None = None
        try:
            while chunks := await answer.next_chunks():
                for chunk in chunks:
                    facts = chunk_facts(chunk)
                    if facts.num_prompt_tokens is not None:
                        num_prompt_tokens, num_output_tokens = facts.num_prompt_tokens, facts.num_output_tokens or 0
                    else:
                        num_output_tokens += facts.has_text
                    finish_reason = next((reason for _, reason in facts.finished), finish_reason)
                    if facts.texts:
                        yield RequestOutput(
                            request_id=request.request_id,
                            text="".join(facts.contents),
                            new_token_ids=[],
                            num_prompt_tokens=num_prompt_tokens,
                            num_cached_tokens=0,
                            num_output_tokens=num_output_tokens,
                        )
            yield RequestOutput(
                request_id=request.request_id,
                text="",
                new_token_ids=[],
                num_prompt_tokens=num_prompt_tokens,
                num_cached_tokens=0,
                num_output_tokens=num_output_tokens,
                finish_reason="length" if finish_reason == "length" else "stop" if finish_reason else "error",
                error=None if finish_reason else "the upstream's stream ended without a finish reason",
            )
        finally:
            await answer.aclose()

    async def _prepare(self, request: RelayRequest) -> tuple[bytes, bytes]:
        """Body and routing key; those of a large request are made in a thread, so that nobody waits for them."""
        if len(request.body) <= INLINE_BODY_BYTES:
            prepared = upstream_body(request, self._settings), routing_key(request)
            if request.timeline is not None:
                request.timeline.lap("pack")
            return prepared
        run = self._workers.run_large if len(request.body) > LARGE_BODY_BYTES else self._workers.run
        job = TimedJob()
        prepared = await run(job, lambda: (upstream_body(request, self._settings), routing_key(request)))
        if request.timeline is not None:
            request.timeline.lap_job(job, "pack")
        return prepared

    async def _try(self, replica: Replica, request: RelayRequest, body: bytes) -> UpstreamAnswer:
        """One try on one replica. Raises ``UnreachableError`` where another one may go better."""
        client = self._client
        if client is None:
            raise EngineDeadError("it has been closed")
        limit_s = self._settings.first_token_timeout_s
        response: UpstreamResponse | None = None
        has_begun = False
        trace = None if request.timeline is None else request.timeline.trace
        call = None if trace is None else trace.call(replica.url, self._settings.model)
        replica.begin()
        try:
            async with asyncio.timeout(limit_s):
                response = await client.send(
                    replica.url,
                    body,
                    request_id=request.request_id,
                    cache_salt=request.cache_salt,
                    trace_headers={} if call is None else call.headers,
                )
                if not request.streams:
                    answer = UpstreamAnswer(replica, response, body=await response.body())
                else:
                    first = await response.next_events()
                    if not first:
                        raise UnreachableError("the stream ended before its first event")
                    if first[0].data != DONE and (told := chunk_facts(first[0].data).error) is not None:
                        raise refused_stream(first[0].data, told)
                    answer = UpstreamAnswer(
                        replica, response, first=first, idle_timeout_s=self._settings.idle_timeout_s
                    )
            answer.call = call
            has_begun = True
        except TimeoutError:
            replica.fail("no answer in time")
            text = f"The upstream did not begin to answer within {limit_s:g} s."
            raise UpstreamError(text, status=504, type="server_error") from None
        finally:
            if not has_begun:
                try:
                    if response is not None:
                        response.close()
                finally:
                    replica.end()
                    if call is not None:
                        call.end(sys.exception() or UnreachableError("it did not begin"))
        return answer

    def _give_up(self, failure: Exception | None) -> Exception:
        if isinstance(failure, UpstreamError):
            return failure
        retry_after_s = min((replica.retry_after_s for replica in self.replicas), default=0.0)
        reason = f": {failure}" if failure is not None else ""
        text = f"No replica of the upstream answers{reason}."
        return UpstreamError(text, status=503, type="overloaded", retry_after_s=max(1.0, retry_after_s))

    async def _ask_window(self) -> int:
        assert self._client is not None, "asked after the client was made"
        answers = await asyncio.gather(*(self._client.max_model_len(replica.url) for replica in self.replicas))
        windows = [window for window in answers if window is not None]
        if not windows:
            raise ModelError(
                f"no replica tells the window of backend.model {self._settings.model!r}; set backend.max_model_len, or "
                "start the replicas first"
            )
        return min(windows)

    async def _watch_health(self) -> None:
        while interval_s := self._settings.health_interval_s:
            await asyncio.sleep(interval_s)
            await self._check_all()
        self._watch = None

    async def _check_all(self) -> None:
        await asyncio.gather(*(self._check(replica) for replica in self.replicas))

    async def _check(self, replica: Replica) -> None:
        """A health check. A replica that is left alone is not asked; one on trial is taken back by a good answer."""
        if self._client is None or replica.state == "open":
            return
        if await self._client.is_healthy(replica.url):
            if replica.state == "half_open":
                replica.succeed()
        else:
            replica.fail("health check failed")


def _reason(failure: Exception | None) -> str:
    """Why a try failed, for the log: not in the words of an upstream, which may quote the prompt."""
    if isinstance(failure, UpstreamError):
        return f"status {failure.upstream_status}"
    return str(failure)[:200]


def make_ring(replicas: list[Replica], settings: BackendSettings) -> Ring:
    """The ring that the settings ask for."""
    return Ring(replicas, load_bound=settings.routing.load_bound, virtual_nodes=settings.routing.virtual_nodes)


def make_info(settings: BackendSettings, max_model_len: int) -> ModelInfo:
    """What is known of a model that computes elsewhere; sizes of layers are not."""
    return ModelInfo(
        model=settings.model,
        architecture="openai",
        dtype=settings.flavour,
        num_parameters=0,
        max_model_len=max_model_len,
        vocab_size=2**31,
        num_layers=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        hidden_size=0,
        intermediate_size=0,
        block_size=16,
        num_blocks=0,
        weights_digest="",
        attention_backend="upstream",
    )
