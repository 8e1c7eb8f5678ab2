"""The engine step by step over fake models: text, ends, errors, counters, and tokens that no sharing may change."""

import codecs
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from factories_engine import (
    EOS_TOKEN_ID,
    FakeClock,
    FakeModelRunner,
    ScriptedRunner,
    fake_generate,
    make_engine,
    make_request,
    run_to_end,
)

from engine.errors import PromptTooLongError, QueueFullError
from engine.llm_engine import LLMEngine
from engine.outputs import GenerateRequest, RequestOutput
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput

ROOT = Path(__file__).resolve().parents[2]


def generate(engine: LLMEngine, *requests: GenerateRequest) -> dict[str, list[RequestOutput]]:
    for request in requests:
        engine.add_request(request)
    return run_to_end(engine)


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def scripted(text: str, **request: object) -> list[RequestOutput]:
    """Outputs of a request for which the model says ``text`` and then ends."""
    engine = make_engine(ScriptedRunner(list(text.encode())))
    return generate(engine, make_request(**({"max_tokens": 100} | request)))["r0"]  # type: ignore[arg-type]


def test_every_step_brings_one_token_and_its_text() -> None:
    outputs = scripted("hi")
    assert [output.text for output in outputs] == ["h", "i", ""]
    assert [output.new_token_ids for output in outputs] == [[104], [105], [EOS_TOKEN_ID]]
    assert [output.num_output_tokens for output in outputs] == [1, 2, 3]
    assert [output.finish_reason for output in outputs] == [None, None, "stop"]


def test_a_character_of_several_tokens_comes_out_whole() -> None:
    outputs = scripted("a😀")
    assert [output.text for output in outputs] == ["a", "", "", "", "😀", ""]


def test_a_character_cut_off_by_max_tokens_is_left_out() -> None:
    outputs = scripted("a😀", max_tokens=3)
    assert text_of(outputs) == "a"
    assert outputs[-1].finish_reason == "length"


def test_stop_string_ends_the_output_and_is_not_part_of_it() -> None:
    outputs = scripted("one\nUser: two", stop=("\nUser:", "zzz"))
    assert text_of(outputs) == "one"
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "\nUser:")
    assert outputs[-1].num_output_tokens == len("one\nUser:")


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    outputs = scripted("a\nUxy", stop=("\nUser:",))
    assert [output.text for output in outputs] == ["a", "", "", "\nUx", "y", ""]


def test_held_text_comes_with_the_end() -> None:
    outputs = scripted("a\nU", stop=("\nUser:",))
    assert [output.text for output in outputs] == ["a", "", "", "\nU"]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)


def test_stop_string_completed_by_the_last_allowed_token_is_a_stop() -> None:
    outputs = scripted("abc", stop=("bc",), max_tokens=3)
    assert text_of(outputs) == "a"
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "bc")


def test_stop_token_is_counted_but_is_no_text() -> None:
    outputs = scripted("abc", stop_token_ids=(ord("b"),))
    assert text_of(outputs) == "a"
    assert tokens_of(outputs) == [ord("a"), ord("b")]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", ord("b"))


def test_max_tokens_ends_with_length() -> None:
    outputs = scripted("abcdef", max_tokens=2)
    assert text_of(outputs) == "ab"
    assert outputs[-1].finish_reason == "length"


def test_ignore_eos_goes_on() -> None:
    outputs = scripted("a", max_tokens=4, ignore_eos=True)
    assert tokens_of(outputs) == [97, EOS_TOKEN_ID, EOS_TOKEN_ID, EOS_TOKEN_ID]
    assert text_of(outputs) == "a"
    assert outputs[-1].finish_reason == "length"


def test_chunks_in_the_middle_of_a_prompt_bring_no_output() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(make_request(20, ignore_eos=True))
    assert engine.step() == []
    assert engine.step() == []
    assert len(engine.step()) == 1


