"""Cost formulas against hand calculation, and the online fit against machines with known coefficients."""

import random

import pytest
from factories_engine import make_model_info
from hypothesis import given
from hypothesis import strategies as st

from engine.cost_model import (
    CostCoefficients,
    PrefillCostModel,
    attention_flops_per_pair,
    kv_cache_bytes,
    linear_flops_per_token,
    logits_flops,
    num_attention_pairs,
    prefill_flops,
)

MACHINE = CostCoefficients(step_s=0.01, token_s=5e-4, pair_s=4e-7)


def seconds_on(machine: CostCoefficients, num_new_tokens: int, num_context_tokens: int) -> float:
    pairs = num_attention_pairs(num_new_tokens, num_context_tokens)
    return machine.step_s + machine.token_s * num_new_tokens + machine.pair_s * pairs


def random_step(rng: random.Random) -> tuple[int, int]:
    return rng.randint(16, 2048), rng.choice([0, rng.randint(0, 6000)])


def train(model: PrefillCostModel, machine: CostCoefficients, rng: random.Random, count: int, noise: float) -> None:
    for _ in range(count):
        step = random_step(rng)
        model.observe(*step, seconds_on(machine, *step) * rng.uniform(1 - noise, 1 + noise))


@given(st.integers(1, 60), st.integers(0, 60))
def test_pairs_are_what_a_causal_mask_lets_through(num_new_tokens: int, num_context_tokens: int) -> None:
    seen = sum(num_context_tokens + index + 1 for index in range(num_new_tokens))
    assert num_attention_pairs(num_new_tokens, num_context_tokens) == seen


def test_formulas_of_smollm2_135m() -> None:
    info = make_model_info()
    weights_per_layer = 576 * 576 + 2 * 576 * 192 + 576 * 576 + 3 * 576 * 1536
    assert linear_flops_per_token(info) == 2 * 30 * weights_per_layer
    # All parameters but the embedding and the norms are linear layers.
    assert 30 * weights_per_layer == info.num_parameters - 49152 * 576 - 61 * 576
    assert attention_flops_per_pair(info) == 4 * 30 * 9 * 64
    assert logits_flops(info) == 2 * 576 * 49152


def test_prefill_flops_of_chunks_add_up_to_the_whole() -> None:
    info = make_model_info()
    whole = prefill_flops(info, 1000)
    chunks = prefill_flops(info, 400) + prefill_flops(info, 600, 400)
    assert whole == chunks - logits_flops(info)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", 46_080), ("bf16", 23_040), ("fp16", 23_040)])
def test_kv_cache_bytes_of_one_token(dtype: str, expected: int) -> None:
    assert kv_cache_bytes(make_model_info(dtype=dtype), 1) == expected
    assert kv_cache_bytes(make_model_info(dtype=dtype), 1000) == 1000 * expected


def test_kv_cache_bytes_of_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'int4'"):
        kv_cache_bytes(make_model_info(dtype="int4"), 1)


def test_before_any_observation_nothing_is_known() -> None:
    model = PrefillCostModel()
    assert model.predict_s(100, 0) is None
    assert model.max_new_tokens(1.0, 0) is None
    assert model.coefficients is None


