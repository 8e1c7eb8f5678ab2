"""``x-ratelimit-*`` headers, as OpenAI writes them."""

import math

from app.admission import Remaining


def rate_limit_headers(remaining: Remaining) -> dict[str, str]:
    """Limit, what is left of it and when it is whole again, of the tightest limit of requests and of tokens."""
    headers: dict[str, str] = {}
    for kind, limit, left, reset_s in (
        ("requests", remaining.requests_limit, remaining.requests, remaining.requests_reset_s),
        ("tokens", remaining.tokens_limit, remaining.tokens, remaining.tokens_reset_s),
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(left)
            headers[f"x-ratelimit-reset-{kind}"] = duration(reset_s)
    return headers


def duration(seconds: float) -> str:
    """A time span in OpenAI's notation: ``17ms``, ``1.2s``, ``6m0s``, ``23h59m12s``."""
    if seconds < 1:
        return f"{max(0, math.ceil(seconds * 1000))}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    whole = math.ceil(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{f'{hours}h' if hours else ''}{minutes}m{whole % 60}s"