def test_timings_come_with_the_first_and_the_last_token_and_add_up() -> None:
    clock = FakeClock()
    engine = make_engine(ScriptedRunner(list(b"abc")), max_num_batched_tokens=4, clock=clock)
    clock.now = 1.0
    engine.add_request(make_request(8, max_tokens=3))
    outputs = []
    for clock.now in (2.0, 4.0, 5.0, 8.0):
        outputs += engine.step()
    first, middle, last = outputs
    assert middle.timings is None
    assert first.timings is not None
    assert last.timings is not None
    assert msgspec.structs.astuple(first.timings) == (1000, 2000, 0, 2, 0, 8, 0, 4.0, 0)
    assert msgspec.structs.astuple(last.timings) == (1000, 2000, 4000, 2, 0, 8, 0, 4.0, 0)


def test_output_of_one_token_has_timings_once() -> None:
    outputs = scripted("abc", max_tokens=1)
    assert len(outputs) == 1
    assert outputs[0].timings is not None


def test_stats_count_prompts_hits_and_tokens() -> None:
    engine = make_engine()
    generate(engine, make_request(10, request_id="a", max_tokens=3, ignore_eos=True))
    outputs = generate(engine, make_request(10, request_id="b", max_tokens=2, ignore_eos=True))
    assert [output.num_cached_tokens for output in outputs["b"]] == [8, 8]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generation_tokens) == (20, 8, 5)
    assert (stats.num_steps, stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (5, 0, 0, 0)


def test_step_without_requests_is_nothing() -> None:
    engine = make_engine()
    assert not engine.has_unfinished
    assert engine.step() == []
    assert engine.stats().num_steps == 0


def test_abort_returns_the_last_output_and_gives_everything_back() -> None:
    engine = make_engine()
    engine.add_request(make_request(10, ignore_eos=True))
    engine.step()
    output = engine.abort("r0")
    assert output is not None
    assert (output.finish_reason, output.num_output_tokens, output.new_token_ids) == ("abort", 1, [])
    assert output.timings is not None
    assert engine.abort("r0") is None
    assert not engine.has_unfinished
    assert engine.stats().kv_cache_usage == 0
    assert engine._detokenizers == {}


@pytest.mark.parametrize("token_id", [-1, 257])
def test_token_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=f"token id {token_id} is outside the vocabulary of 257 ids"):
        engine.add_request(make_request([1, token_id, 2]))


def test_empty_prompt_and_empty_salt_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="prompt_token_ids must not be empty"):
        engine.add_request(make_request([]))
    with pytest.raises(ValueError, match="cache_salt must not be empty"):
        engine.add_request(make_request(cache_salt=""))
    assert not engine.has_unfinished


def test_refused_request_leaves_nothing_behind_and_its_id_may_come_again() -> None:
    engine = make_engine(max_model_len=8, max_num_waiting=1)
    with pytest.raises(PromptTooLongError):
        engine.add_request(make_request(8))
    engine.add_request(make_request(4))
    with pytest.raises(QueueFullError):
        engine.add_request(make_request(4, request_id="r1"))
    run_to_end(engine)
    assert generate(engine, make_request(4))["r0"][-1].finish_reason is not None
    assert engine._detokenizers == {}


def test_a_second_request_of_one_id_does_not_disturb_the_first() -> None:
    engine = make_engine(ScriptedRunner(list(b"abc")))
    engine.add_request(make_request())
    engine.step()
    with pytest.raises(ValueError, match="request_id 'r0' is in use"):
        engine.add_request(make_request())
    assert text_of(run_to_end(engine)["r0"]) == "bc"


def test_info_tells_the_window_that_the_cache_admits() -> None:
    assert make_engine(num_blocks=8, block_size=4, max_model_len=256).info.max_model_len == 32
    assert make_engine(num_blocks=64, block_size=4, max_model_len=100).info.max_model_len == 100