def test_exact_observations_give_back_the_machine() -> None:
    model = PrefillCostModel.from_model_info(make_model_info())
    train(model, MACHINE, random.Random(1), 100, noise=0.0)
    coefficients = model.coefficients
    assert coefficients is not None
    assert coefficients.token_s == pytest.approx(MACHINE.token_s, rel=0.05)
    assert coefficients.pair_s == pytest.approx(MACHINE.pair_s, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_predictions_stay_close_under_noise(seed: int) -> None:
    model = PrefillCostModel.from_model_info(make_model_info())
    train(model, MACHINE, random.Random(seed), 200, noise=0.1)
    for num_new_tokens, num_cached_tokens in ((64, 0), (512, 0), (2048, 0), (4000, 0), (300, 4000)):
        expected = seconds_on(MACHINE, num_new_tokens, num_cached_tokens)
        assert model.predict_s(num_new_tokens, num_cached_tokens) == pytest.approx(expected, rel=0.12)


def test_one_observation_predicts_itself_and_grows_with_length() -> None:
    model = PrefillCostModel.from_model_info(make_model_info())
    model.observe(1000, 0, 0.7)
    assert model.predict_s(1000, 0) == pytest.approx(0.7, rel=0.01)
    # The fixed part is believed to be small and attention to run at the rate of the linear layers.
    assert model.predict_s(2000, 0) == pytest.approx(1.58, rel=0.03)


def test_a_single_outlier_hardly_moves_the_prediction() -> None:
    model = PrefillCostModel.from_model_info(make_model_info())
    train(model, MACHINE, random.Random(2), 100, noise=0.05)
    before = model.predict_s(1000, 0)
    model.observe(1000, 0, 60.0)
    model.observe(1000, 0, 1e-6)
    assert model.predict_s(1000, 0) == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("factor", [0.1, 0.6, 1.7, 10.0])
def test_a_lasting_change_of_speed_is_followed(factor: float) -> None:
    rng = random.Random(3)
    model = PrefillCostModel.from_model_info(make_model_info())
    train(model, MACHINE, rng, 200, noise=0.05)
    other = CostCoefficients(*(value * factor for value in MACHINE))
    train(model, other, rng, 20, noise=0.05)
    assert model.predict_s(1000, 0) == pytest.approx(seconds_on(other, 1000, 0), rel=0.2)
    train(model, other, rng, 60, noise=0.05)
    assert model.predict_s(1000, 0) == pytest.approx(seconds_on(other, 1000, 0), rel=0.1)


def test_a_slow_first_step_is_forgotten() -> None:
    rng = random.Random(4)
    model = PrefillCostModel.from_model_info(make_model_info())
    model.observe(500, 0, 30.0)
    train(model, MACHINE, rng, 20, noise=0.05)
    assert model.predict_s(1000, 0) == pytest.approx(seconds_on(MACHINE, 1000, 0), rel=0.1)


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 8192), st.floats(1e-4, 100)), min_size=1, max_size=20),
    st.integers(1, 8000),
    st.integers(0, 8000),
)
def test_predictions_are_positive_and_grow_with_every_token_whatever_was_observed(
    observations: list[tuple[int, int, float]], num_new_tokens: int, num_cached_tokens: int
) -> None:
    model = PrefillCostModel.from_model_info(make_model_info(), max_tokens_per_step=512)
    for observation in observations:
        model.observe(*observation)
    coefficients = model.coefficients
    assert coefficients is not None
    assert min(coefficients) >= 0
    assert max(coefficients) > 0
    here = model.predict_s(num_new_tokens, num_cached_tokens)
    assert here is not None
    assert here > 0
    assert here <= (model.predict_s(num_new_tokens + 1, num_cached_tokens) or 0)
    assert here <= (model.predict_s(num_new_tokens, num_cached_tokens + 1) or 0)


def test_chunks_pay_the_fixed_part_each() -> None:
    models = [PrefillCostModel.from_model_info(make_model_info(), size) for size in (None, 256)]
    machine = CostCoefficients(step_s=0.1, token_s=1e-4, pair_s=1e-8)
    for model in models:
        train(model, machine, random.Random(5), 200, noise=0.0)
    whole, chunked = (model.predict_s(1024, 0) or 0 for model in models)
    assert chunked - whole == pytest.approx(3 * 0.1, rel=0.05)


@pytest.mark.parametrize("num_cached_tokens", [0, 3000])
@pytest.mark.parametrize("max_tokens_per_step", [None, 256])
def test_max_new_tokens_is_the_last_that_fits(num_cached_tokens: int, max_tokens_per_step: int | None) -> None:
    model = PrefillCostModel.from_model_info(make_model_info(), max_tokens_per_step)
    train(model, MACHINE, random.Random(6), 50, noise=0.0)
    for seconds in (0.05, 0.5, 2.0):
        count = model.max_new_tokens(seconds, num_cached_tokens)
        assert count
        assert (model.predict_s(count, num_cached_tokens) or 0) <= seconds
        assert (model.predict_s(count + 1, num_cached_tokens) or 0) > seconds


def test_max_new_tokens_grows_with_time_and_shrinks_with_context() -> None:
    model = PrefillCostModel.from_model_info(make_model_info())
    train(model, MACHINE, random.Random(7), 50, noise=0.0)
    counts = [model.max_new_tokens(seconds, 0) or 0 for seconds in (0.0, 0.05, 0.1, 0.5, 1.0)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert (model.max_new_tokens(1.0, 4000) or 0) < counts[-1]
    assert model.max_new_tokens(1.0, 0, limit=100) == 100


@pytest.mark.parametrize("step", [(0, 0, 1.0), (4, 3, 1.0), (4, 10, 0.0)])
def test_impossible_observations_are_refused(step: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="a step needs tokens"):
        PrefillCostModel().observe_step(*step)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="operation counts must be positive"):
        PrefillCostModel(flops_per_token=0)
    with pytest.raises(ValueError, match="max_tokens_per_step must be at least 1, got 0"):
        PrefillCostModel(max_tokens_per_step=0)
