"""Passes the moments of a request on to metrics, log and cost model."""

from typing import Protocol

import structlog

from app.auth import Principal
from app.compaction import Compaction
from app.generation import Generation
from app.input_budget import TtftObjective
from app.observability import GatewayMetrics
from app.receipts import ReceiptKeeper, saved_tokens, with_waterfall
from reducer.errors import StageFailedError


class UsageObserver(Protocol):
    """Writes down for each tenant what was saved."""

    def on_compaction(self, principal: Principal, original_tokens: int, saved_tokens: int) -> None:
        """A prompt has been reduced."""
        ...

    def on_cached(self, principal: Principal, cached_tokens: int) -> None:
        """Tokens of a prompt came from the prefix cache."""
        ...


class ServiceObserver:
    """Hears what the chat service does. The log gets numbers and ids, never text of a prompt or an answer."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        objective: TtftObjective,
        model_name: str,
        usage: UsageObserver | None = None,
        receipts: ReceiptKeeper | None = None,
    ) -> None:
        self._metrics = metrics
        self._objective = objective
        self._model_name = model_name
        self._usage = usage
        self._receipts = receipts
        self._log = structlog.get_logger("firsttoken.requests")

    def on_compaction(self, request_id: str, compaction: Compaction) -> None:
        """A prompt has been reduced."""
        result = compaction.result
        self._metrics.on_compaction(compaction)
        if self._usage is not None:
            self._usage.on_compaction(compaction.principal, result.original_prompt_tokens, saved_tokens(result))
        self._log.info(
            "compaction",
            request_id=request_id,
            tenant=compaction.principal.tenant_id,
            key=compaction.principal.key_name,
            policy=compaction.policy,
            receipt_id=compaction.receipt_id,
            original_prompt_tokens=result.original_prompt_tokens,
            prompt_tokens=result.prompt_tokens,
            saved_tokens=saved_tokens(result),
            budget=result.budget.max_input_tokens,
            budget_source=result.budget.source,
            documents=len(result.documents),
            denied_documents=result.denied_documents,
            reduce_ms=round(compaction.reduce_s * 1000, 1),
            degraded=[stage.stage for stage in result.stages if stage.degraded is not None],
        )

    def on_stage_failed(self, error: StageFailedError) -> None:
        """A request was refused because a stage failed."""
        self._metrics.stage_failures.labels(self._model_name, error.stage, "closed").inc()

    def on_first_output(self, generation: Generation) -> None:
        """The engine has computed a prompt."""
        if not generation.is_counted_at_end:
            self._compare_counts(generation)
        if generation.timings is not None:
            self._objective.observe(
                num_prompt_tokens=generation.num_prompt_tokens,
                num_cached_tokens=generation.num_cached_tokens,
                reduce_s=generation.compaction.reduce_s,
                timings=generation.timings,
            )

    def on_first_text(self, generation: Generation) -> None:
        """An answer begins."""
        self._metrics.on_first_text(generation)
        if self._receipts is not None and (report := generation.told_waterfall) is not None:
            compaction = generation.compaction
            document = with_waterfall(compaction.receipt, report)
            self._receipts.put(compaction.receipt_id, compaction.principal, document)

    def on_gap(self, gap_s: float) -> None:
        """A further part of an answer has come."""
        self._metrics.itl.observe(gap_s)

    def on_end(self, generation: Generation) -> None:
        """A generation is over."""
        if generation.is_counted_at_end:
            self._compare_counts(generation)
        self._metrics.on_end(generation)
        trace = generation.timeline.trace
        if trace is not None:
            trace.on_end(generation)
        if self._usage is not None:
            self._usage.on_cached(generation.compaction.principal, generation.num_cached_tokens)
        timings = generation.timings
        first_text_s = generation.first_text_s
        self._log.info(
            "completion",
            request_id=generation.request_id,
            completion_id=generation.completion_id,
            receipt_id=generation.compaction.receipt_id,
            tenant=generation.compaction.principal.tenant_id,
            key=generation.compaction.principal.key_name,
            outcome=generation.outcome,
            prompt_tokens=generation.num_prompt_tokens,
            cached_tokens=generation.num_cached_tokens,
            completion_tokens=generation.num_output_tokens,
            queue_ms=round(timings.queue_ms, 1) if timings else None,
            prefill_ms=round(timings.prefill_ms, 1) if timings else None,
            ttft_ms=round(first_text_s * 1000, 1) if first_text_s is not None else None,
            total_ms=round(generation.elapsed_s * 1000, 1),
            **({} if trace is None else {"trace_id": trace.trace_id}),
        )

    def _compare_counts(self, generation: Generation) -> None:
        """Notes a prompt that the backend counts otherwise; where counts are never too low, one
        that it counts higher."""
        compaction = generation.compaction
        counted, engine_tokens = compaction.result.prompt_tokens, generation.num_prompt_tokens
        is_right = counted == engine_tokens if compaction.counting == "exact" else counted >= engine_tokens
        if not is_right:
            self._metrics.count_mismatch.labels(self._model_name).inc()
            self._log.error(
                "prompt_count_mismatch",
                request_id=generation.request_id,
                gateway_tokens=counted,
                engine_tokens=engine_tokens,
            )