def test_step_that_fails_once_is_computed_again_in_parts() -> None:
    runner = FakeModelRunner(64, 4)
    engine = make_engine(runner, max_num_batched_tokens=16)
    engine.add_request(make_request(20, request_id="a", ignore_eos=True))
    engine.add_request(make_request(range(50, 60), request_id="b", ignore_eos=True))
    first = engine.step()
    runner.fail_next_step = True  # and writes garbage into the blocks
    outputs = run_to_end(engine)
    for output in first:
        outputs[output.request_id].insert(0, output)
    assert tokens_of(outputs["a"]) == fake_generate(range(20), 8)
    assert tokens_of(outputs["b"]) == fake_generate(range(50, 60), 8)
    assert engine.stats().num_retried_steps == 1


def test_sequence_that_cannot_be_computed_ends_and_its_blocks_are_not_found() -> None:
    runner = FakeModelRunner(64, 4)
    engine = make_engine(runner, max_num_batched_tokens=16)
    for name, prompt in (("a", range(20)), ("bad", range(100, 110)), ("b", range(50, 60)), ("c", range(70, 73))):
        engine.add_request(make_request(prompt, request_id=name, ignore_eos=True))
    first = engine.step()
    runner.raising_request_ids = {"bad"}
    outputs = run_to_end(engine)
    for output in first:
        outputs[output.request_id].insert(0, output)
    assert outputs["bad"][-1].finish_reason == "error"
    assert outputs["bad"][-1].error == "MemoryError: the fake device is full"
    for name, prompt in (("a", range(20)), ("b", range(50, 60)), ("c", range(70, 73))):
        assert tokens_of(outputs[name]) == fake_generate(prompt, 8)
    assert engine.stats().kv_cache_usage == 0


def test_sequence_not_in_the_failed_step_goes_on() -> None:
    runner = FakeModelRunner(64, 4)
    engine = make_engine(runner, max_num_batched_tokens=8)
    engine.add_request(make_request(8, request_id="a"))
    engine.add_request(make_request(range(50, 58), request_id="b", ignore_eos=True))
    runner.fail_next_step = True
    assert [output.request_id for output in engine.step()] == ["a"]
    assert tokens_of(run_to_end(engine)["b"]) == fake_generate(range(50, 58), 8)


def test_sequence_that_fails_alone_ends_alone() -> None:
    runner = FakeModelRunner(64, 4)
    runner.failing_request_ids = {"bad"}
    outputs = generate(
        make_engine(runner),
        make_request(9, request_id="bad"),
        make_request(range(50, 59), request_id="good", ignore_eos=True),
    )
    assert [(output.finish_reason, output.error) for output in outputs["bad"]] == [
        ("error", "the fake sequence is out of memory")
    ]
    assert tokens_of(outputs["good"]) == fake_generate(range(50, 59), 8)


def test_runner_that_forgets_a_token_fails_the_step_not_the_engine() -> None:
    class ForgetfulRunner(ScriptedRunner):
        def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            return ModelRunnerOutput(sampled={})

    outputs = generate(make_engine(ForgetfulRunner()), make_request())["r0"]
    assert [output.error for output in outputs] == ["RuntimeError: the model runner returned no token for r0"]


def test_cost_model_learns_from_prefills_and_not_from_decode() -> None:
    engine = make_engine(clock=FakeClock(tick=0.5))
    generate(engine, make_request(30, max_tokens=5, ignore_eos=True))
    assert engine.cost_model.num_observations == 1
    assert engine.cost_model.predict_s(30, 0) == pytest.approx(0.5, rel=0.01)


def test_cost_model_does_not_learn_from_a_failed_step() -> None:
    runner = FakeModelRunner(64, 4)
    runner.fail_next_step = True
    engine = make_engine(runner, clock=FakeClock(tick=0.5))
    generate(engine, make_request(30))
    assert engine.cost_model.num_observations == 0


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [12, 60])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_tokens_and_text_do_not_depend_on_how_they_were_computed(
    chunk: int, enable_prefix_caching: bool, num_blocks: int, max_num_seqs: int
) -> None:
    engine = make_engine(
        num_blocks=num_blocks,
        long_prefill_token_threshold=chunk,
        enable_prefix_caching=enable_prefix_caching,
        max_num_seqs=max_num_seqs,
    )
    prompts = {f"r{i}": [*range(17), *range(100, 100 + i)] for i in range(1, 9)}
    requests = [
        make_request(prompt, request_id=request_id, max_tokens=20, ignore_eos=True)
        for request_id, prompt in prompts.items()
    ]
    outputs = generate(engine, *requests)
    for request_id, prompt in prompts.items():
        expected = fake_generate(prompt, 20)
        assert tokens_of(outputs[request_id]) == expected
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps back a character that the end cuts off
        assert text_of(outputs[request_id]) == decoder.decode(b"".join(map(engine.tokenizer.token_bytes, expected)))
    stats = engine.stats()
    if max_num_seqs == 1:
        assert stats.num_preemptions == 0
    elif num_blocks == 12:
        assert stats.num_preemptions > 0


