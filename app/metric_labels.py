"""Label values of metrics from a closed list: what a client or an upstream makes up counts as ``other``."""

CODES = frozenset(
    (
        *("already_exists", "context_length_exceeded", "insufficient_quota", "invalid_api_key"),
        *("invalid_json", "invalid_type", "invalid_value", "method_not_allowed", "model_not_found", "no_originals"),
        *("rate_limit_exceeded", "read_only", "recall_floor", "receipt_not_found", "request_too_large"),
        *("storage_disabled", "unknown_url", "unsupported_value", "upstream_authentication", "upstream_not_found"),
    )
)
FINISH_REASONS = frozenset(
    ("stop", "length", "tool_calls", "content_filter", "function_call", "abort", "error", "unknown")
)
OTHER = "other"


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
