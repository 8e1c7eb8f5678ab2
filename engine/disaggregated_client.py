"""Several engines seen as one: prompts go to prefill engines, the rest to decode engines that fetch their KV blocks.

::

    generate(request)
      prefill engine with the least to compute     prompt, max_tokens 1, do_remote_decode  ->  an offer of its blocks
      decode engine with the fewest sequences      the request itself, remote_prefill      ->  all outputs

The token of the prefill is not told: the decode engine computes the last prompt token anyway and samples for itself,
so that seeds, penalties, grammars, stop strings and log probabilities need not know of two engines. Short prompts go
to a decode engine alone. Whoever closes the iterator cancels both sides.

As long as nothing was told, an engine that dies or refuses to keep blocks is replaced by another one, once. So is a
transfer that fails under the policy ``fail``; then the request ends with an error. Under ``recompute`` the decode
engine computes the prompt as soon as its blocks do not come.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from engine.chat_template import ChatTokenizer
from engine.config import EngineConfig, TransferFailurePolicy
from engine.disaggregated_stats import sum_stats, sum_timings
from engine.errors import EngineDeadError, EngineError
from engine.outputs import EngineStats, GenerateRequest, ModelInfo, RequestOutput
from engine.process import DEFAULT_ENGINE, EngineClient, RestartPolicy
from engine.process_logs import LogStyle
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

LocalPrefillReason = Literal["short", "no_offer", "no_prefill_engine", "transfer_failed"]
MAX_ATTEMPTS = 2
"""Prefills of one request: the second one hits the cache of the first where that engine still lives."""


class Client(Protocol):
    """What is needed of each engine: ``EngineClient``."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def chat(self) -> ChatTokenizer: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def num_restarts(self) -> int: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]: ...
    async def abort(self, request_id: str) -> None: ...
    async def release_offer(self, request_id: str) -> None: ...
    async def close(self, grace_s: float = 5.0) -> None: ...


@dataclass(slots=True)
class _Engine:
    """One engine and what this client has given it to do."""

    client: Client
    num_requests: int = 0
    num_prompt_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Active:
    """Where an unfinished request is being computed."""

    engine: _Engine | None = None
    request_id: str = ""
    is_aborted: bool = False


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """A prompt that a prefill engine has computed."""

    engine: _Engine
    request_id: str
    """There."""
    last: RequestOutput


