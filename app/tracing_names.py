"""Names of span attributes by OpenTelemetry's GenAI conventions, in one table, because they still move."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SpanNames:
    """One version of the conventions; ``None`` is an attribute that it does not have."""

    provider: str = "gen_ai.provider.name"
    operation: str = "gen_ai.operation.name"
    request_model: str = "gen_ai.request.model"
    response_model: str = "gen_ai.response.model"
    response_id: str = "gen_ai.response.id"
    finish_reasons: str = "gen_ai.response.finish_reasons"
    time_to_first_chunk: str | None = "gen_ai.response.time_to_first_chunk"
    input_tokens: str = "gen_ai.usage.input_tokens"
    output_tokens: str = "gen_ai.usage.output_tokens"
    cached_tokens: str | None = "gen_ai.usage.cache_read.input_tokens"
    max_tokens: str = "gen_ai.request.max_tokens"
    temperature: str = "gen_ai.request.temperature"
    top_p: str = "gen_ai.request.top_p"
    top_k: str = "gen_ai.request.top_k"
    seed: str = "gen_ai.request.seed"
    frequency_penalty: str = "gen_ai.request.frequency_penalty"
    presence_penalty: str = "gen_ai.request.presence_penalty"
    stream: str | None = "gen_ai.request.stream"
    choice_count: str = "gen_ai.request.choice.count"
    output_type: str = "gen_ai.output.type"
    input_messages: str = "gen_ai.input.messages"
    output_messages: str = "gen_ai.output.messages"


LATEST = SpanNames()
TABLES = {
    "latest": LATEST,
    "1.36": replace(LATEST, provider="gen_ai.system", time_to_first_chunk=None, cached_tokens=None, stream=None),
}
OPT_IN = "gen_ai_latest_experimental"
"""In ``OTEL_SEMCONV_STABILITY_OPT_IN``: the latest names, whatever the configuration says."""
