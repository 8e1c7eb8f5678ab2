"""The side of a decode engine: fetches the blocks of prompts that others have computed, and bounds the wait for them.

A sequence whose blocks are on the way stays in the queue and is passed over: it holds neither a place among the
running ones nor a block. When they have come, ``KVCacheManager`` finds them as it finds the prefix cache's. When they
do not come in time, or not as they should, the configured policy decides, and it is counted by reason::

    fail        the sequence ends with an error that names the reason; a router may have it prefilled again
    recompute   the sequence is scheduled without them; what it computes then is counted as recomputed
"""

from collections import Counter, deque
from dataclasses import dataclass

from engine.block_hash import BlockHash
from engine.config import KVTransferConfig
from engine.disaggregation.connector import KVBlockMemory
from engine.disaggregation.receiver import FetchJob, FetchResult, KVReceiver
from engine.outputs import KVOffer, KVTransferStats, TransferFailure
from engine.scheduler import Scheduler
from engine.scheduler_output import SchedulerOutput
from engine.sequence import Sequence
from engine.stats import Histogram


@dataclass(slots=True)
class _Transfer:
    """One sequence whose blocks are wanted."""

    sequence: Sequence
    offer: KVOffer
    hashes: list[BlockHash]
    """Of the blocks that are missing here, in order."""
    num_tokens: int
    """Leading tokens that need no computing once they have come."""
    deadline_s: float
    is_started: bool = False
    """The receiver has it; else it waits for the buffer."""


