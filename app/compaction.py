"""Compaction: a checked request becomes the prompt that is sent, within the budget that holds for it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.auth import Principal
from app.backends.base import PromptEncoder
from app.completion_request import CompletionRequest
from app.errors import ContextLengthError, InvalidRequestError
from app.input_budget import BudgetLimits, InputBudget
from app.policies import Policy
from app.receipts import ReplayInputs, encode_receipt
from app.settings import PolicySettings
from app.snapshot import Snapshot
from app.waterfall import STAGES, Stage
from reducer.config import ReducerConfig
from reducer.embedded_passages import recognise_passages
from reducer.encoder import Encoder
from reducer.errors import BudgetExceededError, InvalidPromptError
from reducer.failures import step
from reducer.history import read_conversation
from reducer.ordering import OrderMemory
from reducer.pipeline import Reducer
from reducer.prompt import Budget, PromptParts
from reducer.reranker import Reranker
from reducer.result import ReductionResult
from reducer.summary import Summarizer, SummaryCache

_STAGES: dict[str, Stage] = {stage: stage for stage in STAGES}


@dataclass(frozen=True, slots=True)
class Compaction:
    """One request after its reduction."""

    request: CompletionRequest
    principal: Principal
    policy: str
    result: ReductionResult
    receipt_id: str
    receipt: bytes
    """The record as JSON."""
    reduce_s: float
    counting: str = "exact"
    """How the tokens of the prompt were counted."""
    parts: tuple[tuple[Stage, float], ...] = ()
    """Where the time went up to the receipt, in seconds, in order."""


class RequestCounter:
    """Counts with the served model's tokenizer and the template variables of one request.

    What the template refuses is the caller's mistake, so it is told as one.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        template_kwargs: Mapping[str, Any],
        unsent_tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """``unsent_tools`` count like tools, but are none: what else of the request the model reads."""
        self._encoder = encoder
        self._template_kwargs = template_kwargs
        self._unsent_tools = unsent_tools

    def count_text(self, text: str) -> int:
        """Tokens of a text on its own."""
        return self._encoder.count_text(text)

    def count_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Exact tokens of the rendered prompt. Raises ``InvalidRequestError`` for what the template refuses."""
        try:
            return self._encoder.count_prompt(messages, [*tools, *self._unsent_tools], **self._template_kwargs)
        except ValueError as error:
            raise template_refusal(error) from None

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of the rendered prompt. Raises as ``count_prompt``."""
        try:
            return self._encoder.encode_chat(messages, tools, **self._template_kwargs)
        except ValueError as error:
            raise template_refusal(error) from None


class TemplateRefusalError(InvalidRequestError, InvalidPromptError):
    """The template does not take the messages: for the reducer a mistake of the request, no failure of a stage."""


def template_refusal(error: ValueError) -> InvalidRequestError:
    """What the caller is told where the chat template does not take the messages."""
    text = f"The chat template refuses this prompt: {error}"
    return TemplateRefusalError(text, param="messages", code="invalid_value")


