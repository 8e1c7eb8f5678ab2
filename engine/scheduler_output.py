"""The two values between scheduler and model runner: what one step computes, and what came out of it.

``SchedulerOutput`` is all the model runner knows of the scheduler. There are no phases in it: a sequence computes
``token_ids`` at positions ``start, start + 1, ...``, be they a whole prompt, a chunk of one, the rest after a prefix
hit, or one decoded token::

    prompt of 40 tokens, 16 of them cached, chunks of 16          start  token_ids        needs_sample
      step 1                                                        16   prompt[16:32]    False
      step 2                                                        32   prompt[32:40]    True   -> token a
      step 3                                                        40   [a]              True   -> token b
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.received_blocks import KVReceive
from engine.sampling_params import SamplingParams
from engine.second_tier import KVTransfer


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The part of one sequence that the next step computes. Never empty."""

    request_id: str
    token_ids: list[int]
    """The tokens to compute now, ``num_new_tokens`` of them."""
    start: int
    """Position of the first of them: tokens whose KV is in the cache already."""
    block_ids: list[int]
    """The whole block table so far; covers at least ``start + len(token_ids)`` tokens. The step's own, not shared."""
    sampling: SamplingParams
    needs_sample: bool
    """The last of ``token_ids`` is the last known token, so its logits choose a new one."""
    num_output_tokens: int
    """Output tokens so far: the index of the token to be sampled, for seeded sampling."""
    known_token_ids: Sequence[int] = ()
    """Prompt and output so far, the scheduler's own list: to be read during the step, not kept."""

    @property
    def num_new_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    @property
    def context_len(self) -> int:
        """Tokens in the KV cache after this step: what the last new token attends to."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: at most ``max_num_batched_tokens`` tokens of at most ``max_num_seqs`` sequences, each once."""

    scheduled: list[ScheduledSequence]
    """Running sequences first, then newly admitted ones."""
    finished_request_ids: list[str] = field(default_factory=list)
    """Ended since the last executed step (finished, aborted, failed); the runner may drop state it keeps for them."""
    kv_stores: list[KVTransfer] = field(default_factory=list)
    """Blocks to copy to the second tier before anything else."""
    kv_loads: list[KVTransfer] = field(default_factory=list)
    """Blocks to copy from it, after that and before anything is computed."""
    kv_receives: list[KVReceive] = field(default_factory=list)
    """Blocks to fill with what came from another engine, likewise."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(len(sequence.token_ids) for sequence in self.scheduled)


class SampledLogprobs(NamedTuple):
    """How likely the model found the sampled token, and the most likely ones beside it."""

    logprob: float
    top: list[tuple[int, float]]
    """Token ids and their log probabilities, most likely first."""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step produced."""

    sampled: dict[str, int]
    """``request_id`` to new token id, for exactly the scheduled sequences with ``needs_sample``."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """``request_id`` to error text, for sequences that failed alone; they need no sampled token."""
    logprobs: Mapping[str, SampledLogprobs] = field(default_factory=dict)
    """``request_id`` to log probabilities, for sequences that ask for them."""
    poisoned_block_ids: list[int] = field(default_factory=list)
    """Blocks in which values were not finite; the runner has cleared them, so they hold no prefix any more."""
