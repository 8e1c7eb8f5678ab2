"""How tokens are chosen: filters, distribution, and what a seed promises."""

import math

import pytest
import torch

from engine.sampler import LogprobRows, Sampler, top_values
from engine.sampling_params import SamplingParams

VOCAB_SIZE = 1000


def _logits(num_rows: int = 1, *, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * spread


def _frequencies(logits: torch.Tensor, params: SamplingParams, num_draws: int = 4000) -> torch.Tensor:
    """Observed shares of the tokens of one row of logits."""
    sampler = Sampler()
    counts = torch.zeros(logits.shape[-1])
    batch = 500
    for _ in range(num_draws // batch):
        for token in sampler.sample(logits.expand(batch, -1), [params] * batch, [0] * batch):
            counts[token] += 1
    return counts / num_draws


def _assert_distribution(frequencies: torch.Tensor, expected: torch.Tensor, num_draws: int = 4000) -> None:
    """Within five standard deviations everywhere, and nothing where nothing may be."""
    deviation = (expected * (1 - expected) / num_draws).sqrt()
    assert ((frequencies - expected).abs() <= 5 * deviation + 1e-9).all()


def test_greedy_takes_the_largest_logit_of_each_row() -> None:
    logits = _logits(3)
    greedy = SamplingParams(temperature=0.0)
    assert Sampler().sample(logits, [greedy] * 3, [0, 1, 2]) == logits.argmax(dim=-1).tolist()


def test_tiny_temperature_is_greedy() -> None:
    logits = _logits(1)
    assert Sampler().sample(logits, [SamplingParams(temperature=1e-9)], [0]) == logits.argmax(dim=-1).tolist()


def test_plain_sampling_follows_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    frequencies = _frequencies(logits, SamplingParams(temperature=1.0))
    _assert_distribution(frequencies, logits[0].softmax(dim=-1))


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    frequencies = _frequencies(logits, SamplingParams(temperature=0.5))
    _assert_distribution(frequencies, (logits[0] * 2).softmax(dim=-1))


def test_top_k_leaves_the_k_most_likely_and_renormalises() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    frequencies = _frequencies(logits, SamplingParams(top_k=2))
    expected = torch.tensor([0.0, 1 / (1 + math.exp(-1)), 0.0, 1 - 1 / (1 + math.exp(-1))])
    _assert_distribution(frequencies, expected)


def test_top_k_of_one_is_greedy() -> None:
    logits = _logits(1)
    assert Sampler().sample(logits, [SamplingParams(top_k=1)], [0]) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("top_k", [-1, 0, 4, 400])
def test_top_k_of_the_whole_vocabulary_or_none_filters_nothing(top_k: int) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    frequencies = _frequencies(logits, SamplingParams(top_k=top_k))
    _assert_distribution(frequencies, logits[0].softmax(dim=-1))


def test_top_p_keeps_the_token_that_reaches_it_and_drops_the_next() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    frequencies = _frequencies(logits, SamplingParams(top_p=0.7))
    _assert_distribution(frequencies, torch.tensor([0.625, 0.375, 0.0, 0.0]))


def test_top_p_that_the_first_token_reaches_is_greedy() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    frequencies = _frequencies(logits, SamplingParams(top_p=0.49))
    assert frequencies.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # after top_k 2 the first has 4/7 = 0.571, which reaches 0.55 alone; before, it has 0.4 and would not
    frequencies = _frequencies(logits, SamplingParams(top_k=2, top_p=0.55))
    assert frequencies.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_top_p_looks_at_the_whole_vocabulary_when_it_is_flat() -> None:
    # 1,000 equal tokens: 256 candidates reach 0.256 of 0.9
    logits = torch.zeros(1, VOCAB_SIZE)
    frequencies = _frequencies(logits, SamplingParams(top_p=0.9), num_draws=20_000)
    assert 850 < int((frequencies > 0).sum()) <= 900


def test_min_p_keeps_tokens_that_are_likely_enough_beside_the_most_likely_one() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    frequencies = _frequencies(logits, SamplingParams(min_p=0.31))
    _assert_distribution(frequencies, torch.tensor([0.625, 0.375, 0.0, 0.0]))
    # after the temperature: the square roots are 0.71, 0.55, 0.39, 0.22
    hot = _frequencies(logits, SamplingParams(min_p=0.5, temperature=2.0))
    assert (hot > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(seed=1), SamplingParams(top_p=0.99)])
def test_hidden_tokens_are_never_chosen(params: SamplingParams) -> None:
    logits = torch.full((500, VOCAB_SIZE), float("-inf"))
    logits[:, [0, 17, 999]] = torch.tensor([-50.0, -50.0, -50.0])
    rows = [SamplingParams(top_p=params.top_p, seed=params.seed and row) for row in range(500)]
    assert set(Sampler().sample(logits, rows, [0] * 500)) == {0, 17, 999}


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 1000, 5000, 49_152])
@pytest.mark.parametrize("k", [0, 1, 20, 64, 1000])
def test_top_values_are_those_of_topk(vocab_size: int, k: int) -> None:
    k = min(k, vocab_size)
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(k))
    logits[1, :] = -5.0  # all alike
    values, ids = top_values(logits, k)
    torch.testing.assert_close(values, logits.topk(k, dim=-1).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == k for row in ids.tolist())