class KVConsumer:
    """Starts, bounds and ends transfers; the receiver's thread makes them."""

    def __init__(self, config: KVTransferConfig, scheduler: Scheduler, memory: KVBlockMemory) -> None:
        """Start the receiver."""
        self._config = config
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._block_bytes = memory.block_bytes
        self._layout = memory.layout
        self._receiver = KVReceiver(memory.block_bytes)
        self._transfers: dict[str, _Transfer] = {}
        """Under way."""
        self._queue: deque[_Transfer] = deque()
        """Those of them that the receiver does not have yet; ended ones among them are passed over."""
        self._arrived: dict[str, _Transfer] = {}
        """Complete, and not scheduled yet."""
        self._num_bytes_under_way = 0
        self._num_started = 0
        self._num_completed = 0
        self._num_failed: Counter[TransferFailure] = Counter()
        self._num_cancelled = 0
        self._num_skipped = 0
        self._num_bytes = 0
        self._transferred_tokens = 0
        self._recomputed_tokens = 0
        self._wait = Histogram()

    @property
    def has_pending(self) -> bool:
        """A transfer is under way; its sequence is unfinished in any case."""
        return bool(self._transfers)

    def check(self, sequence: Sequence) -> None:
        """A decode engine offers nothing."""
        if sequence.do_remote_decode:
            raise ValueError("do_remote_decode needs an engine with kv_transfer.role 'prefill', this one is 'decode'")

    def start(self, sequence: Sequence, now: float) -> None:
        """Queue the transfer of what the cache lacks of a prompt; too little of it is not worth one."""
        offer = sequence.remote_prefill
        if offer is None:
            return
        block_size = self._manager.block_size
        first = self._manager.get_computed_blocks(sequence).num_blocks
        end = min(offer.num_tokens, sequence.num_tokens - 1) // block_size
        hashes = [hashed.hash for hashed in sequence.hashed_blocks[first:end]]
        if not hashes or len(hashes) * block_size < self._config.min_transfer_tokens:
            self._num_skipped += 1
            self._receiver.give_up(offer)
            return
        transfer = _Transfer(
            sequence=sequence,
            offer=offer,
            hashes=hashes,
            num_tokens=end * block_size,
            deadline_s=sequence.arrival_s + self._config.kv_transfer_timeout_ms / 1e3,
        )
        sequence.awaits_kv = True
        self._num_started += 1
        self._transfers[sequence.request_id] = transfer
        if offer.layout == self._layout:  # else it fails in the next step
            self._queue.append(transfer)
            self._start_queued()

    def poll(self, now: float) -> list[Sequence]:
        """Take in what has come, end what is late, begin what there is room for."""
        ended = []
        for result in self._receiver.take_results():
            transfer = self._transfers.get(result.request_id)
            if transfer is None:
                continue  # it was late, or its request ended
            if result.failure is None:
                self._complete(transfer, result, now)
            else:
                ended += self._fail(transfer, result.failure, now)
        for transfer in list(self._transfers.values()):
            if transfer.offer.layout != self._layout:
                ended += self._fail(transfer, "layout", now)
            elif transfer.deadline_s <= now:
                ended += self._fail(transfer, "timeout", now)
        ended += self._watch_arrived(now)
        self._start_queued()
        return ended

    def finish(self, sequence: Sequence, now: float) -> KVOffer | None:
        """Cancel what is under way for a sequence that has ended."""
        transfer = self._transfers.get(sequence.request_id)
        if transfer is not None:
            self._stop(transfer)
            self._num_cancelled += 1
            self._wait.add((now - sequence.arrival_s) * 1e3)
        arrived = self._arrived.pop(sequence.request_id, None)
        if arrived is not None:
            self._note_use(arrived)
        return None

    def copies_failed(self, scheduler_output: SchedulerOutput, now: float) -> list[Sequence]:
        """Blocks of a step were not copied: their sequences are about to compute them, unless the policy forbids it."""
        lost = {receive.block_id for receive in scheduler_output.kv_receives}
        ended = []
        for part in scheduler_output.scheduled:
            num_lost = len(lost.intersection(part.block_ids))
            sequence = self._scheduler.get(part.request_id)
            if num_lost and sequence is not None:
                self._num_failed["copy"] += 1
                self._num_completed -= 1
                self._arrived.pop(part.request_id, None)
                sequence.num_transferred_tokens = 0
                ended += self._apply_policy(sequence, "copy", num_lost * self._manager.block_size, now)
        return ended

    def release(self, request_id: str) -> bool:
        """It has made no offer."""
        return False

    def stats(self) -> KVTransferStats:
        """Transfers so far."""
        return KVTransferStats(
            num_started=self._num_started,
            num_completed=self._num_completed,
            num_failed={str(reason): count for reason, count in self._num_failed.items()},
            num_cancelled=self._num_cancelled,
            num_under_way=len(self._transfers),
            num_skipped=self._num_skipped,
            num_bytes=self._num_bytes,
            transferred_tokens=self._transferred_tokens,
            recomputed_tokens=self._recomputed_tokens,
            wait=self._wait.snapshot(),
        )

    def close(self) -> None:
        """Give up what is under way."""
        self._receiver.close()

    def _start_queued(self) -> None:
        while self._queue:
            transfer = self._queue[0]
            if self._transfers.get(transfer.sequence.request_id) is transfer:
                num_held = self._num_bytes_under_way + self._manager.received_blocks.num_bytes
                num_bytes = len(transfer.hashes) * self._block_bytes
                if num_held and num_held + num_bytes > self._config.kv_buffer_size:
                    return
                transfer.is_started = True
                self._num_bytes_under_way += num_bytes
                self._receiver.fetch(FetchJob(transfer.sequence.request_id, transfer.offer, transfer.hashes))
            self._queue.popleft()

    def _complete(self, transfer: _Transfer, result: FetchResult, now: float) -> None:
        sequence = transfer.sequence
        self._leave(transfer)
        self._num_completed += 1
        self._num_bytes += len(transfer.hashes) * self._block_bytes
        self._manager.received_blocks.add(sequence.request_id, result.blocks)
        self._arrived[sequence.request_id] = transfer
        self._be_ready(sequence, now)

    def _fail(self, transfer: _Transfer, reason: TransferFailure, now: float) -> list[Sequence]:
        """Count it and let the policy decide; returns the sequence if it has ended."""
        self._stop(transfer)
        self._num_failed[reason] += 1
        self._be_ready(transfer.sequence, now)
        return self._apply_policy(transfer.sequence, reason, len(transfer.hashes) * self._manager.block_size, now)

    def _apply_policy(
        self, sequence: Sequence, reason: TransferFailure, num_missing_tokens: int, now: float
    ) -> list[Sequence]:
        if self._config.on_transfer_failure == "recompute":
            self._recomputed_tokens += num_missing_tokens
            return []
        sequence.transfer_failure = reason
        limit_ms = self._config.kv_transfer_timeout_ms
        text = f" within {limit_ms:g} ms" if reason == "timeout" else ""
        error = f"the KV blocks of {num_missing_tokens} prompt tokens did not come{text}: {reason}"
        self._scheduler.finish(sequence, "error", now, error=error)
        return [sequence]

    def _watch_arrived(self, now: float) -> list[Sequence]:
        """Look after complete transfers until their sequences are scheduled: what they follow may be evicted."""
        ended = []
        for request_id, transfer in list(self._arrived.items()):
            sequence = transfer.sequence
            if sequence.first_scheduled_s is not None:
                del self._arrived[request_id]
                self._note_use(transfer)
            elif not self._is_usable(transfer):
                del self._arrived[request_id]
                self._manager.received_blocks.forget(request_id)
                self._num_completed -= 1
                self._num_failed["evicted"] += 1
                num_found = self._manager.get_computed_blocks(sequence).num_tokens
                ended += self._apply_policy(sequence, "evicted", transfer.num_tokens - num_found, now)
        return ended

    def _is_usable(self, transfer: _Transfer) -> bool:
        return self._manager.get_computed_blocks(transfer.sequence).num_tokens >= transfer.num_tokens

    def _note_use(self, transfer: _Transfer) -> None:
        """Count what a scheduled sequence has used, and what it had to compute though it had come."""
        sequence = transfer.sequence
        if sequence.first_scheduled_s is None:
            return
        self._transferred_tokens += sequence.num_transferred_tokens
        num_found = sequence.num_cached_tokens + sequence.num_transferred_tokens
        self._recomputed_tokens += max(0, transfer.num_tokens - num_found)

    def _be_ready(self, sequence: Sequence, now: float) -> None:
        sequence.awaits_kv = False
        sequence.transfer_ended_s = now
        self._wait.add((now - sequence.arrival_s) * 1e3)

    def _stop(self, transfer: _Transfer) -> None:
        """End a transfer before it is complete, and let the other side know."""
        if transfer.is_started:
            self._receiver.cancel(transfer.sequence.request_id)
        else:
            self._receiver.give_up(transfer.offer)
        self._leave(transfer)

    def _leave(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.sequence.request_id]
        if transfer.is_started:
            self._num_bytes_under_way -= len(transfer.hashes) * self._block_bytes
