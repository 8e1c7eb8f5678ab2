"""One request as the scheduler sees it: its tokens, how far they are computed, and when what happened."""

import enum
from dataclasses import dataclass, field

from engine.block_hash import HashedBlock
from engine.outputs import FinishReason, GenerateRequest, KVOffer, TransferFailure
from engine.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence is. ``WAITING`` also holds preempted ones: they queue again, in front."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A prompt and its output so far. Only the scheduler changes it.

    There is no prefill or decode state. ``num_computed_tokens`` follows ``num_tokens``: many behind is prefill, one
    behind is decode, and a preempted sequence is simply all behind again, its output tokens included.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str
    arrival_s: float
    """Clock of the engine, as all times below; ``None`` is not yet."""
    tenant_id: str = ""
    """Whom its tokens are charged to; empty is the salt, of which every tenant has its own."""
    priority: int = 0
    """A higher one goes first."""
    deadline_s: float | None = None
    """When the first token has to be there; one that has not been scheduled by then ends with an error."""
    do_remote_decode: bool = False
    """Its prompt's blocks are to be kept for another engine when it ends."""
    remote_prefill: KVOffer | None = None
    """Where another engine keeps blocks of its prompt."""

    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(init=False)
    """Prompt, then output."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the sequence's blocks."""
    hashed_blocks: list[HashedBlock] = field(default_factory=list)
    """Chain over the full blocks of ``token_ids``, extended by the KV cache manager when it needs it."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first scheduled."""
    num_transferred_tokens: int = 0
    """Prompt tokens whose blocks came from another engine, known when first scheduled."""
    awaits_kv: bool = False
    """It waits for blocks of another engine: it is not to be scheduled yet, and holds nothing."""
    num_public_blocks: int | None = None
    """Leading blocks that are shared with all tenants; ``None`` before the KV cache manager has looked."""
    num_prefix_waits: int = 0
    """Steps in a row in which it waited for a prefix that another was computing, and that did not grow."""
    awaited_num_tokens: int = 0
    """How much of that prefix there was in the last of these steps."""
    due_s: float = 0.0
    """Order among waiting sequences of one priority and tenant, set by the scheduling policy when it is added."""
    max_tokens_asked: int | None = None
    """What ``max_tokens`` was before it was reduced to the room left in the window; ``None`` where it was not."""

    transfer_ended_s: float | None = None
    """When the blocks of another engine had come, or had failed to; ``None`` where none were asked for."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_chunks: int = 0
    """Steps that computed prompt tokens, repeated ones after a preemption included."""
    num_preemptions: int = 0

    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the output, if one of those did."""
    error: str | None = None
    is_expired: bool = False
    """It ended because nothing of it had been scheduled by its deadline."""
    transfer_failure: TransferFailure | None = None
    """It ended because blocks of another engine did not come."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids must not be empty")
        self.token_ids = list(self.prompt_token_ids)
        self.tenant_id = self.tenant_id or self.cache_salt

    @classmethod
    def from_request(cls, request: GenerateRequest, arrival_s: float) -> "Sequence":
        """A waiting sequence for a request that arrives now.

        Raises:
            ValueError: the prompt is empty.
        """
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            arrival_s=arrival_s,
            tenant_id=request.tenant_id,
            priority=request.priority,
            deadline_s=None if request.deadline_ms is None else arrival_s + request.deadline_ms / 1e3,
            do_remote_decode=request.do_remote_decode,
            remote_prefill=request.remote_prefill,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that are still to be computed; never 0 before the end, because the newest one never is."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """One step and one token bring the next token."""
        return self.num_output_tokens > 0 and self.num_uncomputed_tokens == 1

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append_token(self, token_id: int, now: float) -> None:
        """Take the token sampled at ``now``."""
        self.token_ids.append(token_id)
        if self.first_token_s is None:
            self.first_token_s = now
        self.last_token_s = now

    def check_integrity(self) -> None:
        """Assert what must hold for a sequence that is not finished."""
        assert not self.is_finished, f"{self.request_id} is finished but still scheduled"
        assert 0 <= self.num_computed_tokens < self.num_tokens, (
            f"{self.request_id}: {self.num_computed_tokens} of {self.num_tokens} tokens computed"
        )
        assert self.num_output_tokens < self.sampling.max_tokens, (
            f"{self.request_id} should have ended after {self.sampling.max_tokens} output tokens"
        )
        assert self.token_ids[: self.num_prompt_tokens] == self.prompt_token_ids, f"{self.request_id}: prompt changed"
