"""The leases of a prefill engine: which blocks it keeps for others, until when, and who fetches them.

Two threads meet here. The engine's thread grants leases and takes back the blocks of those that have ended; the
sender's thread reads blocks and ends leases. A block is read under the lock and only while its lease stands, and the
engine gives it back only after the lease has ended: so no block is handed out for something else while it is read.

A lease ends, once and for all, when its blocks were fetched, when they are not wanted any more, when its time is over,
when the engine that was fetching them is gone, or when a block turned out to be wrong.
"""

import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

from engine.block_hash import BlockHash

LeaseEnd = Literal["fetched", "released", "expired", "peer_gone", "poisoned"]


@dataclass(slots=True)
class Lease:
    """Blocks that are kept for another engine."""

    transfer_id: str
    request_id: str
    """The request that computed them."""
    block_ids: Mapping[BlockHash, int]
    expires_s: float
    """Clock of the engine."""
    peer: bytes | None = None
    """Connection that fetches them; ``None`` before the first block is asked for."""


class LeaseTable:
    """All leases that stand, and those that have ended and whose blocks are to be given back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._ended: list[tuple[Lease, LeaseEnd]] = []

    def __len__(self) -> int:
        """Leases that stand, and those whose blocks were not taken back yet."""
        with self._lock:
            return len(self._leases) + len(self._ended)

    def grant(self, lease: Lease) -> None:
        """From now on its blocks can be read."""
        with self._lock:
            self._leases[lease.transfer_id] = lease

    def read(
        self,
        transfer_id: str,
        hashes: SequenceOf[BlockHash],
        peer: bytes,
        read_blocks: Callable[[SequenceOf[int]], bytes],
    ) -> bytes | None:
        """The bytes of some blocks of a lease; ``None`` if it does not stand or lacks one of them.

        Args:
            transfer_id: as offered.
            hashes: names of the blocks.
            peer: connection they are sent to.
            read_blocks: reads blocks by id.
        """
        with self._lock:
            lease = self._leases.get(transfer_id)
            if lease is None or len(hashes) > len(lease.block_ids):
                return None
            if any(block_hash not in lease.block_ids for block_hash in hashes):
                return None
            lease.peer = peer
            return read_blocks([lease.block_ids[block_hash] for block_hash in hashes])

    def end(self, transfer_id: str, how: LeaseEnd) -> None:
        """End a lease; nothing happens if it does not stand any more."""
        with self._lock:
            lease = self._leases.pop(transfer_id, None)
            if lease is not None:
                self._ended.append((lease, how))

    def end_of_request(self, request_id: str, how: LeaseEnd) -> bool:
        """End the lease that a request left; False if there is none."""
        found = [lease.transfer_id for lease in self.standing() if lease.request_id == request_id]
        for transfer_id in found:
            self.end(transfer_id, how)
        return bool(found)

    def end_of_peer(self, peer: bytes) -> None:
        """A connection is gone, and with it all that it was fetching."""
        for lease in self.standing():
            if lease.peer == peer:
                self.end(lease.transfer_id, "peer_gone")

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        for lease in self.standing():
            if lease.expires_s <= now:
                self.end(lease.transfer_id, "expired")

    def standing(self) -> list[Lease]:
        """A copy of the list."""
        with self._lock:
            return list(self._leases.values())

    def take_ended(self) -> list[tuple[Lease, LeaseEnd]]:
        """Those that have ended since the last call; the caller gives back their blocks."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended
