"""The engine's own process: load the model, then take messages and step for as long as there is work.

``engine.process`` spawns ``run_engine_core``. The process ends when it is told to, when its engine is broken, and, so
that nothing is left behind, when the process that started it is gone. On SIGTERM it drains: what it has taken is
computed to the end, what comes is refused, and then it leaves.
"""

import gc
import importlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import zmq

from engine.config import EngineConfig
from engine.errors import AdmissionError
from engine.outputs import AbortRequest, EngineStats, GenerateRequest, ModelInfo, RequestOutput
from engine.process_logs import LogStyle, configure_process_logs
from engine.start_journal import StartJournal
from engine.wire import (
    CoreMessage,
    EngineFailed,
    EngineReady,
    OutputBatch,
    RequestRefused,
    ShutdownRequest,
    client_message_decoder,
    encoder,
    to_wire_error,
)

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.1
"""Least time between two pushes of statistics while the engine is busy."""
HEARTBEAT_S = 1.0
"""While there is work, statistics are pushed this often even where nothing changes: a sign of life between steps."""
JOURNAL_NAME = "started"
"""File in the private folder of the endpoint, see ``engine.start_journal``."""
_STALLED_POLL_MS = 5
_IDLE_POLL_MS = 250  # a signal does not end a poll
_LINGER_MS = 2000
_PARENT_POLL_S = 1.0


class Engine(Protocol):
    """What this process drives: ``engine.llm_engine.LLMEngine``, or a small fake in tests."""

    on_started: Callable[[list[str]], None] | None
    """Called with the requests whose computing begins, before the step that begins it."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def has_unfinished(self) -> bool: ...
    def add_request(self, request: GenerateRequest) -> None: ...
    def abort(self, request_id: str) -> RequestOutput | None: ...
    def step(self) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


def run_engine_core(address: str, folder: str, config: bytes, factory: str, parent_pid: int, logs: LogStyle) -> None:
    """Entry point of the process.

    Args:
        address: zmq endpoint that the client has bound.
        folder: private folder of that endpoint; removed here if the client dies.
        config: EngineConfig in msgpack.
        factory: ``module:attribute`` of a callable that makes an ``Engine`` from an EngineConfig.
        parent_pid: process id of the client.
        logs: how this process logs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the client decides when to stop
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # so may the client's signal to read its configuration anew
    configure_process_logs(logs)
    threading.Thread(target=_leave_with_parent, args=(parent_pid, folder), daemon=True, name="parent-watch").start()
    with zmq.Context() as context:
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)  # a slow client must not stop the engine; what it can have pending is bounded by requests
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.connect(address)
        with socket:
            core: EngineCore | None = None
            engine: Engine | None = None
            try:
                make_engine = _import_factory(factory)
                engine = make_engine(msgspec.msgpack.decode(config, type=EngineConfig))
                # What loading has left lives as long as the process: the collector need not look at it again and again.
                gc.collect()
                gc.freeze()
                core = EngineCore(engine, socket, StartJournal(Path(folder) / JOURNAL_NAME))
                signal.signal(signal.SIGTERM, lambda *_: core.drain())
                core.run()
            except Exception as error:
                logger.exception("the engine %s", "broke" if core else "could not start")
                socket.send(encoder.encode(EngineFailed(error=to_wire_error(error))))
                raise SystemExit(1) from None
            finally:
                if engine is not None:
                    engine.close()


class EngineCore:
    """The loop between socket and engine."""

    def __init__(
        self,
        engine: Engine,
        socket: "zmq.Socket[bytes]",
        journal: StartJournal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._journal = journal
        engine.on_started = journal.note
        self._socket = socket
        self._clock = clock
        self._is_stopping = False
        self._is_draining = False
        self._num_steps = 0
        self._next_stats_s = 0.0
        self._next_heartbeat_s = 0.0
        self._sent_stats: EngineStats | None = None

    def drain(self) -> None:
        """Take nothing more, and leave when what was taken is done. Safe to call from a signal handler."""
        self._is_draining = True

    def run(self) -> None:
        """Serve until shutdown. An exception from ``step`` is a broken invariant of the engine and ends the process."""
        self._send(EngineReady(info=self._engine.info))
        self._push_stats()
        wait_ms = _IDLE_POLL_MS
        while True:
            self._take_messages(wait_ms)
            if self._is_stopping:
                return
            if not self._engine.has_unfinished:
                self._journal.clear()
                self._push_stats()
                if self._is_draining:
                    return
                wait_ms = _IDLE_POLL_MS
                continue
            outputs = self._engine.step()
            if outputs:
                self._send(OutputBatch(outputs=outputs))
            num_steps = self._engine.stats().num_steps
            # an engine that has work but cannot schedule any of it must not spin
            wait_ms = 0 if outputs or num_steps != self._num_steps else _STALLED_POLL_MS
            self._num_steps = num_steps
            if self._clock() >= self._next_stats_s:
                self._push_stats(is_heartbeat=self._clock() >= self._next_heartbeat_s)

    def _take_messages(self, wait_ms: int) -> None:
        """Handle all messages there are; wait so long for the first one."""
        while not self._is_stopping and self._socket.poll(wait_ms):
            wait_ms = 0
            message = client_message_decoder.decode(self._socket.recv())
            match message:
                case GenerateRequest():
                    self._add(message)
                case AbortRequest():
                    output = self._engine.abort(message.request_id)
                    if output is not None:
                        self._send(OutputBatch(outputs=[output]))
                case ShutdownRequest():
                    self._is_stopping = True

    def _add(self, request: GenerateRequest) -> None:
        try:
            if self._is_draining:
                raise AdmissionError("the engine is leaving", reason="draining", retry_after_s=1.0)
            self._engine.add_request(request)
        except Exception as error:  # whatever is wrong with one request is that request's affair
            self._send(RequestRefused(request_id=request.request_id, error=to_wire_error(error)))

    def _push_stats(self, *, is_heartbeat: bool = False) -> None:
        now = self._clock()
        self._next_stats_s = now + STATS_INTERVAL_S
        stats = self._engine.stats()
        if stats != self._sent_stats or is_heartbeat:
            self._next_heartbeat_s = now + HEARTBEAT_S
            self._sent_stats = stats
            self._send(stats)

    def _send(self, message: CoreMessage) -> None:
        self._socket.send(encoder.encode(message))


def _import_factory(name: str) -> Callable[[EngineConfig], Engine]:
    module, _, path = name.partition(":")
    target: Any = importlib.import_module(module)
    for attribute in path.split("."):
        target = getattr(target, attribute)
    return cast(Callable[[EngineConfig], Engine], target)


def _leave_with_parent(parent_pid: int, folder: str) -> None:
    """End this process once its parent is gone, also while a model is loading or a long step is running."""
    parent = multiprocessing.parent_process()
    sentinels = [parent.sentinel] if parent is not None else []
    while os.getppid() == parent_pid:
        if sentinels and multiprocessing.connection.wait(sentinels, _PARENT_POLL_S):
            break
        if not sentinels:
            time.sleep(_PARENT_POLL_S)
    shutil.rmtree(Path(folder), ignore_errors=True)
    os._exit(1)
