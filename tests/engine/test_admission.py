"""What is refused at once, for which reason, and when it may come again."""

import pytest
from factories_engine import FakeModelRunner, make_scheduler, make_sequence, run_step

from engine.config import AdmissionConfig
from engine.cost_model import PrefillCostModel, num_attention_pairs
from engine.errors import AdmissionError, OutputTooLongError, PromptTooLongError
from engine.scheduler import Scheduler


def make_cost_model(seconds_per_token: float = 0.1) -> PrefillCostModel:
    cost_model = PrefillCostModel()
    for num_tokens in (20, 40, 80, 160):
        pairs = num_attention_pairs(num_tokens, 0)
        cost_model.observe_step(num_tokens, pairs, num_tokens * seconds_per_token)
    return cost_model


def refusal(scheduler: Scheduler, request_id: str, **options: object) -> AdmissionError:
    with pytest.raises(AdmissionError) as caught:
        scheduler.add(make_sequence(request_id=request_id, **options))  # type: ignore[arg-type]
    assert scheduler.get(request_id) is None
    return caught.value


def test_prompt_above_the_limit_for_prompts_is_refused_for_good() -> None:
    scheduler = make_scheduler(admission=AdmissionConfig(max_input_tokens=10))
    with pytest.raises(PromptTooLongError, match="prompt of 11 tokens exceeds the limit for prompts of 10 tokens"):
        scheduler.add(make_sequence(11))
    scheduler.add(make_sequence(10))


def test_max_tokens_is_reduced_to_the_room_left() -> None:
    scheduler = make_scheduler(max_model_len=20)
    fits, reduced = make_sequence(15, request_id="a", max_tokens=5), make_sequence(15, request_id="b", max_tokens=6)
    scheduler.add(fits)
    scheduler.add(reduced)
    assert (fits.sampling.max_tokens, fits.max_tokens_asked) == (5, None)
    assert (reduced.sampling.max_tokens, reduced.max_tokens_asked) == (5, 6)


def test_max_tokens_beyond_the_room_can_be_refused() -> None:
    scheduler = make_scheduler(max_model_len=20, admission=AdmissionConfig(max_tokens_overflow="refuse"))
    with pytest.raises(OutputTooLongError, match="max_tokens of 6 exceeds the room of 5 tokens"):
        scheduler.add(make_sequence(15, max_tokens=6))
    scheduler.add(make_sequence(15, max_tokens=5))


def test_queue_has_a_length_in_tokens() -> None:
    scheduler = make_scheduler(admission=AdmissionConfig(max_num_waiting_tokens=30), cost_model=make_cost_model())
    scheduler.add(make_sequence(20, request_id="a"))
    error = refusal(scheduler, "b", prompt=11)
    assert error.reason == "queue_tokens"
    assert "20 prompt tokens wait already, 11 more would pass the limit of 30" in str(error)
    assert error.retry_after_s == pytest.approx(2.0, rel=0.05)
    scheduler.add(make_sequence(10, request_id="c"))


def test_prompt_longer_than_the_queue_may_wait_alone() -> None:
    scheduler = make_scheduler(admission=AdmissionConfig(max_num_waiting_tokens=30))
    scheduler.add(make_sequence(40, request_id="a"))


def test_tenant_has_a_share_of_the_queue() -> None:
    scheduler = make_scheduler(admission=AdmissionConfig(max_tenant_waiting_tokens=30))
    scheduler.add(make_sequence(20, request_id="a", cache_salt="acme"))
    assert refusal(scheduler, "b", prompt=11, cache_salt="acme").reason == "tenant_queue"
    scheduler.add(make_sequence(25, request_id="c", cache_salt="globex"))


def test_nothing_new_above_the_watermark() -> None:
    scheduler = make_scheduler(num_blocks=10, admission=AdmissionConfig(kv_watermark=0.5))
    scheduler.add(make_sequence(24, request_id="a", ignore_eos=True))
    run_step(scheduler, FakeModelRunner(10, 4))
    error = refusal(scheduler, "b")
    assert error.reason == "kv_watermark"
    assert "60% of the KV blocks are in use, the watermark is 50%" in str(error)
    scheduler.abort("a", now=0.0)
    scheduler.add(make_sequence(request_id="b"))


def test_deadline_that_cannot_be_kept_is_refused_with_the_time_that_is_missing() -> None:
    scheduler = make_scheduler(cost_model=make_cost_model())
    scheduler.add(make_sequence(range(100, 150), request_id="ahead"))  # 5 s
    error = refusal(scheduler, "late", prompt=30, deadline_s=6.0)  # 3 s more
    assert error.reason == "deadline"
    assert error.retry_after_s == pytest.approx(2.0, rel=0.1)
    scheduler.add(make_sequence(30, request_id="patient", deadline_s=9.0))


def test_prediction_counts_on_the_prefix_cache_and_on_going_first() -> None:
    scheduler = make_scheduler(cost_model=make_cost_model())
    runner = FakeModelRunner(64, 4)
    scheduler.add(make_sequence(40, request_id="warm", max_tokens=1))
    run_step(scheduler, runner)
    scheduler.add(make_sequence(range(100, 150), request_id="ahead"))
    assert refusal(scheduler, "cold", prompt=range(200, 240), deadline_s=2.0, priority=1).reason == "deadline"
    scheduler.add(make_sequence(41, request_id="hit", deadline_s=2.0, priority=1))


def test_without_experience_nothing_is_predicted_and_a_constant_told() -> None:
    scheduler = make_scheduler(cost_model=PrefillCostModel(), admission=AdmissionConfig(max_num_waiting_tokens=30))
    scheduler.add(make_sequence(20, request_id="a", deadline_s=0.001))
    assert refusal(scheduler, "b", prompt=20).retry_after_s == 5.0


def test_refusals_are_counted_by_reason() -> None:
    scheduler = make_scheduler(max_num_waiting=1, admission=AdmissionConfig(max_num_waiting_tokens=30))
    scheduler.add(make_sequence(request_id="a"))
    for name in ("b", "c"):
        refusal(scheduler, name)
    assert dict(scheduler.admission.num_refused) == {"queue_length": 2}


@pytest.mark.parametrize(("field", "value"), [("max_input_tokens", 0), ("kv_watermark", 0.0), ("kv_watermark", 1.5)])
def test_limits_outside_their_range_name_the_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*, got {value}"):
        AdmissionConfig(**{field: value})  # type: ignore[arg-type]
