"""Counts what the engine did, and splits the time of a request into parts that add up.

Definitions, by the engine's clock::

    arrival ---- queue ----> first scheduled ---- prefill ----> first token ---- decode ----> end

    queue_ms    waiting before any of its tokens is in a step
    prefill_ms  until its first output token is sampled: its own chunks, and all that ran between them
    decode_ms   until its last output token; 0 for an output of one token

The end is the last token, or the moment of an abort or failure; a part that was not reached is 0. The time to first
token as the engine sees it is queue_ms + prefill_ms.
"""

from dataclasses import dataclass

from engine.outputs import EngineStats, RequestTimings
from engine.scheduler import Scheduler
from engine.sequence import Sequence


def request_timings(sequence: Sequence) -> RequestTimings:
    """Timings of a sequence that has its first token or has ended."""
    end_s = sequence.finished_s if sequence.finished_s is not None else sequence.last_token_s
    assert end_s is not None, f"{sequence.request_id} has neither a token nor an end"
    scheduled_s = sequence.first_scheduled_s if sequence.first_scheduled_s is not None else end_s
    first_token_s = sequence.first_token_s if sequence.first_token_s is not None else end_s
    return RequestTimings(
        queue_ms=(scheduled_s - sequence.arrival_s) * 1e3,
        prefill_ms=(first_token_s - scheduled_s) * 1e3,
        decode_ms=(end_s - first_token_s) * 1e3,
        num_chunks=sequence.num_chunks,
        num_preemptions=sequence.num_preemptions,
    )


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started."""

    num_steps: int = 0
    """Executed or failed."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0

    def add_token(self, sequence: Sequence) -> None:
        """Count the token that a sequence has just got; with the first one, its prompt."""
        self.generation_tokens += 1
        if sequence.num_output_tokens == 1:
            self.prompt_tokens += sequence.num_prompt_tokens
            self.cached_prompt_tokens += sequence.num_cached_tokens

    def snapshot(self, scheduler: Scheduler) -> EngineStats:
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
        )
