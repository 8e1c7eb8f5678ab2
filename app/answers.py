"""What clients get: OpenAI's response shapes with the ``firsttoken`` extension, and the headers that go with them."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from app.compaction import Compaction
from app.generation import GeneratedChoice, Generation, IdentifiedCall
from app.receipts import saved_tokens
from app.waterfall import WaterfallReport
from engine.token_logprobs import PositionLogprobs
from reducer.result import BudgetReport, PassageDecision, StageReport, TurnDecision


class CompactAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/compact``."""

    receipt_id: str
    messages: list[dict[str, Any]]
    prompt_tokens: int
    original_prompt_tokens: int
    budget: BudgetReport
    documents: list[PassageDecision]
    denied_documents: int
    turns: list[TurnDecision]
    stages: list[StageReport]
    token_count: str | msgspec.UnsetType = msgspec.UNSET
    """In which way the counts are never too low, where they are not exact."""


class TimingsMs(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one request went, in ms, as the gateway saw it."""

    reduce: float
    """Reading, reducing and counting."""
    queue: float
    """Waiting in the engine."""
    prefill: float
    """Computing the prompt in the engine."""
    first_token: float
    """From the request's arrival to the first text."""
    total: float
    """From the request's arrival to the last token."""


class Extension(msgspec.Struct, frozen=True, kw_only=True):
    """What firsttoken did to a chat completion; clients ignore it."""

    receipt_id: str
    original_prompt_tokens: int
    prompt_tokens: int
    saved_tokens: int
    stages: list[StageReport]
    turns_summarised: int
    denied_documents: int
    timings_ms: TimingsMs
    max_tokens: int
    """Output tokens that were allowed: what was asked for, clamped to the room in the window."""
    ignored_fields: list[str]
    """Fields of the request that the engine does not honour; of very many only some, and how many more."""
    token_count: str | msgspec.UnsetType = msgspec.UNSET
    """In which way ``prompt_tokens`` is never too low, where it was not counted exactly."""
    degraded: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Why, by stage, a cheaper method was used or the stage left out; only where there is one."""
    waterfall: WaterfallReport | msgspec.UnsetType = msgspec.UNSET
    """Stages of the time to the first token, where they were asked for and there was one."""


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Subset of the prompt tokens that came from the prefix cache."""

    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of output tokens."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as the engine counted them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function that a call names."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


class AnsweredCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class StreamedCall(AnsweredCall, frozen=True, kw_only=True):
    """One call in a chunk of a stream."""

    index: int


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    role: str = "assistant"
    content: str | None
    """Null where the answer is nothing but calls."""
    refusal: None = None
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]
    """Of UTF-8; a token may be part of a character, and several together one."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One token of the answer, and the most likely ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of the tokens of an answer, or of a part of it."""

    content: list[TokenLogprobs]
    refusal: None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a chat completion."""

    index: int = 0
    message: AssistantMessage
    finish_reason: str
    logprobs: ChoiceLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/chat/completions`` without ``stream``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    firsttoken: Extension
    system_fingerprint: str | None = None


def compact_answer(compaction: Compaction) -> CompactAnswer:
    """The whole result of a compaction."""
    result = compaction.result
    return CompactAnswer(
        receipt_id=compaction.receipt_id,
        messages=result.messages,
        prompt_tokens=result.prompt_tokens,
        original_prompt_tokens=result.original_prompt_tokens,
        budget=result.budget,
        documents=result.documents,
        denied_documents=result.denied_documents,
        turns=result.turns,
        stages=result.stages,
        token_count=_told_counting(compaction),
    )


def _told_counting(compaction: Compaction) -> str | msgspec.UnsetType:
    return msgspec.UNSET if compaction.counting == "exact" else compaction.counting


def usage_of(generation: Generation) -> Usage:
    """Tokens of a generation so far."""
    prompt_tokens, completion_tokens = generation.num_prompt_tokens, generation.num_output_tokens
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=generation.num_cached_tokens),
    )


def degraded_stages(compaction: Compaction) -> dict[str, str]:
    """Stages that used a cheaper method or were left out, and why."""
    return {stage.stage: stage.degraded for stage in compaction.result.stages if stage.degraded is not None}


def extension_of(generation: Generation) -> Extension:
    """The extension of a finished generation."""
    compaction = generation.compaction
    result, timings = compaction.result, generation.timings
    return Extension(
        receipt_id=compaction.receipt_id,
        original_prompt_tokens=result.original_prompt_tokens,
        prompt_tokens=result.prompt_tokens,
        saved_tokens=saved_tokens(result),
        stages=result.stages,
        turns_summarised=sum(turn.action == "summarised" for turn in result.turns),
        denied_documents=result.denied_documents,
        timings_ms=TimingsMs(
            reduce=round(compaction.reduce_s * 1000, 3),
            queue=round(timings.queue_ms, 3) if timings else 0.0,
            prefill=round(timings.prefill_ms, 3) if timings else 0.0,
            first_token=round((generation.first_text_s or generation.elapsed_s) * 1000, 3),
            total=round(generation.elapsed_s * 1000, 3),
        ),
        max_tokens=generation.max_tokens,
        ignored_fields=list(compaction.request.ignored),
        token_count=_told_counting(compaction),
        degraded=degraded_stages(compaction) or msgspec.UNSET,
        waterfall=generation.told_waterfall or msgspec.UNSET,
    )


def logprobs_of(positions: Sequence[PositionLogprobs] | None) -> ChoiceLogprobs | None:
    """Log probabilities in OpenAI's shape; ``None`` where nobody asked for them."""
    if positions is None:
        return None
    return ChoiceLogprobs(
        content=[
            TokenLogprobs(
                token=position.chosen.text.decode("utf-8", "replace"),
                logprob=position.chosen.logprob,
                bytes=list(position.chosen.text),
                top_logprobs=[
                    TopLogprob(
                        token=token.text.decode("utf-8", "replace"), logprob=token.logprob, bytes=list(token.text)
                    )
                    for token in position.top
                ],
            )
            for position in positions
        ]
    )


