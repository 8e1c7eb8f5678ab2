"""The thread of a prefill engine that answers decode engines, beside whatever step the engine is computing.

It reads blocks only through ``LeaseTable``, and they are full, so no step writes into them. That an engine which has
begun to fetch is gone shows when nothing can be sent to it any more: a dead process closes its connection, a dead
machine misses heartbeats, and the lease then need not last until its end.
"""

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import msgspec
import zmq

from engine.block_hash import BlockHash
from engine.disaggregation.leases import LeaseTable
from engine.disaggregation.wire import (
    AreYouThere,
    BlocksFetched,
    FetchBlocks,
    FetchRefused,
    ReleaseLease,
    block_digest,
    consumer_message_decoder,
    encoder,
)
from engine.errors import EngineError

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
_PEER_CHECK_MS = 100
_MAX_MESSAGE_BYTES = 16 << 20  # the hashes of half a million blocks


class KVSender:
    """Serves the blocks of leases at an endpoint until it is closed."""

    def __init__(
        self, endpoint: str, leases: LeaseTable, read_blocks: Callable[[SequenceOf[int]], bytes], block_bytes: int
    ) -> None:
        """Bind and start the thread.

        Args:
            endpoint: to bind; see ``KVTransferConfig.endpoint``.
            leases: what may be read.
            read_blocks: bytes of some blocks, one after the other; called in the thread of the sender.
            block_bytes: size of one.

        Raises:
            EngineError: the endpoint cannot be bound.
        """
        self._leases = leases
        self._read_blocks = read_blocks
        self._block_bytes = block_bytes
        self.num_bytes = 0
        """Sent so far."""
        self._is_closing = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # what can be pending is bounded by what a decode engine asks for at a time
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise EngineError(f"kv_transfer.endpoint {endpoint!r} cannot be bound: {error}") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """As bound, with the port that was taken."""
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and free the endpoint."""
        self._is_closing = True
        self._thread.join()
        self._context.term()

    def _run(self) -> None:
        with self._socket:
            while not self._is_closing:
                if not self._socket.poll(_PEER_CHECK_MS):
                    self._check_peers()
                    continue
                peer, *frames = self._socket.recv_multipart()
                try:
                    message = consumer_message_decoder.decode(frames[-1] if frames else b"")
                except msgspec.DecodeError as error:
                    logger.warning("a message about KV blocks cannot be read: %s", error)
                    continue
                match message:
                    case FetchBlocks():
                        self._answer(peer, message)
                    case ReleaseLease():
                        self._leases.end(message.transfer_id, "fetched" if message.is_fetched else "released")

    def _answer(self, peer: bytes, message: FetchBlocks) -> None:
        hashes = [BlockHash(block_hash) for block_hash in message.hashes]
        try:
            data = self._leases.read(message.transfer_id, hashes, peer, self._read_blocks)
        except Exception:  # out of memory, say: that transfer fails, the next one need not
            logger.exception("%d KV blocks could not be read", len(hashes))
            data = None
        if data is None:
            self._send(peer, encoder.encode(FetchRefused(ticket=message.ticket)))
            return
        size = self._block_bytes
        view = memoryview(data)
        digests = [
            block_digest(block_hash, view[index * size : (index + 1) * size]) for index, block_hash in enumerate(hashes)
        ]
        self.num_bytes += len(data)
        self._send(peer, encoder.encode(BlocksFetched(ticket=message.ticket, digests=digests)), data)

    def _check_peers(self) -> None:
        for peer in {lease.peer for lease in self._leases.standing() if lease.peer is not None}:
            self._send(peer, encoder.encode(AreYouThere()))

    def _send(self, peer: bytes, *frames: bytes) -> None:
        try:
            self._socket.send_multipart([peer, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._leases.end_of_peer(peer)
