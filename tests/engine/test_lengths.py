"""Where one length bucket ends and the next begins."""

import pytest

from engine.lengths import LENGTH_BUCKETS, length_bucket


@pytest.mark.parametrize(
    ("num_tokens", "bucket"),
    [
        (1, "short"),
        (511, "short"),
        (512, "medium"),
        (2047, "medium"),
        (2048, "long"),
        (8191, "long"),
        (8192, "very_long"),
    ],
)
def test_bucket_of_a_length(num_tokens: int, bucket: str) -> None:
    assert length_bucket(num_tokens) == bucket
    assert bucket in LENGTH_BUCKETS
