"""The values that cross the border between the engine process and its client (msgspec over zmq)."""

from typing import Literal

import msgspec

from engine.sampling_params import SamplingParams
from engine.token_logprobs import PositionLogprobs
from engine.tool_parsers import ToolParserName

FinishReason = Literal["stop", "length", "abort", "error"]
TransferFailure = Literal["timeout", "peer_gone", "not_offered", "layout", "corrupt", "evicted", "copy"]
"""Why KV blocks did not come from another engine: not in time; its process or connection ended; it does not have them
for this request (any more); it keeps them in another form; what came is not what was asked for; what they follow has
left this engine's cache meanwhile; they could not be copied into the pool."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine serves."""

    model: str
    """Resolved model: file, folder or Hugging Face id."""
    architecture: str
    dtype: str
    num_parameters: int
    max_model_len: int
    """Window in tokens that is really admitted."""
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    block_size: int
    num_blocks: int
    weights_digest: str
    attention_backend: str
    num_second_tier_blocks: int = 0
    """Slots for evicted blocks outside the pool."""
    quantization: str = "none"
    """Of the weights."""
    tool_call_parser: ToolParserName = "hermes"
    """The format in which the model writes calls of tools."""
    kv_cache_dtype: str = "auto"
    """``auto`` is ``dtype``."""
    quantization_gate: str = "none"
    """What the regression gate says about the format, see ``engine.quantization_gate.GateStatus``."""


