"""Failures that users reported elsewhere, as tests: tenants and the prefix cache, and one request that harms others.

The numbers are those of the list of reported cases. What concerns the gateway of them is tested with the gateway.
"""

from pathlib import Path

import pytest
from factories_disaggregation import (
    Line,
    answer,
    at,
    engines,
    make_transfer_request,
    outputs_of,
    prefill,
    tokens_of,
    until,
)
from factories_engine import (
    FakeClock,
    FakeModelRunner,
    fake_generate,
    make_cache_key,
    make_engine,
    make_kv_cache_manager,
    make_request,
    make_scheduler,
    make_sequence,
    run_step,
    run_to_end,
)
from factories_quantization import make_config, measure_tiny, save_tiny_llama

from engine.block_hash import extend_hashed_blocks
from engine.errors import ModelError, PromptTooLongError
from engine.llm_engine import LLMEngine
from engine.quantization_gate import write_gate_record
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput


def cached_tokens(engine: LLMEngine, request_id: str, prompt: list[int] | int, salt: str) -> int:
    """Prompt tokens that a request finds in the cache."""
    engine.add_request(make_request(prompt, request_id=request_id, max_tokens=2, ignore_eos=True, cache_salt=salt))
    return run_to_end(engine)[request_id][0].num_cached_tokens


def test_75_a_tenant_hits_its_own_prefix_and_misses_that_of_another() -> None:
    engine = make_engine(num_blocks=512, max_model_len=1024, max_num_batched_tokens=512)
    prompt = [token_id % 250 for token_id in range(513)]
    assert cached_tokens(engine, "a1", prompt, "tenant-a") == 0
    assert cached_tokens(engine, "b1", prompt, "tenant-b") == 0
    assert cached_tokens(engine, "a2", prompt, "tenant-a") == 512
    assert cached_tokens(engine, "b2", prompt, "tenant-b") == 512


def test_75_nor_does_a_tenant_wait_for_the_prefix_that_another_is_computing() -> None:
    scheduler = make_scheduler()
    runner = FakeModelRunner(64, 4)
    scheduler.add(make_sequence(17, request_id="a", cache_salt="tenant-a"))
    scheduler.add(make_sequence(17, request_id="b", cache_salt="tenant-b"))
    assert run_step(scheduler, runner) == {"a": 17, "b": 17}


def test_76_the_salt_alone_decides_so_a_token_that_looks_like_one_does_not() -> None:
    key = make_cache_key()
    assert key.extra("tenant-a") != key.extra("tenant-b")
    assert key.extra("a" + "\x00" + "b") != key.extra("a")
    # A public block has one field less than any private one: no salt can make them equal.
    assert all(key.public_extra() != key.extra(salt) for salt in ("public", "\x00", "none", " "))


def test_77_a_tenant_that_sends_twice_hits() -> None:
    engine = make_engine()
    assert [cached_tokens(engine, f"r{i}", 41, "tenant-a") for i in range(2)] == [0, 40]


def test_79_an_empty_salt_is_refused_and_a_blank_one_is_private() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="cache_salt must not be empty"):
        cached_tokens(engine, "empty", 41, "")
    assert cached_tokens(engine, "blank", 41, " ") == 0
    assert cached_tokens(engine, "a", 41, "tenant-a") == 0


def test_81_a_public_prefix_is_computed_once_for_all_tenants_and_nothing_else_is_shared() -> None:
    public = [token_id % 250 for token_id in range(1000)]
    private = [7] * 64
    manager_options = {"num_blocks": 4096, "public_prefixes": [public]}
    scheduler = make_scheduler(max_model_len=2048, max_num_batched_tokens=2048, **manager_options)  # type: ignore[arg-type]
    runner = FakeModelRunner(4096, 4)
    found = []
    for tenant in range(4):
        for attempt in range(2):
            sequence = make_sequence(
                [*public, *private, 1], request_id=f"t{tenant}-{attempt}", max_tokens=1, cache_salt=f"tenant-{tenant}"
            )
            scheduler.add(sequence)
            while scheduler.has_unfinished:
                run_step(scheduler, runner)
            found.append(sequence.num_cached_tokens)
            assert sequence.output_token_ids == fake_generate(sequence.prompt_token_ids, 1)
    assert found == [0, 1064] + [1000, 1064] * 3


def test_81_a_prompt_that_only_begins_like_a_public_prefix_shares_only_that_part() -> None:
    manager = make_kv_cache_manager(public_prefixes=[list(range(16))])
    for name, tail in (("a", [50, 51]), ("b", [60, 61])):
        sequence = make_sequence([*range(10), *tail, 1, 2, 3, 4, 5], request_id=name, cache_salt=name)
        computed = manager.get_computed_blocks(sequence)
        assert manager.allocate_slots(sequence, 17 - computed.num_tokens, computed) is not None
        sequence.num_computed_tokens = 17
        manager.cache_blocks(sequence)
        assert computed.num_tokens == (0 if name == "a" else 8)
        assert sequence.num_public_blocks == 2
    assert manager.get_computed_blocks(make_sequence([*range(10), 50, 51, 1], request_id="c")).num_tokens == 8


def test_83_revoked_access_leaves_nothing_to_hit_for_another_principal() -> None:
    # The gateway salts by tenant; the engine has no way to a block but the salt it was computed with.
    engine = make_engine()
    assert cached_tokens(engine, "before", 41, "acme/readers-v1") == 0
    assert cached_tokens(engine, "after", 41, "acme/readers-v2") == 0


@pytest.mark.parametrize(
    "field", ["weights_digest", "tokenizer_digest", "template_version", "dtype", "quantization", "rope"]
)
def test_85_every_setting_that_changes_the_answer_changes_every_block(field: str) -> None:
    chains = []
    for key in (make_cache_key(), make_cache_key(**{field: "another"})):
        chain: list = []  # type: ignore[type-arg]
        extend_hashed_blocks(chain, list(range(12)), 4, key.extra("tenant-a"))
        chains.append({block.hash for block in chain})
    assert chains[0].isdisjoint(chains[1])


def test_85_another_system_prompt_is_a_miss_for_all_that_follows() -> None:
    engine = make_engine()
    question = [50 + i for i in range(32)]
    assert cached_tokens(engine, "a", [*range(16), *question, 1], "tenant-a") == 0
    assert cached_tokens(engine, "b", [*range(1, 17), *question, 1], "tenant-a") == 0


def test_99_an_oversize_prompt_is_refused_alone() -> None:
    engine = make_engine(max_model_len=64)
    with pytest.raises(PromptTooLongError):
        engine.add_request(make_request(65, request_id="oversize"))
    assert cached_tokens(engine, "next", 20, "tenant-a") == 0


def test_99_an_allocation_that_fails_on_the_third_chunk_fails_that_request_alone() -> None:
    class FullDevice(FakeModelRunner):
        def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            for part in scheduler_output.scheduled:
                if part.request_id == "victim" and part.start >= 16:
                    raise MemoryError("cannot allocate 4096 bytes")
            return super().execute(scheduler_output)

    engine = make_engine(FullDevice(64, 4), long_prefill_token_threshold=8)
    engine.add_request(make_request(40, request_id="victim", ignore_eos=True))
    engine.add_request(make_request(range(100, 120), request_id="other", ignore_eos=True))
    outputs = run_to_end(engine)
    assert outputs["victim"][-1].error == "MemoryError: cannot allocate 4096 bytes"
    tokens = [token_id for output in outputs["other"] for token_id in output.new_token_ids]
    assert tokens == fake_generate(range(100, 120), 8)
    assert engine.stats().kv_cache_usage == 0
    assert engine.stats().num_retried_steps == 1
    assert cached_tokens(engine, "next", 20, "tenant-a") == 0


def test_103_streams_get_a_token_in_every_step_beside_a_long_prompt() -> None:
    scheduler = make_scheduler(num_blocks=8192, max_model_len=20_000, max_num_batched_tokens=512)
    runner = FakeModelRunner(8192, 4)
    for i in range(4):
        scheduler.add(make_sequence([i], request_id=f"stream{i}", max_tokens=100, ignore_eos=True))
    run_step(scheduler, runner)
    scheduler.add(make_sequence([token_id % 256 for token_id in range(16_000)], request_id="long", max_tokens=1))
    steps = []
    while scheduler.get("long") is not None:
        output = scheduler.schedule(0.0)
        steps.append({part.request_id: part.num_new_tokens for part in output.scheduled})
        sampled = {part.request_id: 1 for part in output.scheduled if part.needs_sample}
        scheduler.update_from_output(output, ModelRunnerOutput(sampled=sampled), 0.0)
    assert len(steps) == 32  # 508 tokens of the prompt in each
    assert all(sum(step.values()) <= 512 for step in steps)
    assert all(step.get(f"stream{i}") == 1 for step in steps for i in range(4))


def test_105_the_first_token_is_timed_when_the_whole_prompt_is_computed() -> None:
    clock = FakeClock()
    engine = make_engine(num_blocks=2048, max_model_len=6000, max_num_batched_tokens=2048, clock=clock)
    engine.add_request(make_request([token_id % 250 for token_id in range(5000)], max_tokens=2, ignore_eos=True))
    seen = []
    for clock.now in (1.0, 2.0, 3.0, 4.0):
        seen.append([(output.num_output_tokens, output.timings) for output in engine.step()])
    assert seen[:2] == [[], []]  # two chunks without any output
    ((num_output_tokens, timings),) = seen[2]
    assert num_output_tokens == 1
    assert timings is not None
    assert (timings.queue_ms, timings.prefill_ms, timings.num_chunks) == (1000, 2000, 3)