def test_top_p_needs_more_candidates_than_the_first_ones_only_where_it_is_flat() -> None:
    logits = torch.full((2, 5000), -30.0)
    logits[0, :3] = 5.0
    logits[1, 1000:3000] = 5.0  # 2,000 equal tokens
    params = [SamplingParams(top_p=0.9, seed=seed) for seed in range(400) for _ in range(2)]
    tokens = Sampler().sample(logits.repeat(400, 1), params, [0] * 800)
    assert set(tokens[::2]) == {0, 1, 2}
    assert all(1000 <= token < 3000 for token in tokens[1::2])
    assert len(set(tokens[1::2])) > 300


@pytest.mark.parametrize("seed", [None, 5])
def test_flat_distribution_is_cut_and_renormalised_without_sorting_it(seed: int | None) -> None:
    # 1,500 tokens of weight 2 and 1,500 of weight 1: top_p 0.8 keeps all of the first, and 600 of the second
    weights = torch.tensor([2.0, 1.0]).repeat(1500)
    rows = [SamplingParams(top_p=0.8, seed=seed and seed + row) for row in range(3000)]
    tokens = torch.tensor(Sampler().sample(weights.log().expand(3000, -1), rows, [0] * 3000))
    is_heavy = tokens % 2 == 0
    share = 2 / 3 / 0.8
    assert abs(float(is_heavy.float().mean()) - share) < 5 * math.sqrt(share * (1 - share) / 3000)
    light = tokens[~is_heavy]
    assert int(light.max()) <= 2 * 601  # the first 600 in the order of ids
    assert len(set(light.tolist())) > 200
    assert len(set(tokens[is_heavy].tolist())) > 900


def test_top_p_that_draws_hardly_ever_hit_is_exact_all_the_same() -> None:
    # a draw lies within top_p once in fifty times, so most rows are sorted in the end
    logits = -1e-4 * torch.arange(5000.0)[None]
    num_kept = int((logits[0].softmax(dim=-1).cumsum(dim=-1) < 0.02).sum()) + 1
    assert num_kept > 64  # the first number of candidates is too small
    for params in (SamplingParams(top_p=0.02), SamplingParams(top_p=0.02, seed=4)):
        tokens = Sampler().sample(logits.expand(400, -1), [params] * 400, list(range(400)))
        assert max(tokens) < num_kept
        assert len(set(tokens)) > num_kept // 2


