"""The engine seen from the gateway: an asynchronous client of a supervised engine process.

``EngineClient`` spawns the process, gives each request its own queue of outputs, and watches over the process. When it
dies, or does not come back from a step, every request that it had begun to compute fails with EngineDeadError at once,
and a new process is started, after a pause that doubles with each failure in a row. Requests that were only queued are
kept and given to the new process. Those made meanwhile fail with EngineDeadError, which says when to come again.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.chat_template import ChatTokenizer
from engine.config import EngineConfig
from engine.engine_process import EngineProcess
from engine.errors import AdmissionError, EngineDeadError, EngineError
from engine.outputs import AbortRequest, EngineStats, GenerateRequest, ModelInfo, RequestOutput
from engine.process_logs import LogStyle
from engine.wire import EngineFailed, EngineReady, OutputBatch, RequestRefused, to_exception

logger = logging.getLogger(__name__)

DEFAULT_ENGINE = "engine.llm_engine:LLMEngine.from_config"
_FAREWELL_S = 5.0
_MAX_SENDS = 4  # of a queued request, to processes that die without having begun it
_NO_STATS = EngineStats(
    num_running=0,
    num_waiting=0,
    kv_cache_usage=0.0,
    prompt_tokens=0,
    cached_prompt_tokens=0,
    generation_tokens=0,
    num_preemptions=0,
    num_steps=0,
)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead engine process is started again."""

    first_delay_s: float = 0.5
    """Pause after the first failure; it doubles with each further one in a row."""
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0
    """A process that lived this long does not count as a failure in a row."""
    start_timeout_s: float = 600.0
    """Longest start, loading the model included."""
    step_timeout_s: float = 300.0
    """A process that has work and has given no sign of life for so long hangs in a step, and is killed."""
    keep_queued_s: float = 60.0
    """Queued requests wait so long for the next process; then they fail, when another start has failed."""

    def delay_s(self, num_failures: int) -> float:
        """Pause after the ``num_failures``-th failure in a row, counted from 1."""
        return min(self.first_delay_s * 2.0 ** min(num_failures - 1, 32), self.max_delay_s)


@dataclass(slots=True)
class _PendingRequest:
    """A request that has not ended, and where its outputs go."""

    request: GenerateRequest
    outputs: asyncio.Queue[RequestOutput | Exception]
    num_sends: int = 0
    has_outputs: bool = False

    @property
    def can_be_sent_again(self) -> bool:
        """Nobody has seen a part of the answer, and it does not seem to be what ends one process after the other."""
        return not self.has_outputs and self.num_sends < _MAX_SENDS


