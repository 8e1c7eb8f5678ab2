"""What a sequence knows about its own progress."""

import pytest
from factories_engine import make_request, make_sequence

from engine.sequence import Sequence, SequenceStatus


def test_new_sequence_waits_with_its_prompt_uncomputed() -> None:
    sequence = make_sequence([5, 6, 7])
    assert sequence.status is SequenceStatus.WAITING
    assert sequence.token_ids == [5, 6, 7]
    assert (sequence.num_tokens, sequence.num_prompt_tokens, sequence.num_output_tokens) == (3, 3, 0)
    assert sequence.num_uncomputed_tokens == 3


def test_from_request_takes_prompt_sampling_and_salt() -> None:
    request = make_request([1, 2], request_id="q", max_tokens=3, cache_salt="acme")
    sequence = Sequence.from_request(request, arrival_s=7.0)
    assert (sequence.request_id, sequence.prompt_token_ids, sequence.cache_salt) == ("q", [1, 2], "acme")
    assert sequence.sampling is request.sampling
    assert sequence.arrival_s == 7.0


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_token_ids must not be empty"):
        make_sequence([])


def test_append_token_leaves_the_prompt_alone_and_notes_the_times() -> None:
    sequence = make_sequence([5, 6])
    sequence.append_token(9, now=1.0)
    sequence.append_token(8, now=3.0)
    assert sequence.token_ids == [5, 6, 9, 8]
    assert sequence.prompt_token_ids == [5, 6]
    assert sequence.output_token_ids == [9, 8]
    assert (sequence.first_token_s, sequence.last_token_s) == (1.0, 3.0)


def test_a_prompt_of_one_token_is_not_decoding() -> None:
    sequence = make_sequence([5])
    assert not sequence.is_decoding
    sequence.num_computed_tokens = 1
    sequence.append_token(6, now=0.0)
    assert sequence.is_decoding


def test_integrity_check_finds_a_sequence_without_a_token_to_compute() -> None:
    sequence = make_sequence(4)
    sequence.check_integrity()
    sequence.num_computed_tokens = 4
    with pytest.raises(AssertionError, match="4 of 4 tokens computed"):
        sequence.check_integrity()
