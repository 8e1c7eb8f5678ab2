"""The thread of a decode engine that fetches blocks and checks them, beside whatever step the engine is computing.

The engine's thread hands in jobs and takes out results; a result is all blocks of a job, or why there are none. The
thread asks for a few groups of blocks at a time, so that a long prompt neither fills the memory of the other side nor
keeps a short one waiting. A connection that breaks or cannot be made fails all jobs that use it at once.
"""

import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.block_hash import BlockHash
from engine.disaggregation.sender import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from engine.disaggregation.wire import (
    BlocksFetched,
    ConsumerMessage,
    FetchBlocks,
    FetchRefused,
    ReleaseLease,
    block_digest,
    encoder,
    producer_message_decoder,
)
from engine.outputs import KVOffer, TransferFailure
from engine.received_blocks import BlockData

logger = logging.getLogger(__name__)

GROUP_BYTES = 4 << 20
"""About as much is asked for, and answered, in one message."""
MAX_GROUPS_UNDER_WAY = 4
"""Of one job: enough that the network is busy while the other side reads the next group."""
_LINGER_MS = 500
_IDLE_POLL_MS = 60_000
_BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


@dataclass(frozen=True, slots=True)
class FetchJob:
    """Blocks of one request to fetch."""

    request_id: str
    offer: KVOffer
    hashes: SequenceOf[BlockHash]


@dataclass(frozen=True, slots=True)
class FetchResult:
    """How a job ended: with all its blocks, or with a failure and none."""

    request_id: str
    blocks: dict[BlockHash, BlockData]
    failure: TransferFailure | None = None


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _GiveUp:
    offer: KVOffer


@dataclass(slots=True, eq=False)
class _Peer:
    endpoint: str
    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    fetches: "set[_Fetch]" = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Fetch:
    job: FetchJob
    peer: _Peer
    groups: deque[SequenceOf[BlockHash]]
    """Not asked for yet."""
    under_way: dict[int, SequenceOf[BlockHash]] = field(default_factory=dict)
    """By ticket."""
    blocks: dict[BlockHash, BlockData] = field(default_factory=dict)