def test_log_probabilities_are_the_models_own_and_only_of_rows_that_ask() -> None:
    logits = _logits(3)
    params = [SamplingParams(top_logprobs=2, temperature=0.1), SamplingParams(), SamplingParams(top_logprobs=0)]
    rows = LogprobRows(logits, params)
    expected = logits.log_softmax(dim=-1)
    logits.fill_(0)  # whatever happens to the logits afterwards
    told = rows.of([5, 6, 7])
    assert told.keys() == {0, 2}
    assert told[0].logprob == pytest.approx(float(expected[0, 5]))
    best = expected[0].topk(2)
    assert [token for token, _ in told[0].top] == best.indices.tolist()
    assert [logprob for _, logprob in told[0].top] == pytest.approx(best.values.tolist())
    assert told[2].logprob == pytest.approx(float(expected[2, 7]))
    assert told[2].top == []


def test_rows_of_different_kinds_do_not_mix() -> None:
    logits = _logits(5, seed=3)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(top_p=1e-6),
        SamplingParams(temperature=0.7, top_k=5, seed=2),
    ]
    together = Sampler().sample(logits, params, [0] * 5)
    greedy = logits.argmax(dim=-1).tolist()
    assert [together[row] for row in (0, 1, 3)] == [greedy[row] for row in (0, 1, 3)]
    for row in (2, 4):
        assert together[row] == Sampler().sample(logits[row : row + 1], [params[row]], [0])[0]
    assert together[4] in logits[4].topk(5).indices.tolist()


@pytest.mark.parametrize(
    "params",
    [SamplingParams(seed=7), SamplingParams(seed=7, top_k=50), SamplingParams(seed=7, top_p=0.9, temperature=1.5)],
    ids=["plain", "top_k", "top_p"],
)
def test_seeded_row_is_the_same_alone_and_in_any_batch(params: SamplingParams) -> None:
    logits = _logits(8, seed=5)
    others = [SamplingParams(seed=row) if row % 2 else SamplingParams(top_k=10) for row in range(8)]
    for index in range(20):
        alone = Sampler().sample(logits[3:4], [params], [index])
        batch = Sampler().sample(logits, [*others[:3], params, *others[4:]], [9, 9, 9, index, 9, 9, 9, 9])
        assert batch[3] == alone[0]


def test_seeded_choice_hardly_reacts_to_rounding() -> None:
    logits = _logits(400, seed=8)
    params = [SamplingParams(seed=row) for row in range(400)]
    first = Sampler().sample(logits, params, [0] * 400)
    second = Sampler().sample(logits + 1e-5 * torch.randn_like(logits), params, [0] * 400)
    assert first == second


def test_seed_and_index_both_change_the_choice() -> None:
    logits = _logits(1, spread=1.0).expand(50, -1)
    by_seed = Sampler().sample(logits, [SamplingParams(seed=seed) for seed in range(50)], [0] * 50)
    by_index = Sampler().sample(logits, [SamplingParams(seed=0)] * 50, list(range(50)))
    assert len(set(by_seed)) > 40
    assert len(set(by_index)) > 40


def test_seeded_tokens_of_many_indices_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    tokens = Sampler().sample(logits.expand(4000, -1), [SamplingParams(seed=11)] * 4000, list(range(4000)))
    _assert_distribution(torch.bincount(torch.tensor(tokens), minlength=4) / 4000, logits[0].softmax(dim=-1))


@pytest.mark.parametrize("seed", [-1, 0, 2**63, -(2**70), 2**200])
def test_any_integer_is_a_seed(seed: int) -> None:
    logits = _logits(1)
    params = [SamplingParams(seed=seed)]
    assert Sampler().sample(logits, params, [0]) == Sampler().sample(logits, params, [0])


def test_unseeded_draws_differ() -> None:
    logits = torch.zeros(100, VOCAB_SIZE)
    sampler = Sampler()
    first = sampler.sample(logits, [SamplingParams()] * 100, [0] * 100)
    assert first != sampler.sample(logits, [SamplingParams()] * 100, [0] * 100)
    assert len(set(first)) > 80