class DisaggregatedClient:
    """Client of prefill and decode engines with the interface of ``EngineClient``. Belongs to one event loop."""

    def __init__(
        self,
        prefill: Sequence[Client],
        decode: Sequence[Client],
        *,
        on_transfer_failure: TransferFailurePolicy = "fail",
        min_prefill_tokens: int = 64,
    ) -> None:
        """Join engines that were started already.

        Args:
            prefill: engines with ``kv_transfer.role`` ``prefill``.
            decode: engines with ``kv_transfer.role`` ``decode``.
            on_transfer_failure: what happens when no prefill engine could do its part.
            min_prefill_tokens: shorter prompts are computed by the decode engine.

        Raises:
            ValueError: one of the roles is missing.
            EngineError: the engines do not compute the same keys and values, so no block would ever match.
        """
        if not prefill or not decode:
            raise ValueError(f"at least 1 engine of each role is needed, got {len(prefill)} and {len(decode)}")
        self._prefill = [_Engine(client) for client in prefill]
        self._decode = [_Engine(client) for client in decode]
        self._on_transfer_failure = on_transfer_failure
        self._min_prefill_tokens = min_prefill_tokens
        self._active: dict[str, _Active] = {}
        self._num_prefills = 0
        self._prompt_tokens = 0
        self._cached_prompt_tokens = 0
        self.num_retries = 0
        """Prefills that were made again because the first one or its transfer failed."""
        self.num_local_prefills: Counter[LocalPrefillReason] = Counter()
        """Prompts that a decode engine computed, by reason."""
        expected = _identity(decode[0].info)
        for client in [*prefill, *decode]:
            if _identity(client.info) != expected:
                raise EngineError(f"the engines serve different models: {_identity(client.info)} and {expected}")

    @classmethod
    async def start(
        cls,
        prefill: Sequence[EngineConfig],
        decode: Sequence[EngineConfig],
        *,
        factory: str = DEFAULT_ENGINE,
        restart: RestartPolicy | None = None,
        logs: LogStyle | None = None,
    ) -> "DisaggregatedClient":
        """Start all engine processes; policy and shortest prompt are those of the first decode engine.

        Raises:
            ValueError: a configuration has another role.
            ModelError, EngineError: one of them could not be started, or they do not serve the same model.
        """
        for role, configs in (("prefill", prefill), ("decode", decode)):
            for config in configs:
                if config.kv_transfer.role != role:
                    raise ValueError(f"kv_transfer.role must be {role!r}, got {config.kv_transfer.role!r}")
        starts = [
            EngineClient.start(config, factory=factory, restart=restart, logs=logs) for config in [*prefill, *decode]
        ]
        results = await asyncio.gather(*starts, return_exceptions=True)
        clients = [result for result in results if isinstance(result, EngineClient)]
        try:
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            settings = decode[0].kv_transfer if decode else None
            return cls(
                clients[: len(prefill)],
                clients[len(prefill) :],
                on_transfer_failure=settings.on_transfer_failure if settings else "fail",
                min_prefill_tokens=settings.min_transfer_tokens if settings else 0,
            )
        except BaseException:
            await asyncio.gather(*(client.close() for client in clients))
            raise

    @property
    def info(self) -> ModelInfo:
        """What the engines serve, with the smallest of their windows."""
        window = min(engine.client.info.max_model_len for engine in self._engines)
        return msgspec.structs.replace(self._decode[0].client.info, max_model_len=window)

    @property
    def chat(self) -> ChatTokenizer:
        """Chat template and tokenizer of the served model."""
        return self._decode[0].client.chat

    @property
    def is_alive(self) -> bool:
        """Requests can be answered now."""
        can_prefill = self._on_transfer_failure == "recompute" or any(e.client.is_alive for e in self._prefill)
        return can_prefill and any(engine.client.is_alive for engine in self._decode)

    @property
    def num_restarts(self) -> int:
        """Of all engine processes."""
        return sum(engine.client.num_restarts for engine in self._engines)

    @property
    def pid(self) -> int | None:
        """Process id of the first decode engine; ``None`` while there is none."""
        return self._decode[0].client.pid

    @property
    def stats(self) -> EngineStats:
        """All engines as one. Each prompt counts once, its cached tokens are those that nobody had to compute, and none
        came from outside; the speed and the times by length are those of the first prefill engine."""
        return sum_stats(
            [engine.client.stats for engine in self._prefill],
            [engine.client.stats for engine in self._decode],
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
        )

    @property
    def _engines(self) -> list[_Engine]:
        return [*self._prefill, *self._decode]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come; the last has a ``finish_reason``. Closing the iterator cancels it.

        Raises what ``EngineClient.generate`` does; EngineDeadError only where no other engine can take over.
        """
        if request.do_remote_decode or request.remote_prefill is not None:
            raise ValueError("do_remote_decode and remote_prefill are set by this client alone")
        if request.request_id in self._active:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        active = self._active[request.request_id] = _Active()
        started_s = asyncio.get_running_loop().time()
        try:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                self.num_retries += attempt > 1
                is_last = attempt == MAX_ATTEMPTS
                async with aclosing(self._attempt(request, active, started_s, is_last=is_last)) as outputs:
                    async for output in outputs:
                        yield output
                        if output.finish_reason is not None:
                            return
                if active.is_aborted:
                    yield _ended(request, "abort")
                    return
        finally:
            del self._active[request.request_id]

    async def abort(self, request_id: str) -> None:
        """End a request from outside; its iterator gets a last output with ``finish_reason`` ``abort``."""
        active = self._active.get(request_id)
        if active is not None:
            active.is_aborted = True
            if active.engine is not None:
                await active.engine.client.abort(active.request_id)

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop all engine processes and fail what is in flight."""
        await asyncio.gather(*(engine.client.close(grace_s) for engine in self._engines))

    async def _attempt(
        self, request: GenerateRequest, active: _Active, started_s: float, *, is_last: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        """One prefill and its decode. Ends without a last output if another attempt is to be made."""
        may_recompute = self._on_transfer_failure == "recompute"
        prefilled: _Prefilled | None = None
        reason: LocalPrefillReason = "short"
        if len(request.prompt_token_ids) >= self._min_prefill_tokens:
            try:
                prefilled = await self._run_prefill(request, active)
            except EngineDeadError:
                if not is_last:
                    return
                if not may_recompute:
                    raise
                reason = "no_prefill_engine"
            if prefilled is not None and prefilled.last.finish_reason in ("error", "abort"):
                yield _of(prefilled.last, request)
                return
            if prefilled is not None and prefilled.last.kv_offer is None:
                if not is_last:
                    return
                if not may_recompute:
                    yield _ended(request, "error", "the prefill engine has no room to keep the prompt's KV blocks")
                    return
                reason = "no_offer"
        if active.is_aborted:
            await self._release(prefilled)
            return
        offer = prefilled.last.kv_offer if prefilled is not None else None
        if offer is None:
            self.num_local_prefills[reason] += 1
        has_token = False
        engine = self._choose(self._decode, lambda one: (one.num_requests, one.num_prompt_tokens))
        elapsed_ms = (asyncio.get_running_loop().time() - started_s) * 1e3
        decode = msgspec.structs.replace(
            request,
            remote_prefill=offer,
            deadline_ms=None if request.deadline_ms is None else max(request.deadline_ms - elapsed_ms, 0.0),
        )
        try:
            async with aclosing(self._outputs(engine, decode, active)) as outputs:
                async for output in outputs:
                    if output.transfer_failure is not None and not has_token and not is_last:
                        logger.warning("the transfer for %s failed: %s", request.request_id, output.error)
                        return
                    if output.new_token_ids and not has_token:
                        has_token = True
                        self._count(output, prefilled)
                    yield _joined(output, prefilled)
        except EngineDeadError:
            if has_token or is_last:
                raise
        finally:
            if not has_token:
                await self._release(prefilled)

    async def _run_prefill(self, request: GenerateRequest, active: _Active) -> _Prefilled:
        """Compute a prompt and have its blocks kept; the result may also be an error, or have no offer."""
        self._num_prefills += 1
        prefill = msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}/prefill-{self._num_prefills}",
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            do_remote_decode=True,
        )
        engine = self._choose(self._prefill, lambda one: (one.num_prompt_tokens, one.num_requests))
        last: RequestOutput | None = None
        try:
            async with aclosing(self._outputs(engine, prefill, active)) as outputs:
                async for output in outputs:
                    last = output
        except BaseException:
            # Cancelled at the very moment it ended: the offer may have been made already.
            await engine.client.release_offer(prefill.request_id)
            raise
        assert last is not None, f"{prefill.request_id} ended without an output"
        return _Prefilled(engine, prefill.request_id, last)

    async def _outputs(
        self, engine: _Engine, request: GenerateRequest, active: _Active
    ) -> AsyncGenerator[RequestOutput, None]:
        num_tokens = len(request.prompt_token_ids)
        engine.num_requests += 1
        engine.num_prompt_tokens += num_tokens
        active.engine, active.request_id = engine, request.request_id
        try:
            async with aclosing(engine.client.generate(request)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            active.engine = None
            engine.num_requests -= 1
            engine.num_prompt_tokens -= num_tokens

    def _choose(self, engines: list[_Engine], load: "_Load") -> _Engine:
        """The least loaded engine that is alive; where none is, the first one, which will say so itself."""
        return min((engine for engine in engines if engine.client.is_alive), key=load, default=engines[0])

    async def _release(self, prefilled: _Prefilled | None) -> None:
        if prefilled is not None and prefilled.last.kv_offer is not None:
            await prefilled.engine.client.release_offer(prefilled.request_id)

    def _count(self, output: RequestOutput, prefilled: _Prefilled | None) -> None:
        self._prompt_tokens += output.num_prompt_tokens
        self._cached_prompt_tokens += _joined(output, prefilled).num_cached_tokens


class _Load(Protocol):
    def __call__(self, engine: _Engine, /) -> tuple[int, int]: ...


def _identity(info: ModelInfo) -> tuple[str, str, str, int]:
    """What has to be equal for blocks to match; the keys of the blocks hold the rest."""
    return info.weights_digest, info.dtype, info.kv_cache_dtype, info.block_size


def _of(output: RequestOutput, request: GenerateRequest) -> RequestOutput:
    """How a prefill failed, as the answer to the request itself."""
    return msgspec.structs.replace(output, request_id=request.request_id, text="", new_token_ids=[], kv_offer=None)


def _ended(request: GenerateRequest, reason: Literal["abort", "error"], error: str | None = None) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        text="",
        new_token_ids=[],
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        finish_reason=reason,
        error=error,
    )


def _joined(output: RequestOutput, prefilled: _Prefilled | None) -> RequestOutput:
    """An output of the decode engine with what the prefill has cost in it.

    Cached are the tokens that the prefill engine found: what it computed was computed for this request, wherever the
    decode engine has it from.
    """
    if prefilled is None:
        return output
    first = prefilled.last
    timings = output.timings
    if timings is not None and first.timings is not None:
        timings = sum_timings(first.timings, timings, first.num_cached_tokens)
    return msgspec.structs.replace(output, num_cached_tokens=first.num_cached_tokens, timings=timings)
