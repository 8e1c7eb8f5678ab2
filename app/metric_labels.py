"""Words for metrics and logs from a closed list: what a client or an upstream makes up is ``other``."""

import re

CODES = frozenset(
    (
        *("already_exists", "context_length_exceeded", "insufficient_quota", "invalid_api_key"),
        *("invalid_json", "invalid_type", "invalid_value", "method_not_allowed", "model_not_found", "no_originals"),
        *("rate_limit_exceeded", "read_only", "recall_floor", "receipt_not_found", "request_too_large"),
        *(
            "stage_failed",
            "storage_disabled",
            "unknown_url",
            "unsupported_value",
            "upstream_authentication",
            "upstream_not_found",
        ),
    )
)
FINISH_REASONS = frozenset(
    ("stop", "length", "tool_calls", "content_filter", "function_call", "abort", "error", "unknown")
)
PARAMS = frozenset(
    (
        *("chat_template_kwargs", "documents", "firsttoken", "frequency_penalty", "functions", "ignore_eos", "input"),
        *("instructions", "logit_bias", "logprobs", "max_completion_tokens", "max_output_tokens", "max_tokens"),
        *("messages", "metadata", "min_p", "min_tokens", "model", "n", "presence_penalty", "prompt", "receipt_id"),
        *("reasoning_effort", "repetition_penalty", "response_format", "seed", "stop", "stop_sequences"),
        *("stop_token_ids", "stream", "stream_options", "system", "temperature", "text", "thinking", "tokens"),
        *("tool_choice", "tools", "top_k", "top_logprobs", "top_p"),
    )
)
OTHER = "other"
_FIRST = re.compile(r"[a-z_]+")


def code_label(code: str | None) -> str:
    """Of an error's ``code``; ``none`` where it has none."""
    if code is None:
        return "none"
    return code if code in CODES else OTHER


def status_label(status: int) -> str:
    """Of an HTTP status."""
    return str(status) if 100 <= status <= 599 else OTHER


def finish_label(reason: str | None) -> str:
    """Of how an answer ended."""
    if reason is None:
        return "unknown"
    return reason if reason in FINISH_REASONS else OTHER


def param_label(param: str | None) -> str | None:
    """The request's field that an error names, without what lies below it."""
    if param is None:
        return None
    found = _FIRST.match(param)
    return found[0] if found is not None and found[0] in PARAMS else OTHER
