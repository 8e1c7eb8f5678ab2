"""Adds up what the engines of a disaggregated client tell about themselves."""

from collections import Counter
from collections.abc import Sequence

from engine.outputs import EngineStats, KVTransferStats, LatencyHistogram, RequestTimings, TokenHistogram


def sum_stats(
    prefill: Sequence[EngineStats], decode: Sequence[EngineStats], *, prompt_tokens: int, cached_prompt_tokens: int
) -> EngineStats:
    """All engines as one; the speed and the times by length are those of the first prefill engine.

    Args:
        prefill, decode: of each engine, at least one prefill engine.
        prompt_tokens: of all prompts, each counted once.
        cached_prompt_tokens: those that nobody had to compute.
    """
    every = [*prefill, *decode]
    refused: Counter[str] = Counter()
    for stats in every:
        refused.update(stats.num_refused)
    return EngineStats(
        num_running=sum(stats.num_running for stats in every),
        num_waiting=sum(stats.num_waiting for stats in every),
        kv_cache_usage=max(stats.kv_cache_usage for stats in every),
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=cached_prompt_tokens,
        generation_tokens=sum(stats.generation_tokens for stats in decode),
        num_preemptions=sum(stats.num_preemptions for stats in every),
        num_steps=sum(stats.num_steps for stats in every),
        num_waiting_tokens=sum(stats.num_waiting_tokens for stats in every),
        num_waits_for_prefix=sum(stats.num_waits_for_prefix for stats in every),
        num_second_tier_blocks=sum(stats.num_second_tier_blocks for stats in every),
        num_refused=dict(refused),
        num_retried_steps=sum(stats.num_retried_steps for stats in every),
        cost_coefficients=prefill[0].cost_coefficients,
        by_length=prefill[0].by_length,
        step_tokens=sum_steps([stats.step_tokens for stats in every]),
        kv_transfer=_sum_transfers([stats.kv_transfer for stats in prefill], decode),
    )


def sum_steps(every: Sequence[TokenHistogram | None]) -> TokenHistogram | None:
    """Steps of all engines that have reported."""
    known = [steps for steps in every if steps is not None]
    if not known:
        return None
    counts = tuple(sum(bins) for bins in zip(*(steps.counts for steps in known), strict=True))
    return TokenHistogram(upper=known[0].upper, counts=counts, sum=sum(steps.sum for steps in known))


def _sum_transfers(producers: Sequence[KVTransferStats | None], decode: Sequence[EngineStats]) -> KVTransferStats:
    """Offers and leases of the prefill engines, transfers and their bytes of the decode engines."""
    offers = [stats for stats in producers if stats is not None]
    fetches = [stats.kv_transfer for stats in decode if stats.kv_transfer is not None]
    failed: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for stats in fetches:
        failed.update(stats.num_failed)
    for stats in offers:
        ended.update(stats.num_leases_ended)
    waits = [stats.wait for stats in fetches if stats.wait is not None]
    wait = None
    if waits:
        counts = tuple(sum(bins) for bins in zip(*(one.counts for one in waits), strict=True))
        wait = LatencyHistogram(upper_ms=waits[0].upper_ms, counts=counts, sum_ms=sum(one.sum_ms for one in waits))
    return KVTransferStats(
        num_started=sum(stats.num_started for stats in fetches),
        num_completed=sum(stats.num_completed for stats in fetches),
        num_failed=dict(failed),
        num_cancelled=sum(stats.num_cancelled for stats in fetches),
        num_under_way=sum(stats.num_under_way for stats in fetches),
        num_skipped=sum(stats.num_skipped for stats in fetches),
        num_bytes=sum(stats.num_bytes for stats in fetches),
        transferred_tokens=sum(stats.transferred_tokens for stats in fetches),
        recomputed_tokens=sum(stats.recomputed_tokens for stats in fetches),
        wait=wait,
        num_offers=sum(stats.num_offers for stats in offers),
        num_offers_refused=sum(stats.num_offers_refused for stats in offers),
        num_leases=sum(stats.num_leases for stats in offers),
        num_leased_blocks=sum(stats.num_leased_blocks for stats in offers),
        num_leases_ended=dict(ended),
    )


def sum_timings(prefill: RequestTimings, decode: RequestTimings, num_cached_tokens: int) -> RequestTimings:
    """The times of a prompt that one engine computed and another one answered; each token counts once."""
    prefill_ms = prefill.prefill_ms + decode.prefill_ms
    has_rate = decode.effective_tokens_per_s > 0 and prefill_ms > 0
    return RequestTimings(
        transfer_ms=decode.transfer_ms,
        queue_ms=prefill.queue_ms + decode.queue_ms,
        prefill_ms=prefill_ms,
        decode_ms=decode.decode_ms,
        num_chunks=prefill.num_chunks + decode.num_chunks,
        num_preemptions=prefill.num_preemptions + decode.num_preemptions,
        input_tokens=decode.input_tokens,
        cached_tokens=num_cached_tokens,
        effective_tokens_per_s=decode.input_tokens * 1e3 / prefill_ms if has_rate else 0.0,
    )
