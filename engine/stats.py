"""Counts what the engine did, and splits the time of a request into parts that add up.

Definitions, by the engine's clock::

    arrival -- transfer --> blocks are there -- queue --> first scheduled -- prefill --> first token -- decode --> end

    transfer_ms waiting for KV blocks of another engine; 0 where none were asked for
    queue_ms    waiting before any of its tokens is in a step, after that
    prefill_ms  until its first output token is sampled: its own chunks, all that ran between them, and what a
                preemption before it cost; also called compute_ms
    decode_ms   until its last output token; 0 for an output of one token

The end is the last token, or the moment of an abort or failure; a part that was not reached is 0. The four add up to
the request's time in the engine; the time to first token as the engine sees it is the sum of the first three.

    effective_tokens_per_s   input tokens / prefill_ms, cached ones included: how fast the prompt seemed to be read.
                             Without cached ones it is the prefill rate of the machine under its load.

Requests are counted by the length bucket of their prompt (``engine.lengths``) when they get their first token.
"""

import bisect
from dataclasses import dataclass, field

from engine.cost_model import CostCoefficients
from engine.lengths import LENGTH_BUCKETS, LengthBucket, length_bucket
from engine.outputs import EngineStats, KVTransferStats, LatencyHistogram, LengthStats, RequestTimings, TokenHistogram
from engine.scheduler import Scheduler
from engine.sequence import Sequence

UPPER_MS = (10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 1e4, 2.5e4, 6e4)
"""Upper bounds of the bins of all histograms."""


def request_timings(sequence: Sequence) -> RequestTimings:
    """Timings of a sequence that has its first token or has ended."""
    end_s = sequence.finished_s if sequence.finished_s is not None else sequence.last_token_s
    assert end_s is not None, f"{sequence.request_id} has neither a token nor an end"
    ready_s = sequence.arrival_s
    if sequence.transfer_ended_s is not None:
        ready_s = sequence.transfer_ended_s
    elif sequence.awaits_kv:  # it ended before that
        ready_s = end_s
    scheduled_s = sequence.first_scheduled_s if sequence.first_scheduled_s is not None else end_s
    first_token_s = sequence.first_token_s if sequence.first_token_s is not None else end_s
    prefill_s = first_token_s - scheduled_s
    has_rate = sequence.first_token_s is not None and prefill_s > 0
    return RequestTimings(
        transfer_ms=(ready_s - sequence.arrival_s) * 1e3,
        queue_ms=(scheduled_s - ready_s) * 1e3,
        prefill_ms=prefill_s * 1e3,
        decode_ms=(end_s - first_token_s) * 1e3,
        num_chunks=sequence.num_chunks,
        num_preemptions=sequence.num_preemptions,
        input_tokens=sequence.num_prompt_tokens,
        cached_tokens=sequence.num_cached_tokens,
        effective_tokens_per_s=sequence.num_prompt_tokens / prefill_s if has_rate else 0.0,
    )


@dataclass(slots=True)
class Histogram:
    """Counts durations, in ms, in the bins of ``UPPER_MS``."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(UPPER_MS) + 1))
    sum_ms: float = 0.0

    def add(self, duration_ms: float) -> None:
        """Count one."""
        self.counts[bisect.bisect_left(UPPER_MS, duration_ms)] += 1
        self.sum_ms += duration_ms

    def snapshot(self) -> LatencyHistogram:
        """The counts so far."""
        return LatencyHistogram(upper_ms=UPPER_MS, counts=tuple(self.counts), sum_ms=self.sum_ms)


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the bins of tokens in a step, vLLM's."""


@dataclass(slots=True)
class StepTokens:
    """Counts steps by their tokens, in the bins of ``STEP_TOKENS``."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    sum: int = 0

    def add(self, num_tokens: int) -> None:
        """Count one step."""
        self.counts[bisect.bisect_left(STEP_TOKENS, num_tokens)] += 1
        self.sum += num_tokens

    def snapshot(self) -> TokenHistogram:
        """The counts so far."""
        return TokenHistogram(upper=STEP_TOKENS, counts=tuple(self.counts), sum=self.sum)


@dataclass(slots=True)
class _LengthCounters:
    num_requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    queue: Histogram = field(default_factory=Histogram)
    compute: Histogram = field(default_factory=Histogram)

    def snapshot(self) -> LengthStats:
        return LengthStats(
            num_requests=self.num_requests,
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            queue=self.queue.snapshot(),
            compute=self.compute.snapshot(),
        )


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started."""

    num_steps: int = 0
    """Executed or failed."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    transferred_prompt_tokens: int = 0
    generation_tokens: int = 0
    num_retried_steps: int = 0
    """Failed as a whole and computed again in parts."""
    by_length: dict[LengthBucket, _LengthCounters] = field(
        default_factory=lambda: {name: _LengthCounters() for name in LENGTH_BUCKETS}
    )

    step_tokens: StepTokens = field(default_factory=StepTokens)

    def add_step(self, num_tokens: int) -> None:
        """Count a step that computed so many tokens."""
        self.num_steps += 1
        self.step_tokens.add(num_tokens)

    def add_token(self, sequence: Sequence) -> None:
        """Count the token that a sequence has just got; with the first one, its prompt."""
        self.generation_tokens += 1
        if sequence.num_output_tokens == 1:
            self.prompt_tokens += sequence.num_prompt_tokens
            self.cached_prompt_tokens += sequence.num_cached_tokens
            self.transferred_prompt_tokens += sequence.num_transferred_tokens
            timings = request_timings(sequence)
            counters = self.by_length[length_bucket(sequence.num_prompt_tokens)]
            counters.num_requests += 1
            counters.input_tokens += sequence.num_prompt_tokens
            counters.cached_tokens += sequence.num_cached_tokens
            counters.queue.add(timings.queue_ms)
            counters.compute.add(timings.compute_ms)

    def snapshot(
        self,
        scheduler: Scheduler,
        coefficients: CostCoefficients | None = None,
        kv_transfer: KVTransferStats | None = None,
    ) -> EngineStats:
        """State of the engine now."""
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.kv_cache_manager.usage,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            generation_tokens=self.generation_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self.num_steps,
            num_waiting_tokens=sum(sequence.num_tokens for sequence in scheduler.waiting),
            num_waits_for_prefix=scheduler.num_waits_for_prefix,
            num_second_tier_blocks=scheduler.kv_cache_manager.num_second_tier_blocks,
            num_refused={str(reason): count for reason, count in scheduler.admission.num_refused.items()},
            num_retried_steps=self.num_retried_steps,
            cost_coefficients=coefficients,
            by_length={name: counters.snapshot() for name, counters in self.by_length.items()},
            transferred_prompt_tokens=self.transferred_prompt_tokens,
            kv_transfer=kv_transfer,
            step_tokens=self.step_tokens.snapshot(),
        )
