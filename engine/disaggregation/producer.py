"""The side of a prefill engine: offers the blocks of a prompt that it has computed, and takes them back in time."""

import secrets
from collections import Counter

from engine.config import KVTransferConfig
from engine.disaggregation.connector import KVBlockMemory
from engine.disaggregation.leases import Lease, LeaseEnd, LeaseTable
from engine.disaggregation.sender import KVSender
from engine.kv_cache_manager import KVCacheManager
from engine.outputs import KVOffer, KVTransferStats
from engine.scheduler_output import SchedulerOutput
from engine.sequence import Sequence


class KVProducer:
    """Grants a lease on the cached blocks of every prompt that ends with ``do_remote_decode``."""

    def __init__(self, config: KVTransferConfig, kv_cache_manager: KVCacheManager, memory: KVBlockMemory) -> None:
        """Open the endpoint.

        Raises:
            EngineError: it cannot be bound.
        """
        self._config = config
        self._manager = kv_cache_manager
        self._layout = memory.layout
        self._max_num_blocks = int(config.max_leased_share * kv_cache_manager.block_pool.num_blocks)
        self.leases = LeaseTable()
        self._sender = KVSender(config.endpoint, self.leases, memory.read_blocks, memory.block_bytes)
        self.endpoint = config.advertised_endpoint or self._sender.endpoint
        """Where decode engines ask."""
        self._num_offers = 0
        self._num_refused = 0
        self._num_ended: Counter[LeaseEnd] = Counter()

    @property
    def has_pending(self) -> bool:
        """A lease stands."""
        return len(self.leases) > 0

    def check(self, sequence: Sequence) -> None:
        """A prefill engine fetches nothing."""
        if sequence.remote_prefill is not None:
            raise ValueError("remote_prefill needs an engine with kv_transfer.role 'decode', this one is 'prefill'")

    def start(self, sequence: Sequence, now: float) -> None:
        """Nothing happens before it has been computed."""

    def poll(self, now: float) -> list[Sequence]:
        """End leases whose time is over or whose blocks are wrong, and take back the blocks of all that have ended."""
        self.leases.expire(now)
        for lease in self.leases.standing():
            if not self._manager.is_lease_valid(lease.transfer_id):
                self.leases.end(lease.transfer_id, "poisoned")
        for lease, how in self.leases.take_ended():
            self._manager.release_lease(lease.transfer_id)
            self._num_ended[how] += 1
        return []

    def finish(self, sequence: Sequence, now: float) -> KVOffer | None:
        """Keep the blocks of a prompt that was computed. To be called before any block is handed out again."""
        if not sequence.do_remote_decode or sequence.finish_reason not in ("stop", "length"):
            return None
        num_blocks = sequence.num_prompt_tokens // self._manager.block_size
        if num_blocks == 0:
            return None
        if self._manager.num_leased_blocks + num_blocks > self._max_num_blocks:
            self._num_refused += 1
            return None
        transfer_id = secrets.token_hex(16)
        block_ids = self._manager.lease_blocks(transfer_id, sequence)
        if not block_ids:
            return None
        self.leases.grant(
            Lease(
                transfer_id=transfer_id,
                request_id=sequence.request_id,
                block_ids=block_ids,
                expires_s=now + self._config.lease_ms / 1e3,
            )
        )
        self._num_offers += 1
        return KVOffer(
            transfer_id=transfer_id,
            endpoint=self.endpoint,
            num_tokens=len(block_ids) * self._manager.block_size,
            layout=self._layout,
            lease_ms=self._config.lease_ms,
        )

    def copies_failed(self, scheduler_output: SchedulerOutput, now: float) -> list[Sequence]:
        """It makes none."""
        return []

    def release(self, request_id: str) -> bool:
        """End the lease of a request whose client is gone."""
        return self.leases.end_of_request(request_id, "released")

    def stats(self) -> KVTransferStats:
        """Offers, and how leases ended."""
        return KVTransferStats(
            num_bytes=self._sender.num_bytes,
            num_offers=self._num_offers,
            num_offers_refused=self._num_refused,
            num_leases=len(self.leases.standing()),
            num_leased_blocks=self._manager.num_leased_blocks,
            num_leases_ended={str(how): count for how, count in self._num_ended.items()},
        )

    def close(self) -> None:
        """Stop serving."""
        self._sender.close()