def chat_completion(generation: Generation, model: str) -> ChatCompletion:
    """The answer to a request without ``stream``, once ``generation.read_to_end`` has returned."""
    return ChatCompletion(
        id=generation.completion_id,
        created=generation.created,
        model=model,
        choices=[_choice(choice) for choice in generation.choices],
        usage=usage_of(generation),
        firsttoken=extension_of(generation),
    )


def _choice(choice: GeneratedChoice) -> Choice:
    reason = choice.told_finish_reason
    assert reason is not None, "a completion is written when its generation has ended"
    calls = [
        AnsweredCall(id=found.id, function=CalledFunction(name=found.call.name, arguments=found.call.arguments))
        for found in choice.tool_calls
    ]
    text = "".join(choice.texts)
    return Choice(
        index=choice.index,
        message=AssistantMessage(content=text if text or not calls else None, tool_calls=calls or msgspec.UNSET),
        finish_reason=reason,
        logprobs=logprobs_of(choice.logprobs),
    )


def streamed_call(found: IdentifiedCall) -> StreamedCall:
    """A call as a chunk tells it: all of it at once."""
    function = CalledFunction(name=found.call.name, arguments=found.call.arguments)
    return StreamedCall(id=found.id, function=function, index=found.place)


def reduction_headers(compaction: Compaction) -> dict[str, str]:
    """``x-firsttoken-*`` headers: receipt, tokens before, after and saved, and stages that failed, if any."""
    result = compaction.result
    failed = ", ".join(stage.stage for stage in result.stages if stage.failure)
    return {
        **({"x-firsttoken-failed-stages": failed} if failed else {}),
        "x-firsttoken-receipt": compaction.receipt_id,
        "x-firsttoken-tokens-before": str(result.original_prompt_tokens),
        "x-firsttoken-tokens-after": str(result.prompt_tokens),
        "x-firsttoken-tokens-saved": str(saved_tokens(result)),
    }