class Compactor:
    """Reduces requests. Its work is CPU-heavy and thread-safe; it runs in worker threads.

    It outlives the configuration: each request brings the snapshot it began with.
    """

    def __init__(
        self,
        prompt_encoder: PromptEncoder,
        max_model_len: int,
        encoder: Encoder | None,
        reranker: Reranker | None = None,
    ) -> None:
        self._prompt_encoder = prompt_encoder
        self._max_model_len = max_model_len
        self._encoder = encoder
        self._reranker = reranker
        self._order_memory = OrderMemory()
        self._summary_cache = SummaryCache()

    def warm_up(self) -> None:
        """Renders one prompt, so that no request pays for what tokenizer and template build on first use."""
        self._prompt_encoder.count_prompt([{"role": "user", "content": "warm-up"}])
        assert self._prompt_encoder.max_token_bytes > 0, "a token has at least one byte"

    def choose_policy(self, snapshot: Snapshot, request: CompletionRequest, principal: Principal) -> Policy:
        """The request's policy, else the tenant's.

        Raises ``InvalidRequestError`` for one that does not exist, naming those that do, and for one whose measured
        recall is under the tenant's floor.
        """
        tenant = principal.tenant
        name = tenant.policy if request.overrides.policy is None else request.overrides.policy
        policy = snapshot.policies.get(name)
        if policy is None:
            known = ", ".join(snapshot.policies.names)
            raise InvalidRequestError(
                f"Invalid 'firsttoken.policy': {name!r} is unknown; known policies: {known}.",
                param="firsttoken.policy",
                code="invalid_value",
            )
        if not policy.meets(tenant.recall_floor):
            measured = policy.settings.measured_recall
            raise InvalidRequestError(
                f"Invalid 'firsttoken.policy': the measured recall of {name!r} is "
                f"{'not known' if measured is None else measured}, the tenant's floor is {tenant.recall_floor}.",
                param="firsttoken.policy",
                code="recall_floor",
            )
        return policy

    def input_budget(
        self,
        snapshot: Snapshot,
        request: CompletionRequest,
        principal: Principal,
        policy: PolicySettings,
        slo_tokens: int | None,
    ) -> InputBudget:
        """The budget of a request; ``slo_tokens`` is what its TTFT objective affords, ``None`` for no objective."""
        limits, window = snapshot.settings.limits, self._max_model_len
        reserve = limits.output_reserve_tokens if request.max_tokens is None else request.max_tokens
        return BudgetLimits(
            request=request.overrides.max_input_tokens,
            tenant=principal.tenant.max_input_tokens,
            policy=policy.max_input_tokens,
            window=window,
            output_reserve=max(1, min(reserve, int(window * limits.max_output_reserve_ratio))),
            slo=slo_tokens,
        ).smallest()

    def compact(
        self,
        snapshot: Snapshot,
        request: CompletionRequest,
        principal: Principal,
        policy: Policy,
        budget: InputBudget,
        receipt_id: str,
        *,
        bypass: bool,
        summarizer: Summarizer | None = None,
    ) -> Compaction:
        """Reduces one request; ``summarizer`` is asked where the policy says so.

        Raises ``ContextLengthError`` where what must not be cut is over a limit.
        """
        started = time.perf_counter()
        self._refuse_by_size(request.parts, budget, policy.reducer)
        # Where the template is known, what it prints is known as well.
        unsent_tools = () if self._prompt_encoder.counting == "exact" else request.unsent_tools
        counter = RequestCounter(self._prompt_encoder, request.template_kwargs, unsent_tools)
        reducer = Reducer(
            policy.reducer,
            counter,
            self._encoder,
            reranker=self._reranker,
            summary_cache=self._summary_cache,
            order_memory=self._order_memory,
            summarizer=summarizer,
        )

        deadline_ms = request.overrides.reduce_deadline_ms

        def reduce(within: Budget) -> ReductionResult:
            return reducer.reduce(
                request.parts,
                budget=within,
                caller=principal.caller,
                bypass=bypass,
                cache_scope=principal.tenant_id,
                deadline_s=None if deadline_ms is None else deadline_ms / 1000,
            )

        try:
            reduce_started = time.perf_counter()
            try:
                result = reduce(budget.wanted)
            except BudgetExceededError as error:
                stretched = budget.stretched(error.num_tokens)
                if stretched is None:
                    raise
                reduce_started = time.perf_counter()
                result = reduce(stretched)
            parts = _parts(result, reduce_started - started, time.perf_counter() - reduce_started)
        except BudgetExceededError as error:
            raise self._too_long(error.num_tokens, budget) from None
        replay = ReplayInputs(
            policy_version=policy.version,
            groups=sorted(principal.groups),
            deny_unlabelled=principal.tenant.deny_unlabelled,
            bypass=bypass,
            template_kwargs=request.template_kwargs,
            tools=[dict(tool) for tool in request.parts.tools],
            unsent_tools=[dict(tool) for tool in unsent_tools],
        )
        receipt = encode_receipt(receipt_id, policy.name, request.parts, result, snapshot.settings.receipts, replay)
        return Compaction(
            request=request,
            principal=principal,
            policy=policy.name,
            result=result,
            receipt_id=receipt_id,
            receipt=receipt,
            reduce_s=time.perf_counter() - started,
            counting=self._prompt_encoder.counting,
            parts=parts,
        )

    def _refuse_by_size(self, parts: PromptParts, budget: InputBudget, config: ReducerConfig) -> None:
        """Refuses at once, before any tokenizing, what cannot fit by its bytes alone.

        Templates may strip white space around a message, so only what is inside counts. Passages inside can be cut.
        """
        protected = (parts.messages[index] for index in read_conversation(parts.messages).protected)
        num_bytes = sum(
            len(text.strip().encode("utf-8", "replace")) for message in protected for text in _texts(message)
        )
        num_tokens = num_bytes // self._prompt_encoder.max_token_bytes
        if num_tokens <= budget.hard.max_input_tokens:
            return
        recognise = partial(recognise_passages, parts, config.recognise)
        if step("recognise", [], config.failure, recognise, None) is None:
            raise self._too_long(num_tokens, budget, is_lower_bound=True)

    def _too_long(self, num_tokens: int, budget: InputBudget, *, is_lower_bound: bool = False) -> ContextLengthError:
        limit = None if budget.hard.source == "window" else budget.hard
        return ContextLengthError(self._max_model_len, num_tokens, limit, is_lower_bound=is_lower_bound)


def _parts(result: ReductionResult, before_s: float, reduce_s: float) -> tuple[tuple[Stage, float], ...]:
    """Stages of one in order. What was done before it counts to the first, what none of them took is ``pack``."""
    durations: dict[Stage, float] = {"access": before_s}
    for report in result.stages:
        if (stage := _STAGES.get(report.stage)) is not None:
            durations[stage] = durations.get(stage, 0.0) + report.ms / 1000
    durations["pack"] = max(0.0, before_s + reduce_s - sum(durations.values()))
    return tuple(durations.items())


def _texts(message: Mapping[str, Any]) -> Sequence[str]:
    content = message.get("content")
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        return ()
    return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
