"""What grammar, min_tokens, bias and penalties do to logits: formulas, rows that do not mix, state that catches up."""

from collections.abc import Sequence

import pytest
import torch
from factories_sampling import make_sampled
from factories_tokenizer import write_byte_level_folder

from engine.grammar import ANY_OBJECT, GrammarCompiler
from engine.logits_processors import LogitsProcessors, TokenCounts
from engine.sampling_params import SamplingParams
from engine.scheduler_output import ScheduledSequence
from engine.tokenizer import Tokenizer

VOCAB_SIZE = 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_path(write_byte_level_folder(tmp_path_factory.mktemp("tokenizer") / "t"))


def logits_of(num_rows: int = 1, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Some positive, some negative, none 0."""
    return torch.linspace(-2.05, 2.0, vocab_size).repeat(num_rows, 1)


def applied(
    sequences: Sequence[ScheduledSequence], processors: LogitsProcessors | None = None, vocab_size: int = VOCAB_SIZE
) -> torch.Tensor:
    logits = logits_of(len(sequences), vocab_size)
    assert (processors or LogitsProcessors(eos_token_ids=[0])).apply(logits, sequences) == {}
    return logits


def test_sequence_that_asks_for_nothing_is_left_alone() -> None:
    processors = LogitsProcessors(eos_token_ids=[0])
    assert torch.equal(applied([make_sampled(SamplingParams(seed=1, top_p=0.5))], processors), logits_of())
    assert processors.num_tracked == 0


def test_presence_penalty_is_subtracted_once_from_tokens_of_the_output() -> None:
    logits = applied([make_sampled(SamplingParams(presence_penalty=0.7), prompt=[1, 4], output=[5, 5, 6])])
    expected = logits_of()
    expected[0, [5, 6]] -= 0.7
    torch.testing.assert_close(logits, expected)


def test_frequency_penalty_is_subtracted_as_often_as_the_output_holds_the_token() -> None:
    logits = applied([make_sampled(SamplingParams(frequency_penalty=-0.3), prompt=[1, 4], output=[5, 5, 6])])
    expected = logits_of()
    expected[0, 5] += 0.6
    expected[0, 6] += 0.3
    torch.testing.assert_close(logits, expected)


def test_repetition_penalty_reaches_prompt_and_output_and_knows_signs() -> None:
    logits = applied([make_sampled(SamplingParams(repetition_penalty=2.0), prompt=[1, 15, 15], output=[3])])
    expected = logits_of()
    expected[0, [1, 3]] *= 2  # negative
    expected[0, 15] /= 2
    torch.testing.assert_close(logits, expected)


def test_bias_is_added_and_one_beyond_the_vocabulary_does_nothing() -> None:
    logits = applied([make_sampled(SamplingParams(logit_bias={3: 5.0, 4: -100.0, VOCAB_SIZE: 1.0}))])
    expected = logits_of()
    expected[0, 3] += 5
    expected[0, 4] -= 100
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize(("num_output", "is_hidden"), [(0, True), (2, True), (3, False)])
def test_ends_are_hidden_until_min_tokens(num_output: int, is_hidden: bool) -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(7, 99))
    logits = applied([make_sampled(params, output=[5] * num_output)])
    assert torch.isinf(logits[0, [0, 7]]).all() == is_hidden
    assert torch.isinf(logits).sum() == (2 if is_hidden else 0)


def test_rows_of_different_kinds_do_not_mix() -> None:
    sequences = [
        make_sampled(SamplingParams(presence_penalty=1.0), request_id="a", output=[5]),
        make_sampled(SamplingParams(), request_id="b", output=[5]),
        make_sampled(SamplingParams(logit_bias={5: 1.0}), request_id="c"),
        make_sampled(SamplingParams(repetition_penalty=3.0, frequency_penalty=1.0), request_id="d", output=[5, 5, 19]),
        make_sampled(SamplingParams(min_tokens=2), request_id="e"),
    ]
    together = applied(sequences)
    for row, sequence in enumerate(sequences):
        assert torch.equal(together[row], applied([sequence])[0]), sequence.request_id


def test_state_catches_up_with_what_became_known_and_ends_with_the_sequence() -> None:
    processors = LogitsProcessors()
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5)
    output = [5, 6, 5, 9, 5]
    for length in (1, 2, 5):  # several steps may pass between two looks, as behind a preemption
        sequence = make_sampled(params, output=output[:length])
        assert torch.equal(applied([sequence], processors), applied([sequence]))
    assert processors.num_tracked == 1
    processors.forget(["a", "unknown"])
    assert processors.num_tracked == 0


def test_counts_of_many_tokens_are_those_of_a_plain_count() -> None:
    prompt = torch.randint(0, 500, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    output = torch.randint(0, 300, (400,), generator=torch.Generator().manual_seed(2)).tolist()
    counts = TokenCounts()
    for end in range(0, 401, 40):
        counts.update([*prompt, *output[:end]], 300, with_prompt=True)
    found = dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {token: output.count(token) for token in {*prompt, *output}}


def test_grammar_hides_all_that_cannot_follow(tokenizer: Tokenizer) -> None:
    processors = LogitsProcessors(grammars=GrammarCompiler(tokenizer))
    vocab_size = tokenizer.vocab_size + 9  # some logits stand for no token
    guided = make_sampled(SamplingParams(json_schema='{"type":"boolean"}'))
    free = make_sampled(SamplingParams(), request_id="free")
    logits = applied([free, guided], processors, vocab_size)
    assert torch.equal(logits[0], logits_of(1, vocab_size)[0])
    allowed = torch.isfinite(logits[1]).nonzero().flatten().tolist()
    assert {tokenizer.token_bytes(token) for token in allowed} >= {b"t", b"f"}
    assert all(b"true".startswith(text) or b"false".startswith(text) for text in map(tokenizer.token_bytes, allowed))


def test_grammar_follows_the_output_and_ends_it(tokenizer: Tokenizer) -> None:
    processors = LogitsProcessors(grammars=GrammarCompiler(tokenizer))
    params = SamplingParams(json_schema='{"enum":["yes"]}')
    output = tokenizer.encode('"yes"')
    for length in range(len(output)):
        logits = applied([make_sampled(params, output=output[:length])], processors, tokenizer.vocab_size)
        assert torch.isfinite(logits[0, output[length]])
    logits = applied([make_sampled(params, output=output)], processors, tokenizer.vocab_size)
    assert set(torch.isfinite(logits[0]).nonzero().flatten().tolist()) == set(tokenizer.eos_token_ids)


def test_grammar_that_is_left_fails_its_sequence_alone(tokenizer: Tokenizer) -> None:
    processors = LogitsProcessors(grammars=GrammarCompiler(tokenizer))
    bad = make_sampled(SamplingParams(json_schema=ANY_OBJECT), request_id="bad", output=tokenizer.encode("["))
    good = make_sampled(SamplingParams(json_schema=ANY_OBJECT), request_id="good")
    logits = logits_of(2, tokenizer.vocab_size)
    failed = processors.apply(logits, [bad, good])
    assert list(failed) == ["bad"]
    assert "cannot be followed" in failed["bad"]
    assert torch.isfinite(logits[0]).all()  # still something to sample from
    assert 0 < torch.isfinite(logits[1]).sum() < 20


def test_without_grammars_a_schema_fails_its_sequence() -> None:
    sequence = make_sampled(SamplingParams(json_schema=ANY_OBJECT))
    assert LogitsProcessors().apply(logits_of(), [sequence]) == {"a": "this engine has no grammars for JSON output"}
