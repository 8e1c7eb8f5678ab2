"""Intervals and paired tests against values computed by hand."""

import math

import pytest

from eval.intervals import bootstrap, compare, estimate, mcnemar, percentile, wilson


def test_wilson_of_eight_in_ten_matches_the_textbook() -> None:
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.490162, abs=1e-6)
    assert high == pytest.approx(0.943318, abs=1e-6)


def test_wilson_has_width_when_everything_succeeds() -> None:
    low, high = wilson(20, 20)
    assert low == pytest.approx(20 / (20 + 1.959964**2), abs=1e-6)  # centre - half simplifies to n / (n + z²)
    assert high == 1.0
    mirrored = wilson(0, 20)
    assert mirrored.low == 0.0
    assert mirrored.high == pytest.approx(1 - low, abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_what_is_no_share(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="is no share"):
        wilson(successes, trials)


def test_mcnemar_counts_both_tails_of_the_binomial() -> None:
    # 1 of 6 discordant pairs: (C(6,0) + C(6,1)) / 2^6 = 7 / 64, two-sided 14 / 64.
    assert mcnemar(1, 5) == pytest.approx(14 / 64)
    assert mcnemar(5, 1) == mcnemar(1, 5)


def test_mcnemar_without_discordant_pairs_is_one() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(3, 3) == 1.0


def test_mcnemar_takes_thousands_of_pairs() -> None:
    assert 0.0 < mcnemar(900, 1100) < 1e-4


def test_bootstrap_is_the_same_for_the_same_seed() -> None:
    values = [math.sqrt(n) % 1 for n in range(50)]
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)
    assert bootstrap(values, seed=3) != bootstrap(values, seed=4)


def test_bootstrap_of_equal_values_has_no_width() -> None:
    assert bootstrap([0.5] * 10, seed=0) == (0.5, 0.5)


def test_bootstrap_agrees_with_the_normal_interval_of_a_large_sample() -> None:
    values = [0.2, 0.4, 0.6, 0.8] * 100
    low, high = bootstrap(values, seed=1)
    half = 1.96 * math.sqrt(0.05 / 400)  # population variance of the four values is 0.05
    assert low == pytest.approx(0.5 - half, abs=0.002)
    assert high == pytest.approx(0.5 + half, abs=0.002)


def test_estimate_takes_wilson_for_shares_and_bootstrap_for_fractions() -> None:
    share = estimate([1.0] * 8 + [0.0] * 2, seed=0)
    assert (share.mean, share.method, share.num_values) == (0.8, "wilson", 10)
    assert share.interval == wilson(8, 10)
    fractions = estimate([0.5, 1.0, 0.0], seed=0)
    assert (fractions.mean, fractions.method) == (0.5, "bootstrap")


def test_compare_reports_the_difference_and_who_passes_alone() -> None:
    paired = compare([1, 1, 1, 0, 1, 0.5], [1, 0, 0, 1, 0, 0.5], seed=0)
    assert paired.difference == pytest.approx(2 / 6)
    assert (paired.only_arm, paired.only_baseline, paired.num_pairs) == (3, 1, 6)
    assert paired.mcnemar_p == mcnemar(3, 1)
    assert paired.interval.low < paired.difference < paired.interval.high


def test_identical_arms_tie() -> None:
    paired = compare([1, 0, 0.5], [1, 0, 0.5], seed=0)
    assert (paired.difference, paired.interval, paired.mcnemar_p) == (0.0, (0.0, 0.0), 1.0)


def test_compare_refuses_arms_of_different_length() -> None:
    with pytest.raises(ValueError, match="same cases, got 2 and 1"):
        compare([1, 0], [1], seed=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_a_failure(bad: float) -> None:
    with pytest.raises(ValueError, match="value 1 of 3"):
        estimate([1.0, bad, 0.0], seed=0)


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_percentile_is_linear_between_neighbours() -> None:
    assert percentile([10, 20, 30, 40], 0.5) == 25
    assert percentile(list(range(1, 12)), 0.9) == 10
