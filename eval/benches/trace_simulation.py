"""Replays request traces through scheduler and block pool alone: no model, and time is what a cost formula says.

Prefix traces name blocks of up to 512 tokens. A block is replayed as one KV block of ``BLOCK_SIZE`` tokens, and all
lengths shrink with it, so whole blocks stay whole, partial ones partial, and shares of tokens what they were.
"""

import gzip
import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.block_hash import CacheKey
from engine.config import AdmissionConfig, SchedulerConfig
from engine.cost_model import CostCoefficients, PrefillCostModel, num_attention_pairs
from engine.kv_cache_manager import KVCacheManager
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine.sequence import Sequence as EngineSequence
from eval.errors import DataError

BLOCK_SIZE = 16
_FIRST_OUTPUT_ID = 1 << 31
_SALT = "tenant"


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace."""

    t: float
    """Arrival in seconds since the start."""
    input_tokens: int
    output_tokens: int
    prefix_blocks: list[int] | None = None
    """Equal ids mean equal prompts up to and including that block."""
    block_tokens: int | None = None
    session: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of one file and what identifies it."""

    name: str
    sha256: str
    requests: list[TraceRequest]


def read_trace(path: Path) -> Trace:
    """Reads a trace; requests without input are left out. Raises DataError naming the file."""
    try:
        stored = path.read_bytes()
        lines = gzip.decompress(stored).splitlines()
        requests = [msgspec.json.decode(line, type=TraceRequest) for line in lines if line.strip()]
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise DataError(f"{path}: not a readable trace: {error}") from None
    kept = [request for request in requests if request.input_tokens > 0]
    return Trace(path.name, hashlib.sha256(stored).hexdigest(), kept)


def make_cache_key() -> CacheKey:
    """A key for simulations: nothing depends on it."""
    return CacheKey(
        weights_digest="none", tokenizer_digest="none", template_version="", dtype="", quantization="none", rope=""
    )


class SimulatedRunner:
    """Returns one fixed token per sequence, so that outputs of different sequences differ and none ends early."""

    def __init__(self) -> None:
        self._token_ids: dict[str, int] = {}

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """A token for everybody who needs one."""
        return ModelRunnerOutput(
            sampled={
                part.request_id: self._token_ids.setdefault(part.request_id, _FIRST_OUTPUT_ID + len(self._token_ids))
                for part in scheduler_output.scheduled
                if part.needs_sample
            }
        )


class FixedCostModel(PrefillCostModel):
    """A cost model that was told its coefficients and believes them."""

    def __init__(self, coefficients: CostCoefficients, max_tokens_per_step: int | None = None) -> None:
        super().__init__(max_tokens_per_step=max_tokens_per_step)
        self._coefficients = coefficients
        self._scales = (1.0, 1.0, 1.0)


def step_seconds(coefficients: CostCoefficients, scheduler_output: SchedulerOutput) -> float:
    """What a step costs by the formula."""
    parts = scheduler_output.scheduled
    num_pairs = sum(num_attention_pairs(part.num_new_tokens, part.start) for part in parts)
    return coefficients.step_time_s(scheduler_output.num_tokens, num_pairs)


def replay(
    scheduler: Scheduler,
    sequences: Sequence[EngineSequence],
    cost_s: Callable[[SchedulerOutput], float],
    *,
    on_step: Callable[[SchedulerOutput, float], None] | None = None,
) -> None:
    """Run sequences, which arrive when they say, to their end; the clock advances by ``cost_s`` with every step."""
    runner = SimulatedRunner()
    arrivals = [(sequence.arrival_s, place) for place, sequence in enumerate(sequences)]
    heapq.heapify(arrivals)
    now = 0.0
    while arrivals or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            scheduler.add(sequences[heapq.heappop(arrivals)[1]])
        output = scheduler.schedule(now)
        scheduler.take_expired()
        seconds = cost_s(output)
        now += seconds
        if on_step is not None:
            on_step(output, seconds)
        scheduler.update_from_output(output, runner.execute(output), now)


@dataclass(frozen=True, slots=True)
class HitShare:
    """Share of prompt tokens found in the cache."""

    hit_share: float
    num_preemptions: int
    num_waits_for_prefix: int


