"""The gateway's main path, without HTTP: admit, read, reduce, reserve, generate.

compact    admit -> read -> reduce                                -> Compaction
complete   admit -> read -> reduce -> reserve tokens -> generate  -> Generation, started
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.admission import AdmissionController, Lease
from app.auth import Principal
from app.backends.base import Backend, BackendRequest
from app.backends.upstream_body import RelayRequest
from app.choices import choice_outputs
from app.compaction import Compaction, Compactor, RequestCounter
from app.completion_request import CompletionRequest, read_completion, read_relayed
from app.drain import Drain
from app.errors import InvalidRequestError
from app.generation import Generation
from app.input_budget import TtftObjective, tightest_objective
from app.policies import Policy
from app.receipts import ReceiptKeeper, new_receipt_id
from app.relay import Relay, RelayBackend
from app.served_model import ServedModel
from app.service_observer import ServiceObserver
from app.snapshot import Snapshot
from app.summaries import BackendSummarizer
from app.waterfall import TimedJob, Timeline
from app.workers import WorkerPool
from engine.errors import OutputTooLongError
from reducer.errors import StageFailedError
from reducer.prompt import PromptParts

INLINE_BODY_BYTES = 16 * 1024
"""A smaller body is read on the event loop: handing it to a thread would cost more than reading it."""
INLINE_BYPASS_BYTES = 4 * 1024
"""Of a smaller body that is not reduced the tokens are counted on the event loop as well."""
LARGE_BODY_BYTES = 64 * 1024
"""A larger body is read and reduced in the thread for large jobs."""
LARGE_NUM_DOCUMENTS = 100
"""More documents are reduced there as well: each costs milliseconds, however short it is."""
LARGE_NUM_MESSAGES = 64
"""More messages too; each costs about as much as two documents."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One HTTP request as the service sees it."""

    request_id: str
    principal: Principal
    body: bytes
    arrived_s: float
    """On the ``time.perf_counter`` clock."""
    snapshot: Snapshot
    """The configuration that holds for this request, to its end."""
    bypass: bool = False
    """Asked for in a header; the body can ask for it as well."""
    timeline: Timeline | None = None
    """What has happened since."""


def is_large(num_bytes: int, parts: PromptParts) -> bool:
    """Whether a reduction takes so long that small ones must not wait behind it."""
    return (
        num_bytes > LARGE_BODY_BYTES
        or len(parts.passages) > LARGE_NUM_DOCUMENTS
        or len(parts.messages) > LARGE_NUM_MESSAGES
    )