def test_second_request_hits_for_the_same_tenant_and_not_for_another() -> None:
    engine = make_engine()
    cached = {}
    for request_id, salt in (("first", "acme"), ("same", "acme"), ("other", "globex"), ("again", "globex")):
        outputs = generate(engine, make_request(21, request_id=request_id, cache_salt=salt, ignore_eos=True))
        cached[request_id] = outputs[request_id][0].num_cached_tokens
        assert tokens_of(outputs[request_id]) == fake_generate(range(21), 8)
    assert cached == {"first": 0, "same": 20, "other": 0, "again": 20}


def test_next_turn_hits_the_answer_of_the_turn_before() -> None:
    engine = make_engine()
    first = tokens_of(generate(engine, make_request(10, request_id="a", max_tokens=7, ignore_eos=True))["a"])
    prompt = [*range(10), *first, 1, 2, 3]
    second = generate(engine, make_request(prompt, request_id="b", ignore_eos=True))["b"]
    assert second[0].num_cached_tokens == 16
    assert tokens_of(second) == fake_generate(prompt, 8)


def test_reset_prefix_cache_forgets_what_is_cached() -> None:
    engine = make_engine()
    generate(engine, make_request(10, request_id="a"))
    assert engine.reset_prefix_cache()
    assert generate(engine, make_request(10, request_id="b"))["b"][0].num_cached_tokens == 0


def test_engine_and_control_plane_import_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import engine.llm_engine"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_output_says_that_max_tokens_was_reduced() -> None:
    engine = make_engine(max_model_len=20)
    outputs = generate(engine, make_request(15, request_id="a", max_tokens=50, ignore_eos=True))["a"]
    assert [output.max_tokens for output in outputs] == [5] * 5
    assert outputs[-1].finish_reason == "length"
    fitting = generate(engine, make_request(range(50, 60), request_id="b", max_tokens=5))["b"]
    assert fitting[0].max_tokens is None


def test_request_that_missed_its_deadline_in_the_queue_has_one_last_output() -> None:
    clock = FakeClock()
    engine = make_engine(max_num_seqs=1, clock=clock)
    engine.add_request(make_request(4, request_id="first", max_tokens=4, ignore_eos=True))
    engine.add_request(make_request(range(50, 54), request_id="late", deadline_ms=500.0))
    engine.step()
    clock.now = 1.0
    outputs = [output for output in engine.step() if output.request_id == "late"]
    assert [(output.finish_reason, output.error) for output in outputs] == [
        ("error", "the deadline of 500 ms passed in the queue")
    ]
    assert outputs[0].is_expired
    assert outputs[0].timings is not None
    assert outputs[0].timings.queue_ms == 1000
    assert len(run_to_end(engine)["first"]) == 2


def test_begun_requests_are_told_once_and_before_their_first_step() -> None:
    runner = FakeModelRunner(64, 4)
    engine = make_engine(runner, max_num_batched_tokens=8, max_num_seqs=1)
    told: list[tuple[int, list[str]]] = []
    engine.on_started = lambda request_ids: told.append((len(runner.steps), request_ids))
    engine.add_request(make_request(20, request_id="a", max_tokens=2, ignore_eos=True))
    engine.step()
    engine.add_request(make_request(range(50, 54), request_id="b", max_tokens=1))
    run_to_end(engine)
    assert told == [(0, ["a"]), (4, ["b"])]
    assert engine._started == set()