def replay_prefixes(trace: Trace, num_blocks: int, *, max_num_seqs: int = 256) -> HitShare:
    """Hit share of scheduler and block pool on a trace with prefixes."""
    sequences = list(_scaled_sequences(trace))
    longest = max(sequence.num_tokens + sequence.sampling.max_tokens for sequence in sequences)
    config = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=max_num_seqs, max_num_waiting=1 << 30)
    scheduler = Scheduler(
        config,
        KVCacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, cache_key=make_cache_key()),
        max_model_len=longest + 1,
        admission=AdmissionConfig(max_num_waiting_tokens=None),
    )
    scale = _block_tokens(trace) / BLOCK_SIZE
    coefficients = CostCoefficients(0.01, 1e-5 * scale, 0.0)  # about 100,000 tokens a second: the trace's own cluster
    replay(scheduler, sequences, lambda output: step_seconds(coefficients, output))
    # In blocks of the trace: a partial block is not scaled exactly, but it is never a hit either.
    hits = sum(sequence.num_cached_tokens // BLOCK_SIZE * _block_tokens(trace) for sequence in sequences)
    total = sum(request.input_tokens for request in trace.requests)
    return HitShare(hits / total, scheduler.num_preemptions, scheduler.num_waits_for_prefix)


def unlimited_hit_share(trace: Trace) -> float:
    """Share of prompt tokens in whole blocks that an earlier request had; the last token is never a hit."""
    seen: set[int] = set()
    hits = 0
    for request in trace.requests:
        blocks = _full_blocks(request)
        num_hits = 0
        for block in blocks:
            if block not in seen:
                break
            num_hits += 1
        hits += min(num_hits, _max_hit_blocks(request)) * _block_tokens(trace)
        seen.update(blocks)
    return hits / sum(request.input_tokens for request in trace.requests)


def plain_lru_hit_share(trace: Trace, num_blocks: int, *, with_outputs: bool) -> float:
    """The same with so many blocks under plain LRU: every access, from the first block to the last, makes it newest.

    It knows every request the moment it arrives, and no block is pinned by a running sequence. ``with_outputs`` lets
    it hold the whole blocks of outputs as well, as an engine's cache does, which serves the next turns of a chat (but
    nobody in these traces); without them it is an ideal that no engine with that memory can have.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    next_output = -1
    for request in trace.requests:
        blocks = _full_blocks(request)
        num_hits = 0
        for block in blocks:
            if block not in cache:
                break
            num_hits += 1
        hits += min(num_hits, _max_hit_blocks(request)) * _block_tokens(trace)
        num_outputs = request.output_tokens // _block_tokens(trace) if with_outputs else 0
        for block in (*blocks, *range(next_output, next_output - num_outputs, -1)):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > num_blocks:
                cache.popitem(last=False)
        next_output -= num_outputs
    return hits / sum(request.input_tokens for request in trace.requests)


def num_distinct_blocks(trace: Trace) -> int:
    """Whole and partial blocks of all prompts, each once: what full size holds."""
    return len({block for request in trace.requests for block in request.prefix_blocks or ()})


def _block_tokens(trace: Trace) -> int:
    block_tokens = trace.requests[0].block_tokens
    if block_tokens is None:
        raise DataError(f"{trace.name}: has no prefixes")
    return block_tokens


def _full_blocks(request: TraceRequest) -> list[int]:
    assert request.block_tokens is not None, "only asked for traces with prefixes"
    return (request.prefix_blocks or [])[: request.input_tokens // request.block_tokens]


def _max_hit_blocks(request: TraceRequest) -> int:
    assert request.block_tokens is not None, "only asked for traces with prefixes"
    return (request.input_tokens - 1) // request.block_tokens


def _scaled_sequences(trace: Trace) -> Iterator[EngineSequence]:
    block_tokens = _block_tokens(trace)
    for place, request in enumerate(trace.requests):
        full = _full_blocks(request)
        token_ids = [block for block in full for _ in range(BLOCK_SIZE)]
        rest = request.input_tokens - len(full) * block_tokens
        if rest:
            partial = (request.prefix_blocks or [])[len(full) :]
            token_ids += partial[:1] * min(BLOCK_SIZE - 1, -(-rest * BLOCK_SIZE // block_tokens))
        yield EngineSequence(
            request_id=str(place),
            prompt_token_ids=token_ids or [place],
            sampling=SamplingParams(
                max_tokens=max(1, request.output_tokens * BLOCK_SIZE // block_tokens), temperature=0.0
            ),
            cache_salt=_SALT,
            arrival_s=request.t,
        )