class KVReceiver:
    """Fetches blocks from any number of prefill engines. The public methods belong to one thread."""

    def __init__(self, block_bytes: int) -> None:
        """Start the thread; ``block_bytes`` is the size of one block."""
        self._block_bytes = block_bytes
        self._group_size = max(1, GROUP_BYTES // block_bytes)
        self._commands: queue.SimpleQueue[FetchJob | _Cancel | _GiveUp | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[FetchResult] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._wake = self._context.socket(zmq.PAIR)
        self._woken = self._context.socket(zmq.PAIR)
        self._wake.set_hwm(0)
        self._woken.set_hwm(0)
        self._woken.bind("inproc://kv-receiver")
        self._wake.connect("inproc://kv-receiver")
        self._poller = zmq.Poller()
        self._peers: dict[str, _Peer] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._tickets: dict[int, _Fetch] = {}
        self._next_ticket = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=True)
        self._thread.start()

    def fetch(self, job: FetchJob) -> None:
        """Begin to fetch; a result follows unless it is cancelled."""
        self._command(job)

    def cancel(self, request_id: str) -> None:
        """Give up what is under way for a request, and tell the other side. A result may have been made already."""
        self._command(_Cancel(request_id))

    def give_up(self, offer: KVOffer) -> None:
        """Tell the other side that an offer is not needed."""
        self._command(_GiveUp(offer))

    def take_results(self) -> list[FetchResult]:
        """Results since the last call."""
        results = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except queue.Empty:
                return results

    def close(self) -> None:
        """End the thread and the connections; what was under way is given up."""
        self._command(None)
        self._thread.join()
        self._wake.close()
        self._context.term()

    def _command(self, command: FetchJob | _Cancel | _GiveUp | None) -> None:
        self._commands.put(command)
        self._wake.send(b"")

    def _run(self) -> None:
        self._poller.register(self._woken, zmq.POLLIN)
        try:
            while True:
                try:
                    if not self._serve():
                        return
                except Exception:  # whatever it was, the transfers end with it, and the next ones need not
                    logger.exception("the receiver of KV blocks stumbled")
                    for peer in list(self._peers.values()):
                        self._lose(peer)
        finally:
            for peer in list(self._peers.values()):
                self._disconnect(peer)
            self._woken.close()

    def _serve(self) -> bool:
        """Wait for one round of events and handle them; False to leave."""
        # The poller knows any kind of socket, so its result is wider than what is registered here.
        events: dict[Any, int] = dict(self._poller.poll(_IDLE_POLL_MS))
        if self._woken in events:
            self._woken.recv()
            command = self._commands.get()
            if command is None:
                for request_id in list(self._fetches):
                    self._cancel(request_id)
                return False
            self._handle(command)
        for peer in list(self._peers.values()):
            if peer.socket in events:
                self._receive(peer)
            if peer.monitor in events:
                event = recv_monitor_message(peer.monitor)
                if event["event"] & _BROKEN:
                    self._lose(peer)
        if not events:
            for peer in list(self._peers.values()):
                if not peer.fetches:
                    self._disconnect(peer)
        return True

    def _handle(self, command: FetchJob | _Cancel | _GiveUp) -> None:
        match command:
            case FetchJob():
                hashes = command.hashes
                size = self._group_size
                groups = deque(hashes[start : start + size] for start in range(0, len(hashes), size))
                try:
                    peer = self._connect(command.offer.endpoint)
                except zmq.ZMQError as error:
                    logger.error("KV blocks cannot be fetched from %r: %s", command.offer.endpoint, error)
                    self._results.put(FetchResult(command.request_id, {}, "peer_gone"))
                    return
                fetch = _Fetch(command, peer, groups)
                peer.fetches.add(fetch)
                self._fetches[command.request_id] = fetch
                self._ask(fetch)
            case _Cancel():
                self._cancel(command.request_id)
            case _GiveUp():
                try:
                    peer = self._connect(command.offer.endpoint)
                except zmq.ZMQError as error:
                    logger.error("an offer at %r cannot be given up: %s", command.offer.endpoint, error)
                    return
                self._send(peer, ReleaseLease(transfer_id=command.offer.transfer_id, is_fetched=False))

    def _ask(self, fetch: _Fetch) -> None:
        while fetch.groups and len(fetch.under_way) < MAX_GROUPS_UNDER_WAY:
            hashes = fetch.groups.popleft()
            ticket = next(self._next_ticket)
            fetch.under_way[ticket] = hashes
            self._tickets[ticket] = fetch
            message = FetchBlocks(transfer_id=fetch.job.offer.transfer_id, ticket=ticket, hashes=list(hashes))
            self._send(fetch.peer, message)

    def _receive(self, peer: _Peer) -> None:
        frames = peer.socket.recv_multipart(copy=False)
        try:
            message = producer_message_decoder.decode(frames[0].buffer)
        except msgspec.DecodeError as error:
            logger.warning("a message of %r cannot be read: %s", peer.endpoint, error)
            return
        match message:
            case BlocksFetched():
                fetch = self._tickets.pop(message.ticket, None)
                if fetch is not None:  # else it was given up meanwhile
                    self._take(fetch, message, frames[1].buffer if len(frames) == 2 else memoryview(b""))
            case FetchRefused():
                fetch = self._tickets.pop(message.ticket, None)
                if fetch is not None:
                    self._end(fetch, "not_offered")

    def _take(self, fetch: _Fetch, message: BlocksFetched, data: memoryview) -> None:
        """Check a group of blocks and keep them. They are views: nothing is copied before they enter the pool."""
        hashes = fetch.under_way.pop(message.ticket)
        size = self._block_bytes
        if len(data) != len(hashes) * size or len(message.digests) != len(hashes):
            logger.error("%d bytes came for %d KV blocks of %d bytes", len(data), len(hashes), size)
            self._end(fetch, "corrupt")
            return
        for index, (block_hash, digest) in enumerate(zip(hashes, message.digests, strict=True)):
            block = data[index * size : (index + 1) * size]
            if block_digest(block_hash, block) != digest:
                logger.error("a KV block for %s arrived with a wrong digest", fetch.job.request_id)
                self._end(fetch, "corrupt")
                return
            fetch.blocks[block_hash] = block
        self._ask(fetch)
        if not fetch.under_way:
            self._end(fetch, None)

    def _end(self, fetch: _Fetch, failure: TransferFailure | None) -> None:
        """Release the lease and hand in the result."""
        self._drop(fetch)
        self._send(fetch.peer, ReleaseLease(transfer_id=fetch.job.offer.transfer_id, is_fetched=failure is None))
        blocks = fetch.blocks if failure is None else {}
        self._results.put(FetchResult(fetch.job.request_id, blocks, failure))

    def _cancel(self, request_id: str) -> None:
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            self._drop(fetch)
            self._send(fetch.peer, ReleaseLease(transfer_id=fetch.job.offer.transfer_id, is_fetched=False))

    def _drop(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.job.request_id]
        fetch.peer.fetches.discard(fetch)
        for ticket in fetch.under_way:
            self._tickets.pop(ticket, None)

    def _send(self, peer: _Peer, message: ConsumerMessage) -> None:
        peer.socket.send(encoder.encode(message), flags=zmq.NOBLOCK)

    def _connect(self, endpoint: str) -> _Peer:
        """The connection to an endpoint; a new one is made in the background, and ``_lose`` hears if it cannot be."""
        peer = self._peers.get(endpoint)
        if peer is not None:
            return peer
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)  # bounded by what is asked for; and a send never blocks
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        monitor = socket.get_monitor_socket(_BROKEN)  # before connecting, or the first failure could be missed
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.disable_monitor()
            monitor.close()
            socket.close(linger=0)
            raise
        peer = _Peer(endpoint, socket, monitor)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        self._peers[endpoint] = peer
        return peer

    def _lose(self, peer: _Peer) -> None:
        """The other side is gone, and its leases with it: a process that comes back there knows nothing of them."""
        logger.warning("the prefill engine at %r is gone", peer.endpoint)
        for fetch in list(peer.fetches):
            self._drop(fetch)
            self._results.put(FetchResult(fetch.job.request_id, {}, "peer_gone"))
        self._disconnect(peer, linger_ms=0)

    def _disconnect(self, peer: _Peer, linger_ms: int = _LINGER_MS) -> None:
        del self._peers[peer.endpoint]
        self._poller.unregister(peer.socket)
        self._poller.unregister(peer.monitor)
        peer.socket.disable_monitor()
        peer.monitor.close(linger=0)
        peer.socket.close(linger=linger_ms)