def test_102_a_transfer_that_never_arrives_ends_when_the_wait_is_over_not_when_a_lease_is() -> None:
    decode: dict[str, object] = {"kv_transfer_timeout_ms": 2000.0, "on_transfer_failure": "fail"}
    with (
        engines(prefill={"lease_ms": 600_000.0}, decode=decode) as (producer, consumer),
        Line(producer.transfers_endpoint) as line,
    ):
        line.mode = "drop"
        consumer.add_request(make_transfer_request(offer=at(prefill(producer), line.endpoint)))
        until(lambda: line.num_answers == 1, consumer)
        consumer.clock.now += 1.9
        assert consumer.checked_step() == []
        consumer.clock.now += 0.2
        (last,) = outputs_of(consumer, "r")
        assert (last.finish_reason, last.transfer_failure) == ("error", "timeout")
        assert last.error == "the KV blocks of 40 prompt tokens did not come within 2000 ms: timeout"
        assert last.timings is not None
        assert last.timings.transfer_ms == pytest.approx(2100.0)
        # Nothing was computed in its place, it is counted, and both sides are free at once: the lease had minutes left.
        assert consumer.stats().num_steps == 0
        assert (consumer.transfers.num_failed, consumer.transfers.recomputed_tokens) == ({"timeout": 1}, 0)
        until(lambda: not producer.has_unfinished, producer)
        assert producer.transfers.num_leases_ended == {"released": 1}
        for one in (producer, consumer):
            assert one.num_free_blocks == one.info.num_blocks


def test_102_recomputing_instead_is_a_choice_and_never_silent() -> None:
    with (
        engines(decode={"on_transfer_failure": "recompute"}) as (producer, consumer),
        Line(producer.transfers_endpoint) as line,
    ):
        line.mode = "drop"
        offer = at(prefill(producer), line.endpoint)
        consumer.add_request(make_transfer_request(offer=offer))
        consumer.clock.now += 5.0
        outputs = outputs_of(consumer, "r")
        assert tokens_of(outputs) == fake_generate(make_transfer_request().prompt_token_ids, len(outputs))
        assert outputs[0].num_transferred_tokens == 0
        assert (consumer.transfers.num_failed, consumer.transfers.recomputed_tokens) == ({"timeout": 1}, 40)


def test_102_tiny_inputs_are_not_transferred() -> None:
    with engines(decode={"min_transfer_tokens": 64}) as (producer, consumer):
        assert answer(consumer, make_transfer_request(offer=prefill(producer)))[-1].finish_reason == "length"
        assert (consumer.transfers.num_started, consumer.transfers.num_skipped) == (0, 1)
        until(lambda: not producer.has_unfinished, producer)
        assert producer.num_free_blocks == producer.info.num_blocks


def test_102_a_client_that_leaves_between_prefill_and_decode_leaves_no_blocks_behind() -> None:
    with engines() as (producer, _):
        prefill(producer)
        assert producer.num_free_blocks < producer.info.num_blocks
        producer.abort("p")
        producer.checked_step()
        assert producer.num_free_blocks == producer.info.num_blocks


@pytest.mark.parametrize(("key_outlier", "passes"), [(0.0, True), (300.0, False)])
def test_106_a_quantized_kv_cache_is_served_to_the_model_that_keeps_its_answers_and_refused_to_the_other(
    key_outlier: float, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path / "cache"))
    model = save_tiny_llama(tmp_path / "tiny", key_outlier=key_outlier)
    config = make_config(model, kv_cache_dtype="int8")
    with pytest.raises(ModelError, match="has not been measured"):
        LLMEngine.from_config(config)
    report, record = measure_tiny(model, kv_cache_dtype="int8")
    write_gate_record(record)
    assert report.passed == passes
    if not passes:
        # both models compute the same as long as nothing is rounded: what all keys share, softmax does not see
        plain, _ = measure_tiny(save_tiny_llama(tmp_path / "plain", key_outlier=0.0), kv_cache_dtype="int8")
        expected = plain.buckets[0].perplexity_reference
        assert report.buckets[0].perplexity_reference == pytest.approx(expected, rel=0.05)
    if passes:
        assert LLMEngine.from_config(config).info.quantization_gate == "passed"
        return
    with pytest.raises(ModelError, match=r"(?s)has failed its regression gate.*FAILED KL divergence"):
        LLMEngine.from_config(config)
    forced = make_config(model, kv_cache_dtype="int8", force=True)
    assert LLMEngine.from_config(forced).info.quantization_gate == "forced_failed"