class EngineClient:
    """Client of one engine. Made by ``start``; belongs to the event loop it was started in."""

    def __init__(
        self, config: EngineConfig, chat: ChatTokenizer, factory: str, restart: RestartPolicy, logs: LogStyle
    ) -> None:
        """For ``start``, which also launches the process."""
        self.chat = chat
        """Chat template and tokenizer of the served model, in this process."""
        self.num_restarts = 0
        """Times the engine process was started again after it died."""
        self._config = msgspec.msgpack.encode(config)
        self._factory = factory
        self._restart = restart
        self._logs = logs
        self._process: EngineProcess | None = None
        self._info: ModelInfo | None = None
        self._stats = _NO_STATS
        self._pending: dict[str, _PendingRequest] = {}
        self._last_sign_s = 0.0
        self._died_s = 0.0
        self._supervisor: asyncio.Task[None] | None = None
        self._death = "it has not been started"
        self._back_at_s = 0.0
        self._last_start_s = 1.0
        self._is_closing = False

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        factory: str = DEFAULT_ENGINE,
        restart: RestartPolicy | None = None,
        logs: LogStyle | None = None,
    ) -> "EngineClient":
        """Start the engine process and wait until it has loaded the model.

        ``factory`` is ``module:attribute`` of what makes the engine from a config in the new process;
        ``logs`` is how that process logs.
        Raises ModelError when the model cannot be found or read, EngineError when the start fails otherwise.
        """
        path = await asyncio.to_thread(_resolve_model, config.model.model)
        # The child gets the path: it then needs neither network nor catalogue, and a restart serves the same files.
        resolved = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model=str(path)))
        chat = await asyncio.to_thread(ChatTokenizer.from_path, path)
        client = cls(resolved, chat, factory, restart or RestartPolicy(), logs or LogStyle())
        process = await client._launch()
        client._supervisor = asyncio.create_task(client._supervise(process), name="engine-supervisor")
        return client

    @property
    def info(self) -> ModelInfo:
        """What the engine serves."""
        assert self._info is not None, "start() returns after the engine has said what it serves"
        return self._info

    @property
    def is_alive(self) -> bool:
        """The engine process runs and takes requests."""
        return self._process is not None and not self._process.has_ended

    @property
    def stats(self) -> EngineStats:
        """The latest statistics the engine has pushed; its counters begin again with each process."""
        return self._stats

    @property
    def pid(self) -> int | None:
        """Process id of the engine; ``None`` while there is none."""
        return self._process.pid if self._process is not None and self.is_alive else None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come; the last has a ``finish_reason``. Closing the iterator aborts it.

        Raises, from the first step of the iteration: ValueError for a request the engine finds malformed or a request
        id in use, PromptTooLongError, QueueFullError; and at any time EngineDeadError.
        """
        process = self._process
        if process is None or process.has_ended:
            raise self._dead_error()
        if request.request_id in self._pending:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        if not self._pending:
            self._last_sign_s = asyncio.get_running_loop().time()  # so far there was nothing to give a sign of
        pending = _PendingRequest(request, asyncio.Queue())
        self._pending[request.request_id] = pending
        is_finished = False
        try:
            self._send(pending, process)
            while not is_finished:
                item = await pending.outputs.get()
                if isinstance(item, Exception):
                    is_finished = True
                    raise item
                is_finished = item.finish_reason is not None
                yield item
        finally:
            del self._pending[request.request_id]
            if not is_finished and self._process is not None:
                self._process.send(AbortRequest(request_id=request.request_id))

    async def abort(self, request_id: str) -> None:
        """End a request from outside; its iterator gets a last output with ``finish_reason`` ``abort``."""
        if self._process is not None and request_id in self._pending:
            self._process.send(AbortRequest(request_id=request_id))

    async def release_offer(self, request_id: str) -> None:
        """Give up the KV blocks that an ended request with ``do_remote_decode`` left for another engine."""
        if self._process is not None:
            self._process.send(AbortRequest(request_id=request_id))

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop the engine process and fail what is in flight. The process may finish its step within ``grace_s``."""
        if self._is_closing:
            return
        self._is_closing = True
        self._death = "it has been shut down"
        if self._process is not None:
            await self._process.stop(grace_s)
        if self._supervisor is not None:
            if self._process is None:  # between two processes: waiting, or starting one
                self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._fail(self._pending)

    async def _supervise(self, process: EngineProcess) -> None:
        num_failures = 0
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            reason = await self._serve(process)
            if self._is_closing:
                return
            is_healthy = loop.time() - started_s >= self._restart.healthy_after_s
            num_failures = 1 if is_healthy else num_failures + 1
            logger.error("the engine is gone: %s", reason)
            while True:
                delay_s = self._restart.delay_s(num_failures)
                self._back_at_s = loop.time() + delay_s + self._last_start_s
                await asyncio.sleep(delay_s)
                try:
                    process = await self._launch()
                except Exception as error:
                    num_failures += 1
                    self._death = f"it could not be started again: {error}"
                    if loop.time() - self._died_s > self._restart.keep_queued_s:
                        self._fail(self._pending)
                    logger.error("the engine could not be started again: %s", error)
                else:
                    self.num_restarts += 1
                    logger.warning("the engine has been started again, process %s", process.pid)
                    self._last_sign_s = loop.time()
                    for pending in self._pending.values():
                        self._send(pending, process)
                    break

    async def _launch(self) -> EngineProcess:
        """Start a process and wait until it is ready. Leaves nothing behind when that fails or is cancelled."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        process = EngineProcess(self._config, self._factory, self._logs)
        hello = asyncio.create_task(process.receive())
        ended = asyncio.create_task(process.wait_ended())
        try:
            await asyncio.wait(
                (hello, ended), timeout=self._restart.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if hello.done():
                message = hello.result()
                if isinstance(message, EngineReady):
                    self._info = message.info
                    self._stats = _NO_STATS
                    self._last_start_s = loop.time() - started_s
                    self._process = process
                    return process
                assert isinstance(message, EngineFailed), f"the engine's first message is {message!r}"
                error = to_exception(message.error)
                await process.stop(_FAREWELL_S)
                await process.release()
                raise error if isinstance(error, EngineError) else EngineError(f"the engine could not start: {error}")
            if ended.done():
                raise EngineError(f"the engine could not start: {await process.release()}")
            raise EngineError(f"the engine did not start within {self._restart.start_timeout_s:g} s")
        finally:
            hello.cancel()
            ended.cancel()
            if self._process is not process and not process.has_ended:
                process.abandon()

    async def _serve(self, process: EngineProcess) -> str:
        """Pass outputs on until the process ends; then fail what it had begun. Returns how it ended."""
        reader = asyncio.create_task(self._read(process), name="engine-reader")
        ended = asyncio.create_task(process.wait_ended(), name="engine-watch")
        hanging = asyncio.create_task(self._wait_for_hang(process), name="engine-hang-watch")
        try:
            await asyncio.wait((reader, ended), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():  # it said that it is broken, or something that is no message
                await process.stop(_FAREWELL_S)
        except asyncio.CancelledError:  # the event loop shuts down without close()
            self._process = None
            process.abandon()
            raise
        finally:
            reader.cancel()
            ended.cancel()
            hanging.cancel()
        said, _, hang = await asyncio.gather(reader, ended, hanging, return_exceptions=True)
        started = process.started_request_ids()
        how = await process.release()
        self._process = None
        if not self._is_closing:
            reason = how if isinstance(said, asyncio.CancelledError) else said
            reason = reason if isinstance(hang, BaseException) else hang
            self._death = f"{reason}; it is being started again"
        delay_s = self._restart.delay_s(1)
        self._back_at_s = asyncio.get_running_loop().time() + delay_s + self._last_start_s
        self._died_s = asyncio.get_running_loop().time()
        if self._is_closing:
            self._fail(self._pending)
        else:
            self._fail([name for name, one in self._pending.items() if name in started or not one.can_be_sent_again])
        return self._death

    async def _wait_for_hang(self, process: EngineProcess) -> str:
        """Kill the process when it has work and gives no sign of life; returns what to say of it."""
        timeout_s = self._restart.step_timeout_s
        loop = asyncio.get_running_loop()
        while True:
            silent_s = loop.time() - self._last_sign_s if self._pending else 0.0
            if silent_s > timeout_s:
                logger.error("the engine has not come back from a step for %.1f s and is killed", silent_s)
                process.kill()
                return f"a step did not end within {timeout_s:g} s"
            await asyncio.sleep(min(1.0, max(timeout_s - silent_s, 0.01)))

    async def _read(self, process: EngineProcess) -> str:
        """Dispatch messages until the engine says that it is broken; returns what it says."""
        while True:
            message = await process.receive()
            self._last_sign_s = asyncio.get_running_loop().time()
            match message:
                case OutputBatch():
                    for output in message.outputs:
                        self._deliver(output.request_id, output)
                case EngineStats():
                    self._stats = message
                case RequestRefused():
                    error = to_exception(message.error)
                    if not (isinstance(error, AdmissionError) and error.reason == "draining"):
                        self._deliver(message.request_id, error)  # else it is kept for the next process
                case EngineFailed():
                    return f"it broke with {message.error.message}"
                case EngineReady():
                    raise AssertionError("the engine said twice that it is ready")

    def _send(self, pending: _PendingRequest, process: EngineProcess) -> None:
        pending.num_sends += 1
        process.send(pending.request)

    def _deliver(self, request_id: str, item: RequestOutput | Exception) -> None:
        pending = self._pending.get(request_id)
        if pending is not None:  # else its caller has left
            pending.has_outputs = True
            pending.outputs.put_nowait(item)

    def _fail(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._deliver(request_id, self._dead_error())

    def _dead_error(self) -> EngineDeadError:
        retry_after_s = max(self._back_at_s - asyncio.get_running_loop().time(), 1.0)
        return EngineDeadError(self._death, retry_after_s)


def _resolve_model(name: str) -> Path:
    from engine.model_store import resolve_model  # late: only the client that starts an engine needs the catalogue

    return resolve_model(name)
