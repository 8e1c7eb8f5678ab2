"""The four length buckets of a report: the lengths of prompts that engines are sized by."""

LENGTH_BUCKETS = ("short", "medium", "long", "very long")
_LIMITS = (512, 2048, 8192)


def length_bucket(num_tokens: int) -> str:
    """
    >>> [length_bucket(tokens) for tokens in (511, 512, 2048, 8192)]
    ['short', 'medium', 'long', 'very long']
    """
    return LENGTH_BUCKETS[sum(num_tokens >= limit for limit in _LIMITS)]