class ChatService:
    """Compacts prompts and answers them."""

    def __init__(
        self,
        *,
        backend: Backend,
        compactor: Compactor,
        workers: WorkerPool,
        admission: AdmissionController,
        receipts: ReceiptKeeper,
        objective: TtftObjective,
        observer: ServiceObserver,
        drain: Drain,
        served_model: ServedModel,
        refuse_long_outputs: bool = False,
    ) -> None:
        """``refuse_long_outputs``: a ``max_tokens`` beyond the room that the prompt leaves is an error, not reduced."""
        self._backend = backend
        self._compactor = compactor
        self._workers = workers
        self._admission = admission
        self._receipts = receipts
        self._objective = objective
        self._observer = observer
        self._drain = drain
        self._served_model = served_model
        self._refuse_long_outputs = refuse_long_outputs

    async def compact(self, arrival: Arrival) -> Compaction:
        """Reduces a prompt and generates no answer. Charges a request, and tokens only where the model summarises."""
        timeline = Timeline(arrival.arrived_s) if arrival.timeline is None else arrival.timeline
        lease = await self._admission.admit(arrival.principal)
        try:
            request = await self._read(arrival.body, timeline)
            if request.body.model is not None:
                self._served_model.check(request.body.model)
            return await self._reduce(arrival, request, lease, timeline)
        finally:
            lease.settle()

    async def complete(self, arrival: Arrival) -> Generation:
        """Reduces a prompt and starts the answer; returns with the first output. The caller closes the generation."""
        timeline = Timeline(arrival.arrived_s) if arrival.timeline is None else arrival.timeline
        timeline.lap("parse")  # where the request came in another shape, it has been translated
        lease = await self._admission.admit(arrival.principal)
        timeline.lap("admission")
        try:
            request = await self._read(arrival.body, timeline)
            if request.body.model is None:
                raise InvalidRequestError(
                    "Invalid 'model': the required field is missing.", param="model", code="invalid_value"
                )
            self._served_model.check(request.body.model)
            compaction = await self._reduce(arrival, request, lease, timeline)
            max_tokens = self._max_output_tokens(arrival.snapshot, compaction)
            await lease.reserve(compaction.result.prompt_tokens, max_tokens * request.num_choices)
            timeline.lap("admission")
            generation = self._generate(arrival, compaction, max_tokens, lease, timeline)
            await generation.start()
        except BaseException:
            lease.settle()
            raise
        return generation

    def count_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Tokens of a prompt as it is. CPU-heavy. Raises ``InvalidRequestError`` for what the template refuses."""
        return RequestCounter(self._backend.encoder, {}).count_prompt(messages, tools)

    async def _read(self, body: bytes, timeline: Timeline) -> CompletionRequest:
        read = read_relayed if isinstance(self._backend, RelayBackend) else read_completion
        if len(body) <= INLINE_BODY_BYTES:
            request = read(body)
            timeline.lap("parse")
            return request
        run = self._workers.run_large if len(body) > LARGE_BODY_BYTES else self._workers.run
        job = TimedJob()
        request = await run(job, read, body)
        timeline.lap_job(job, "parse")
        return request

    async def _reduce(
        self, arrival: Arrival, request: CompletionRequest, lease: Lease, timeline: Timeline
    ) -> Compaction:
        principal, overrides = arrival.principal, request.overrides
        policy = self._compactor.choose_policy(arrival.snapshot, request, principal)
        objective_ms = tightest_objective(
            overrides.ttft_slo_ms, principal.tenant.ttft_slo_ms, policy.settings.ttft_slo_ms
        )
        budget = self._compactor.input_budget(
            arrival.snapshot, request, principal, policy.settings, self._objective.max_input_tokens(objective_ms)
        )
        receipt_id = new_receipt_id()
        summarizer = self._make_summarizer(principal, policy, request, receipt_id)
        # A thread that waits for the model must not be one that small requests need.
        is_slow = summarizer is not None or is_large(len(arrival.body), request.parts)
        bypass = arrival.bypass or bool(overrides.bypass)
        job = TimedJob()
        compact = partial(
            job,
            self._compactor.compact,
            arrival.snapshot,
            request,
            principal,
            policy,
            budget,
            receipt_id,
            bypass=bypass,
            summarizer=summarizer,
        )
        timeline.lap("other")
        try:
            if bypass and not is_slow and len(arrival.body) <= INLINE_BYPASS_BYTES:
                compaction = compact()
            else:
                compaction = await (self._workers.run_large if is_slow else self._workers.run)(compact)
        except StageFailedError as error:
            self._observer.on_stage_failed(error)
            raise
        finally:
            if summarizer is not None:
                summarizer.close()
                lease.charge(summarizer.num_tokens)
        timeline.lap_job(job, "receipt", compaction.parts)
        self._receipts.put(compaction.receipt_id, principal, compaction.receipt)
        self._observer.on_compaction(arrival.request_id, compaction)
        timeline.lap("other")
        return compaction

    def _make_summarizer(
        self, principal: Principal, policy: Policy, request: CompletionRequest, receipt_id: str
    ) -> BackendSummarizer | None:
        """Who summarises older turns, where the policy wants the model to and there are any."""
        history = policy.reducer.history
        if history.summarizer != "model" or len(request.parts.messages) <= history.num_recent_messages + 1:
            return None
        return BackendSummarizer(
            self._backend,
            asyncio.get_running_loop(),
            request_id=receipt_id.replace("rcpt_", "sum_"),
            cache_salt=principal.cache_salt,
            time_limit_s=history.summarizer_timeout_s,
        )

    def _max_output_tokens(self, snapshot: Snapshot, compaction: Compaction) -> int:
        """Output tokens that one choice may have: what was asked for, clamped to the room in the window."""
        request, result = compaction.request, compaction.result
        room = self._backend.info.max_model_len - result.prompt_tokens
        assert room >= 1, "the budget leaves room for an output token"
        if self._refuse_long_outputs and request.max_tokens is not None and request.max_tokens > room:
            raise OutputTooLongError(request.max_tokens, room)
        return min(request.max_tokens or snapshot.settings.limits.default_max_tokens or room, room)

    def _generate(
        self, arrival: Arrival, compaction: Compaction, max_tokens: int, lease: Lease, timeline: Timeline
    ) -> Generation:
        request, result = compaction.request, compaction.result
        if isinstance(self._backend, RelayBackend):
            return self._relay(arrival, compaction, lease, max_tokens, self._backend, timeline)
        info, tool_choice = self._backend.info, request.tool_choice
        request.check_vocabulary(info.vocab_size)
        visible_tokens = tool_choice.visible_tokens(info.tool_call_parser)
        request_id = compaction.receipt_id.replace("rcpt_", "gen_")
        outputs = [
            self._backend.generate(
                BackendRequest(
                    request_id=f"{request_id}_{choice}" if choice else request_id,
                    messages=result.messages,
                    tools=result.tools,
                    sampling=request.sampling(max_tokens, choice, visible_tokens=visible_tokens),
                    cache_salt=arrival.principal.cache_salt,
                    template_kwargs=request.template_kwargs,
                    timeline=timeline if choice == 0 else None,
                )
            )
            for choice in range(request.num_choices)
        ]
        return Generation(
            request_id=arrival.request_id,
            compaction=compaction,
            max_tokens=max_tokens,
            outputs=choice_outputs(outputs),
            num_choices=request.num_choices,
            make_tool_parser=partial(tool_choice.make_parser, info.tool_call_parser),
            max_tool_calls=tool_choice.max_calls,
            lease=lease,
            observer=self._observer,
            drain=self._drain,
            arrived_s=arrival.arrived_s,
            timeline=timeline,
        )

    def _relay(
        self,
        arrival: Arrival,
        compaction: Compaction,
        lease: Lease,
        max_tokens: int,
        backend: RelayBackend,
        timeline: Timeline,
    ) -> Relay:
        """The request on its way to an upstream; its own ``max_tokens`` stays unless it is over the room."""
        request, result = compaction.request, compaction.result
        is_own = max_tokens == request.max_tokens
        limits = arrival.snapshot.settings.limits
        is_unlimited = request.max_tokens is None and limits.default_max_tokens is None
        return Relay(
            request_id=arrival.request_id,
            compaction=compaction,
            max_tokens=max_tokens,
            backend=backend,
            request=RelayRequest(
                request_id=arrival.request_id,
                body=arrival.body,
                messages=result.messages,
                tools=result.tools,
                cache_salt=arrival.principal.cache_salt,
                streams=bool(request.body.stream),
                max_tokens=None if is_own or is_unlimited else max_tokens,
                timeline=timeline,
            ),
            count_text=self._backend.encoder.count_text,
            lease=lease,
            observer=self._observer,
            drain=self._drain,
            arrived_s=arrival.arrived_s,
            num_choices=request.num_choices,
            timeline=timeline,
        )
