"""The four length buckets in which prompts are counted, scheduled and reported: one average over them says nothing."""

from typing import Literal, get_args

LengthBucket = Literal["short", "medium", "long", "very_long"]
LENGTH_BUCKETS: tuple[LengthBucket, ...] = get_args(LengthBucket)

_LIMITS: tuple[tuple[int, LengthBucket], ...] = ((512, "short"), (2048, "medium"), (8192, "long"))


def length_bucket(num_tokens: int) -> LengthBucket:
    """``short`` below 512 tokens, ``medium`` below 2,048, ``long`` below 8,192, ``very_long`` from there on."""
    return next((name for limit, name in _LIMITS if num_tokens < limit), "very_long")
