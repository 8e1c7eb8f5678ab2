"""One engine process as its client sees it: spawn it, talk to it, notice its end, stop it."""

import asyncio
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
from pathlib import Path

import zmq
import zmq.asyncio

from engine.core_process import JOURNAL_NAME, run_engine_core
from engine.errors import EngineError
from engine.process_logs import LogStyle
from engine.start_journal import read_started
from engine.wire import ClientMessage, CoreMessage, ShutdownRequest, core_message_decoder, encoder

logger = logging.getLogger(__name__)

_MAX_SOCKET_PATH = 100  # sun_path holds 104 bytes on some systems, 108 on Linux
_SOCKET_NAME = "engine.sock"
_LAST_WORDS_S = 0.05
_POLL_S = 1.0


class EngineProcess:
    """A spawned engine process. Belongs to the event loop it was spawned in."""

    def __init__(self, config: bytes, factory: str, logs: LogStyle) -> None:
        """Spawn the process; ``config``, ``factory`` and ``logs`` as for ``run_engine_core``."""
        self._folder = _make_private_folder()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{self._folder / _SOCKET_NAME}"
        self._socket.bind(address)
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine_core,
            args=(address, str(self._folder), config, factory, os.getpid(), logs),
            name="firsttoken-engine",
            daemon=True,
        )
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            self._process.start()
        except BaseException:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._loop.add_reader(self._process.sentinel, self._on_end)

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """The process is gone."""
        return self._ended.is_set()

    def send(self, message: ClientMessage) -> None:
        """Hand a message over. Never blocks; to a process that has ended it goes nowhere."""
        if not self._socket.closed:
            # pyzmq sends at once where it can, and the future then is done; without a limit on pending messages it can
            self._socket.send(encoder.encode(message))

    async def receive(self) -> CoreMessage:
        """The next message, waiting for it. Does not end when the process does: see ``wait_ended``."""
        return core_message_decoder.decode(await self._socket.recv())

    async def wait_ended(self) -> None:
        """Return once the process is gone and its last messages have had time to be received."""
        # The sentinel tells at once. It stays silent while children of the process hold its pipe, so ask as well.
        while not await self._ends_within(_POLL_S):
            if not self._process.is_alive():
                self._on_end()
        await asyncio.sleep(_LAST_WORDS_S)

    async def stop(self, grace_s: float) -> None:
        """End the process: ask, and kill it after ``grace_s``."""
        self.send(ShutdownRequest())
        if not await self._ends_within(grace_s):
            logger.warning("the engine process did not leave within %.0f s and is killed", grace_s)
            self._process.kill()
            await self.wait_ended()

    def started_request_ids(self) -> set[str]:
        """Requests that the process has begun to compute; to be asked between its end and ``release``."""
        return read_started(self._folder / JOURNAL_NAME)

    def kill(self) -> None:
        """End the process at once."""
        if not self.has_ended:
            self._process.kill()

    async def release(self) -> str:
        """Give back what the ended process held, and say how it ended."""
        await asyncio.to_thread(self._process.join)
        code = self._process.exitcode
        self._process.close()
        self._free_endpoint()
        if code is not None and code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def abandon(self) -> None:
        """Kill and free without waiting, for a start that was cancelled."""
        self.kill()
        self._on_end()
        self._process.join(_POLL_S)
        self._free_endpoint()

    def _free_endpoint(self) -> None:
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _ends_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _on_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._ended.set()


def _make_private_folder() -> Path:
    """A fresh folder only this user can enter, with a path short enough for a Unix socket."""
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), os.environ.get("HOME")]
    tried = []
    for candidate in filter(None, candidates):
        try:
            folder = Path(tempfile.mkdtemp(prefix="firsttoken-", dir=candidate))
        except OSError as error:
            tried.append(f"{candidate} ({error.strerror})")
            continue
        if len(os.fsencode(folder / _SOCKET_NAME)) <= _MAX_SOCKET_PATH:
            return folder
        folder.rmdir()
        tried.append(f"{candidate} (path too long)")
    raise EngineError(f"no folder for the engine's socket: {', '.join(tried) or 'none is known'}")