class KVOffer(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks of a prompt that a prefill engine keeps for a decode engine, for a limited time."""

    transfer_id: str
    """Names the offer; not to be guessed."""
    endpoint: str
    """Where to ask for the blocks."""
    num_tokens: int
    """Leading prompt tokens that the blocks hold."""
    layout: str
    """Form of a block's bytes: only engines with the same one understand each other."""
    lease_ms: float
    """So long they are kept, counted from the end of the prefill."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """One sequence to compute."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str
    """Isolation key of the prefix cache, derived by the gateway from the authenticated tenant. Never empty."""
    tenant_id: str = ""
    """Whose share of the engine it uses; empty is ``cache_salt``, which every tenant has one of."""
    priority: int = 0
    """A higher one goes first; waiting lifts it, see ``SchedulerConfig.priority_ageing_s``."""
    deadline_ms: float | None = None
    """Longest useful time from arrival to the first token; what cannot keep it is refused or ends with an error."""
    do_remote_decode: bool = False
    """Another engine will decode: keep the blocks of the prompt for it, and say in the last output where they are."""
    remote_prefill: KVOffer | None = None
    """Another engine has computed the prompt: fetch its blocks from there."""


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Forget a sequence and give back what it holds."""

    request_id: str


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one request went, measured inside the engine; ``engine.stats`` defines each figure.

    ``transfer_ms + queue_ms + prefill_ms + decode_ms`` is the request's whole time in the engine.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    num_chunks: int
    """Steps that computed prompt tokens."""
    num_preemptions: int
    input_tokens: int = 0
    """Tokens of the prompt."""
    cached_tokens: int = 0
    """Those of them that came from the prefix cache."""
    effective_tokens_per_s: float = 0.0
    """``input_tokens`` over ``compute_ms``; 0 before the first token."""
    transfer_ms: float = 0.0
    """Waiting for KV blocks of another engine, whether they came or not."""

    @property
    def compute_ms(self) -> float:
        """First scheduling to first token: another name of ``prefill_ms``."""
        return self.prefill_ms


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, tag="output"):
    """What one step added to one request. The last one carries ``finish_reason``."""

    request_id: str
    text: str
    """New text; complete characters only, never part of a stop string."""
    new_token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens taken from this engine's prefix cache when the sequence was first scheduled."""
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the output, if one of those did."""
    error: str | None = None
    is_expired: bool = False
    """It ended in the queue because its deadline had passed: nothing was computed, and it may come again."""
    timings: RequestTimings | None = None
    """With the first token (decode_ms is 0) and with the last."""
    max_tokens: int | None = None
    """Output tokens allowed, where the window had no room for as many as were asked for; with every output then."""
    logprobs: list[PositionLogprobs] | None = None
    """Of the tokens whose text this and earlier outputs have brought, as far as not told before; ``None`` where
    nobody asked for them."""
    num_transferred_tokens: int = 0
    """Prompt tokens whose KV blocks came from another engine; none of them is among the cached ones."""
    kv_offer: KVOffer | None = None
    """With the last output of a request with ``do_remote_decode``: where its blocks are; ``None`` if none are kept."""
    transfer_failure: TransferFailure | None = None
    """It ended with an error because its KV blocks did not come: with another prefill it may succeed."""


class LatencyHistogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one duration, as Prometheus wants them."""

    upper_ms: tuple[float, ...]
    """Upper bounds of the bins but the last one, which has none."""
    counts: tuple[int, ...]
    """Durations in each bin, not cumulated; one more than there are bounds."""
    sum_ms: float


class TokenHistogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one number of tokens, as Prometheus wants them."""

    upper: tuple[int, ...]
    """Upper bounds of the bins but the last one, which has none."""
    counts: tuple[int, ...]
    """Not cumulated; one more than there are bounds."""
    sum: int


class LengthStats(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one length bucket that got their first token."""

    num_requests: int
    input_tokens: int
    cached_tokens: int
    queue: LatencyHistogram
    compute: LatencyHistogram


class KVTransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of KV blocks to and from other engines since the start.

    ``num_started`` is those completed, failed, cancelled, and under way.
    """

    num_started: int = 0
    """Prompts whose blocks this engine went to fetch."""
    num_completed: int = 0
    num_failed: dict[str, int] = {}
    """By ``TransferFailure``."""
    num_cancelled: int = 0
    """Their request ended while they were under way."""
    num_under_way: int = 0
    """Now."""
    num_skipped: int = 0
    """Offers that were not made use of, because too little of the prompt was missing."""
    num_bytes: int = 0
    """Received and found correct, or sent."""
    transferred_tokens: int = 0
    """Of prompts, received and used."""
    recomputed_tokens: int = 0
    """That should have come from another engine and were computed here instead."""
    wait: LatencyHistogram | None = None
    """From arrival until the blocks were there or had failed."""
    num_offers: int = 0
    """Prompts whose blocks were kept for another engine."""
    num_offers_refused: int = 0
    """Prompts whose blocks were not, because offers held as much of the pool as they may."""
    num_leases: int = 0
    """Offers now."""
    num_leased_blocks: int = 0
    """Blocks that they hold."""
    num_leases_ended: dict[str, int] = {}
    """By ``fetched``, ``released``, ``expired``, ``peer_gone``, ``poisoned``."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """State of the engine after a step; counters run since its start."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """Share of blocks in use, 0 to 1; cached but unreferenced blocks count as free."""
    prompt_tokens: int
    """Prompt tokens of all sequences that produced a first token."""
    cached_prompt_tokens: int
    """Those of them that came from the prefix cache, counted once per sequence."""
    generation_tokens: int
    num_preemptions: int
    num_steps: int
    num_waiting_tokens: int = 0
    """Tokens of the waiting sequences."""
    num_waits_for_prefix: int = 0
    """Times a sequence waited a step for a prefix that a running one was computing."""
    num_second_tier_blocks: int = 0
    """Evicted blocks that are kept in the second tier."""
    num_refused: dict[str, int] = {}
    """Requests refused on arrival, by reason."""
    num_retried_steps: int = 0
    """Steps that failed as a whole and were computed again in parts."""
    cost_coefficients: tuple[float, float, float] | None = None
    """Seconds per step, per token and per attention pair, as fitted; ``None`` before the first prefill."""
    by_length: dict[str, LengthStats] = {}
    """By the length bucket of the prompt, see ``engine.lengths``."""
    transferred_prompt_tokens: int = 0
    """Prompt tokens whose blocks came from another engine, counted once per sequence; not among the cached ones."""
    kv_transfer: KVTransferStats | None = None
    """``None`` for an engine that computes both phases itself."""
    step_tokens: TokenHistogram | None = None
    """Tokens computed in a step."""
