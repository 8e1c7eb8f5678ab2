"""What the engine sees of transfers: the interface of both sides, and the one factory, which imports late."""

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

from engine.config import KVTransferConfig
from engine.outputs import KVOffer, KVTransferStats
from engine.scheduler_output import SchedulerOutput
from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.scheduler import Scheduler


class KVBlockMemory(Protocol):
    """The bytes behind block ids: ``engine.disaggregation.block_memory``, or a fake in tests."""

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers together."""
        ...

    @property
    def layout(self) -> str:
        """What the bytes mean; engines exchange blocks only where it is equal."""
        ...

    def read_blocks(self, block_ids: SequenceOf[int]) -> bytes:
        """Bytes of some full blocks, one after the other. May be called in another thread than the engine's."""
        ...


class KVConnector(Protocol):
    """One side of transfers. All methods belong to the engine's thread."""

    @property
    def has_pending(self) -> bool:
        """``poll`` has something to wait for."""
        ...

    def start(self, sequence: Sequence, now: float) -> None:
        """Hear of a sequence that has just been queued.

        Raises:
            ValueError: it asks for what this side does not do; then it has not been queued.
        """
        ...

    def check(self, sequence: Sequence) -> None:
        """Let a sequence pass that this side can serve.

        Raises:
            ValueError: it asks for what this side does not do.
        """
        ...

    def poll(self, now: float) -> list[Sequence]:
        """Take in what has happened meanwhile, before a step; returns the sequences that ended with an error."""
        ...

    def finish(self, sequence: Sequence, now: float) -> KVOffer | None:
        """A sequence has ended: offer its blocks where that was asked for, give up what was on the way for it."""
        ...

    def copies_failed(self, scheduler_output: SchedulerOutput, now: float) -> list[Sequence]:
        """The copies of a step may not have been made; returns the sequences that ended with an error."""
        ...

    def release(self, request_id: str) -> bool:
        """Give up the offer that a request left; False if there is none."""
        ...

    def stats(self) -> KVTransferStats:
        """Counters so far."""
        ...

    def close(self) -> None:
        """End the thread and the connections."""
        ...


def make_connector(config: KVTransferConfig, scheduler: "Scheduler", memory: KVBlockMemory) -> KVConnector | None:
    """The side that the role asks for; ``None`` for an engine that computes both phases itself.

    Raises:
        EngineError: the endpoint of a prefill engine cannot be bound.
    """
    if config.role == "prefill":
        from engine.disaggregation.producer import KVProducer

        return KVProducer(config, scheduler.kv_cache_manager, memory)
    if config.role == "decode":
        from engine.disaggregation.consumer import KVConsumer

        return KVConsumer(config, scheduler, memory)
    return None
