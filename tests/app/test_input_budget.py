"""The smallest limit wins and says which it was."""

from typing import Any

import pytest
from factories_app import make_model_info

from app.input_budget import BudgetLimits, InputBudget, TtftObjective, tightest_objective
from engine.cost_model import PrefillCostModel
from engine.outputs import RequestTimings
from reducer.prompt import Budget


def smallest(**limits: Any) -> InputBudget:
    defaults = {"request": None, "tenant": None, "policy": None, "window": 4096, "output_reserve": 256, "slo": None}
    return BudgetLimits(**(defaults | limits)).smallest()


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, Budget(3840, "window")),
        ({"request": 500}, Budget(500, "request")),
        ({"request": 500, "tenant": 400}, Budget(400, "tenant")),
        ({"request": 500, "tenant": 400, "policy": 300}, Budget(300, "policy")),
        ({"request": 500, "slo": 200}, Budget(200, "slo")),
        ({"request": 9000}, Budget(3840, "window")),
        ({"request": 300, "tenant": 300}, Budget(300, "request")),
        ({"slo": 0}, Budget(1, "slo")),
    ],
)
def test_the_smallest_limit_is_the_budget(limits: dict[str, int], expected: Budget) -> None:
    assert smallest(**limits).wanted == expected


def test_the_output_reserve_and_the_objective_are_wishes_the_other_limits_hold() -> None:
    assert smallest(slo=100).hard == Budget(4095, "window")
    assert smallest(slo=100, tenant=200).hard == Budget(200, "tenant")


def test_a_wish_is_stretched_to_the_protected_part_but_no_limit_is_passed() -> None:
    assert smallest(slo=100).stretched(250) == Budget(250, "slo")
    assert smallest().stretched(4000) == Budget(4000, "window")
    assert smallest().stretched(4096) is None
    assert smallest(request=100).stretched(101) is None


def observe(objective: TtftObjective, num_prompt_tokens: int, *, queue_ms: float = 0.0) -> None:
    timings = RequestTimings(
        queue_ms=queue_ms, prefill_ms=num_prompt_tokens * 1.0, decode_ms=0.0, num_chunks=1, num_preemptions=0
    )
    objective.observe(num_prompt_tokens=num_prompt_tokens, num_cached_tokens=0, reduce_s=0.0, timings=timings)


def test_an_objective_affords_what_was_measured_and_less_where_requests_wait() -> None:
    objective = TtftObjective(PrefillCostModel.from_model_info(make_model_info()))
    assert objective.max_input_tokens(500.0) is None
    for num_tokens in (100, 400, 1000, 2000, 300, 1500):
        observe(objective, num_tokens)
    affordable = objective.max_input_tokens(500.0)
    assert affordable is not None
    assert affordable == pytest.approx(500, rel=0.15)
    for _ in range(50):
        observe(objective, 400, queue_ms=250.0)
    assert objective.max_input_tokens(500.0) == pytest.approx(250, rel=0.2)
    assert objective.max_input_tokens(None) is None


def test_the_tightest_objective_counts() -> None:
    assert tightest_objective(None, 300.0, 200.0) == 200.0
    assert tightest_objective(None, None) is None
