"""Prefill and decode in two engines, over fake models and a real connection: equal tokens, bounded waits, no leaks."""

import pytest
from factories_disaggregation import (
    BLOCK_SIZE,
    NUM_OUTPUT,
    NUM_TRANSFERRED,
    PROMPT,
    Line,
    TransferEngine,
    answer,
    at,
    config,
    engine,
    engines,
    make_transfer_request,
    offer_of,
    outputs_of,
    prefill,
    tokens_of,
    until,
)
from factories_engine import fake_generate, make_engine, make_request

import engine.disaggregation.receiver as receiver_module
from engine.config import CacheConfig, EngineConfig, KVTransferConfig
from engine.errors import EngineError
from engine.outputs import RequestOutput


def expect_nothing_held(producer: TransferEngine, consumer: TransferEngine) -> None:
    """Both engines come to rest with every block free and every lease ended."""
    until(lambda: not producer.has_unfinished and not consumer.has_unfinished, producer, consumer)
    for one in (producer, consumer):
        one.scheduler.check_integrity()
        assert one.num_free_blocks == one.info.num_blocks
        assert one.scheduler.kv_cache_manager.num_leased_blocks == 0
        assert len(one.scheduler.kv_cache_manager.received_blocks) == 0


def test_decode_engine_gives_the_tokens_of_a_single_engine_and_computes_only_what_no_block_holds() -> None:
    with engines() as (producer, consumer):
        outputs = answer(consumer, make_transfer_request(offer=prefill(producer)))
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
        assert [part.num_new_tokens for part in consumer.fake.steps[0].scheduled] == [len(PROMPT) - NUM_TRANSFERRED]
        assert outputs[0].num_transferred_tokens == NUM_TRANSFERRED
        assert outputs[0].num_cached_tokens == 0
        expect_nothing_held(producer, consumer)


def test_counters_of_both_sides_tell_what_was_transferred() -> None:
    with engines() as (producer, consumer):
        answer(consumer, make_transfer_request(offer=prefill(producer)))
        expect_nothing_held(producer, consumer)
        received, sent = consumer.transfers, producer.transfers
        num_bytes = NUM_TRANSFERRED // BLOCK_SIZE * consumer.memory.block_bytes
        assert (received.num_started, received.num_completed, received.num_bytes) == (1, 1, num_bytes)
        assert (received.transferred_tokens, received.recomputed_tokens) == (NUM_TRANSFERRED, 0)
        assert received.wait is not None
        assert sum(received.wait.counts) == 1
        assert (sent.num_offers, sent.num_leases, sent.num_bytes) == (1, 0, num_bytes)
        assert sent.num_leases_ended == {"fetched": 1}
        stats = consumer.stats()
        assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (len(PROMPT), 0)
        assert stats.transferred_prompt_tokens == NUM_TRANSFERRED


def test_prefill_engine_hits_its_own_prefix_and_offers_it_again() -> None:
    with engines() as (producer, consumer):
        prefill(producer, "p1")
        outputs = answer(producer, make_transfer_request(request_id="p2", do_remote_decode=True))
        assert outputs[-1].num_cached_tokens == NUM_TRANSFERRED
        assert tokens_of(answer(consumer, make_transfer_request(offer=offer_of(outputs)))) == fake_generate(
            PROMPT, NUM_OUTPUT
        )


def test_decode_engine_fetches_only_what_its_own_cache_lacks() -> None:
    with engines() as (producer, consumer):
        answer(consumer, make_transfer_request(PROMPT[:22], request_id="first", max_tokens=1))
        outputs = answer(consumer, make_transfer_request(offer=prefill(producer)))
        assert (outputs[0].num_cached_tokens, outputs[0].num_transferred_tokens) == (20, 20)
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)


def test_transferred_blocks_serve_later_prompts_of_the_same_tenant() -> None:
    with engines() as (producer, consumer):
        answer(consumer, make_transfer_request(offer=prefill(producer)))
        assert answer(consumer, make_transfer_request(request_id="r2"))[0].num_cached_tokens == NUM_TRANSFERRED
        assert answer(consumer, make_transfer_request(request_id="r3", salt="other"))[0].num_cached_tokens == 0


def test_offer_of_another_tenant_never_matches() -> None:
    with engines() as (producer, consumer):
        offer = prefill(producer, salt="tenant-a")
        outputs = answer(consumer, make_transfer_request(offer=offer, salt="tenant-b"))
        assert outputs[0].num_transferred_tokens == 0
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
        assert consumer.transfers.num_failed == {"not_offered": 1}
        assert producer.memory.num_reads == 0


def test_offer_of_other_weights_never_matches() -> None:
    with (
        engine(config("prefill"), weights_digest="other") as producer,
        engine(config("decode")) as consumer,
    ):
        answer(consumer, make_transfer_request(offer=prefill(producer)))
        assert consumer.transfers.num_failed == {"not_offered": 1}
        assert producer.memory.num_reads == 0


def test_blocks_in_another_form_are_not_even_asked_for() -> None:
    with (
        engine(config("prefill"), layout="bf16") as producer,
        engine(config("decode", on_transfer_failure="fail")) as consumer,
    ):
        last = answer(consumer, make_transfer_request(offer=prefill(producer)))[-1]
        assert (last.finish_reason, last.transfer_failure) == ("error", "layout")
        expect_nothing_held(producer, consumer)


def test_sequence_whose_blocks_are_on_the_way_holds_neither_a_place_nor_a_block() -> None:
    with engines(max_num_seqs=1) as (producer, consumer), Line(producer.transfers_endpoint) as line:
        line.mode = "hold"
        consumer.add_request(make_transfer_request(offer=at(prefill(producer), line.endpoint)))
        until(lambda: line.num_answers == 1, consumer)
        assert consumer.num_free_blocks == consumer.info.num_blocks
        assert (consumer.stats().num_running, consumer.stats().num_waiting) == (0, 1)
        assert consumer.stats().num_steps == 0
        # The only place is free for another one meanwhile.
        other = answer(consumer, make_transfer_request([1, 2, 3], request_id="other"))
        assert tokens_of(other) == fake_generate([1, 2, 3], NUM_OUTPUT)
        line.mode = "pass"
        assert tokens_of(outputs_of(consumer, "r")) == fake_generate(PROMPT, NUM_OUTPUT)
        expect_nothing_held(producer, consumer)


def test_parts_of_the_time_add_up_with_a_transfer() -> None:
    with engines() as (producer, consumer), Line(producer.transfers_endpoint) as line:
        line.mode = "hold"
        consumer.add_request(make_transfer_request(offer=at(prefill(producer), line.endpoint)))
        sequence = consumer.scheduler.get("r")
        assert sequence is not None
        consumer.clock.now += 1.5
        until(lambda: line.num_answers == 1, consumer)
        line.mode = "pass"
        until(lambda: consumer.transfers.num_completed == 1, consumer)
        consumer.clock.tick = 0.25
        timings = outputs_of(consumer, "r")[-1].timings
        assert timings is not None
        assert sequence.finished_s is not None
        parts_ms = timings.transfer_ms + timings.queue_ms + timings.prefill_ms + timings.decode_ms
        assert timings.transfer_ms == 1500.0
        assert timings.decode_ms > 0
        assert parts_ms == pytest.approx((sequence.finished_s - sequence.arrival_s) * 1e3)


@pytest.mark.parametrize("mode", ["corrupt", "truncate"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_blocks_that_arrive_damaged_are_never_used(mode: str, policy: str) -> None:
    with (
        engines(decode={"on_transfer_failure": policy}) as (producer, consumer),
        Line(producer.transfers_endpoint) as line,
    ):
        line.mode = mode  # type: ignore[assignment]
        outputs = answer(consumer, make_transfer_request(offer=at(prefill(producer), line.endpoint)))
        assert consumer.transfers.num_failed == {"corrupt": 1}
        if policy == "fail":
            assert (outputs[-1].finish_reason, outputs[-1].transfer_failure) == ("error", "corrupt")
            assert outputs[-1].error == "the KV blocks of 40 prompt tokens did not come: corrupt"
            assert consumer.transfers.recomputed_tokens == 0
        else:
            assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
            assert consumer.transfers.recomputed_tokens == NUM_TRANSFERRED
        expect_nothing_held(producer, consumer)
        assert producer.transfers.num_leases_ended == {"released": 1}


def test_late_transfer_is_ignored_when_it_comes_after_all() -> None:
    with engines() as (producer, consumer), Line(producer.transfers_endpoint) as line:
        line.mode = "hold"
        consumer.add_request(make_transfer_request(offer=at(prefill(producer), line.endpoint)))
        until(lambda: line.num_answers == 1, consumer)
        consumer.clock.now += 5.0
        outputs = outputs_of(consumer, "r")
        assert consumer.transfers.num_failed == {"timeout": 1}
        line.mode = "pass"
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
        # What comes late disturbs neither the finished one nor the next one over the same connection.
        again = make_transfer_request(
            request_id="r2", offer=at(prefill(producer, "p2", "t2"), line.endpoint), salt="t2"
        )
        assert answer(consumer, again)[0].num_transferred_tokens == NUM_TRANSFERRED
        expect_nothing_held(producer, consumer)


def test_connection_that_breaks_fails_the_transfer_at_once() -> None:
    with engines() as (producer, consumer):
        line = Line(producer.transfers_endpoint)
        line.mode = "drop"
        consumer.add_request(make_transfer_request(offer=at(prefill(producer), line.endpoint)))
        until(lambda: line.num_answers == 1, consumer)
        line.cut()
        outputs = outputs_of(consumer, "r")
        assert consumer.transfers.num_failed == {"peer_gone": 1}
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
        until(lambda: not producer.has_unfinished, producer)
        assert producer.transfers.num_leases_ended == {"peer_gone": 1}
        expect_nothing_held(producer, consumer)


def test_decode_engine_that_goes_away_while_fetching_leaves_no_lease() -> None:
    with engines() as (producer, consumer), Line(producer.transfers_endpoint) as line:
        line.mode = "hold"
        consumer.add_request(make_transfer_request(offer=at(prefill(producer), line.endpoint)))
        until(lambda: line.num_answers == 1, consumer)
        line.cut()  # to the prefill engine it is as if the process were gone
        until(lambda: not producer.has_unfinished, producer)
        assert producer.transfers.num_leases_ended == {"peer_gone": 1}
        assert producer.num_free_blocks == producer.info.num_blocks


def test_prefill_engine_that_was_restarted_knows_nothing_of_old_offers() -> None:
    with engine(config("prefill")) as old:
        offer = prefill(old)
    with engine(config("prefill", endpoint=offer.endpoint)) as new, engine(config("decode")) as consumer:
        outputs = answer(consumer, make_transfer_request(offer=offer))
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
        assert consumer.transfers.num_failed == {"not_offered": 1}
        # And the same connection serves new ones.
        again = make_transfer_request(request_id="r2", offer=prefill(new, salt="t2"), salt="t2")
        assert answer(consumer, again)[0].num_transferred_tokens == NUM_TRANSFERRED
        expect_nothing_held(new, consumer)


def test_prefill_engine_that_is_down_fails_the_transfer_before_the_timeout() -> None:
    with engine(config("prefill")) as old:
        offer = prefill(old)
    with engine(config("decode", on_transfer_failure="fail")) as consumer:
        last = answer(consumer, make_transfer_request(offer=offer))[-1]
        assert (last.finish_reason, last.transfer_failure) == ("error", "peer_gone")


def test_endpoint_that_is_none_fails_only_that_request() -> None:
    with engines(decode={"on_transfer_failure": "fail"}) as (producer, consumer):
        last = answer(consumer, make_transfer_request(offer=at(prefill(producer), "nonsense")))[-1]
        assert last.transfer_failure == "peer_gone"
        assert answer(consumer, make_transfer_request(request_id="r2"))[-1].finish_reason == "length"


def test_lease_ends_by_itself_and_the_offer_with_it() -> None:
    with engines(prefill={"lease_ms": 2000.0}) as (producer, consumer):
        offer = prefill(producer)
        assert producer.num_free_blocks == producer.info.num_blocks - NUM_TRANSFERRED // BLOCK_SIZE
        assert producer.transfers.num_leased_blocks == NUM_TRANSFERRED // BLOCK_SIZE
        producer.clock.now += 2.0
        producer.checked_step()
        assert producer.num_free_blocks == producer.info.num_blocks
        assert producer.transfers.num_leases_ended == {"expired": 1}
        answer(consumer, make_transfer_request(offer=offer))
        assert consumer.transfers.num_failed == {"not_offered": 1}


def test_offer_whose_client_left_is_released_by_abort() -> None:
    with engine(config("prefill")) as producer:
        prefill(producer)
        assert producer.abort("p") is None
        producer.checked_step()
        assert producer.transfers.num_leases_ended == {"released": 1}
        assert producer.num_free_blocks == producer.info.num_blocks


def test_leased_blocks_survive_prompts_that_would_evict_them() -> None:
    with engines() as (producer, consumer):
        offer = prefill(producer)
        for index in range(6):
            prompt = [(index * 31 + i) % 251 for i in range(100)]
            answer(producer, make_transfer_request(prompt, request_id=f"other{index}", max_tokens=1))
        outputs = answer(consumer, make_transfer_request(offer=offer))
        assert outputs[0].num_transferred_tokens == NUM_TRANSFERRED
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)


def test_offers_beyond_their_share_of_the_pool_are_not_made() -> None:
    with engine(config("prefill", max_leased_share=0.25)) as producer:
        prefill(producer, "p1", "t1")
        outputs = answer(producer, make_transfer_request(request_id="p2", do_remote_decode=True, salt="t2"))
        assert outputs[-1].finish_reason == "length"
        assert outputs[-1].kv_offer is None
        assert producer.transfers.num_offers_refused == 1
        assert producer.transfers.num_leased_blocks == NUM_TRANSFERRED // BLOCK_SIZE


def test_prompt_that_lacks_too_little_is_computed_at_once_and_the_lease_given_up() -> None:
    with engines(decode={"min_transfer_tokens": NUM_TRANSFERRED + 1}) as (producer, consumer):
        outputs = answer(consumer, make_transfer_request(offer=prefill(producer)))
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
        assert (consumer.transfers.num_started, consumer.transfers.num_skipped) == (0, 1)
        expect_nothing_held(producer, consumer)
        assert producer.transfers.num_leases_ended == {"released": 1}


def test_prompt_of_less_than_a_block_is_not_offered() -> None:
    with engine(config("prefill")) as producer:
        request = make_transfer_request([1, 2, 3], do_remote_decode=True)
        assert answer(producer, request)[-1].kv_offer is None
        assert not producer.has_unfinished


def test_cancel_while_blocks_are_on_the_way_frees_both_sides() -> None:
    with engines() as (producer, consumer), Line(producer.transfers_endpoint) as line:
        line.mode = "hold"
        consumer.add_request(make_transfer_request(offer=at(prefill(producer), line.endpoint)))
        until(lambda: line.num_answers == 1, consumer)
        consumer.clock.now += 0.5
        last = consumer.abort("r")
        assert last is not None
        assert last.timings is not None
        assert (last.finish_reason, last.timings.transfer_ms, last.timings.queue_ms) == ("abort", 500.0, 0.0)
        assert consumer.transfers.num_cancelled == 1
        line.mode = "pass"
        expect_nothing_held(producer, consumer)
        assert producer.transfers.num_leases_ended == {"released": 1}


def test_cancel_after_the_blocks_have_come_frees_both_sides() -> None:
    with engines(max_num_seqs=1) as (producer, consumer):
        consumer.add_request(make_transfer_request([9, 9, 9], request_id="runs", max_tokens=200))
        consumer.checked_step()
        consumer.add_request(make_transfer_request(offer=prefill(producer)))
        until(lambda: len(consumer.scheduler.kv_cache_manager.received_blocks) == 1, consumer)
        consumer.abort("r")
        consumer.abort("runs")
        expect_nothing_held(producer, consumer)
        assert (consumer.transfers.num_completed, consumer.transfers.transferred_tokens) == (1, 0)


def test_cancel_in_the_middle_of_a_remote_prefill_leaves_no_lease() -> None:
    with engine(config("prefill"), long_prefill_token_threshold=8) as producer:
        producer.add_request(make_transfer_request(do_remote_decode=True))
        producer.checked_step()
        last = producer.abort("r")
        assert last is not None
        assert last.kv_offer is None
        assert not producer.has_unfinished
        assert producer.num_free_blocks == producer.info.num_blocks


def test_deadline_that_passes_while_blocks_are_on_the_way_ends_the_transfer() -> None:
    with engines() as (producer, consumer), Line(producer.transfers_endpoint) as line:
        line.mode = "hold"
        offer = at(prefill(producer), line.endpoint)
        consumer.add_request(make_transfer_request(offer=offer, deadline_ms=1000.0))
        consumer.clock.now += 1.1
        last = outputs_of(consumer, "r")[-1]
        assert last.is_expired
        assert consumer.transfers.num_cancelled == 1
        expect_nothing_held(producer, consumer)


def test_step_that_fails_to_copy_blocks_recomputes_and_says_so() -> None:
    with engines() as (producer, consumer):
        consumer.add_request(make_transfer_request(offer=prefill(producer)))
        consumer.fake.fail_next_step = True
        outputs = outputs_of(consumer, "r")
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
        assert outputs[0].num_transferred_tokens == 0
        assert consumer.transfers.num_failed == {"copy": 1}
        assert consumer.transfers.recomputed_tokens == NUM_TRANSFERRED
        expect_nothing_held(producer, consumer)


def test_step_that_fails_to_copy_blocks_ends_the_request_where_the_policy_says_so() -> None:
    with engines(decode={"on_transfer_failure": "fail"}) as (producer, consumer):
        consumer.add_request(make_transfer_request(offer=prefill(producer)))
        consumer.fake.fail_next_step = True
        assert outputs_of(consumer, "r")[-1].transfer_failure == "copy"
        expect_nothing_held(producer, consumer)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_prefix_that_is_evicted_before_its_continuation_is_used_counts_as_a_failure(policy: str) -> None:
    with (
        engines(decode={"on_transfer_failure": policy}, num_blocks=32, max_num_seqs=2) as (producer, consumer),
        Line(producer.transfers_endpoint) as line,
    ):
        answer(consumer, make_transfer_request(PROMPT[:22], request_id="first", max_tokens=1))
        line.mode = "hold"
        consumer.add_request(make_transfer_request(offer=at(prefill(producer), line.endpoint)))
        until(lambda: line.num_answers == 1, consumer)
        answer(consumer, make_transfer_request([3] * 120, request_id="flood", max_tokens=1))
        line.mode = "pass"
        outputs = outputs_of(consumer, "r")
        assert consumer.transfers.num_failed == {"evicted": 1}
        if policy == "fail":
            assert outputs[-1].transfer_failure == "evicted"
        else:
            assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
            # The flood took 30 of 32 blocks, so two of the prefix are still there.
            assert consumer.transfers.recomputed_tokens == NUM_TRANSFERRED - 2 * BLOCK_SIZE
        expect_nothing_held(producer, consumer)


def test_transfers_beyond_the_buffer_wait_for_their_turn() -> None:
    one_prompt = NUM_TRANSFERRED // BLOCK_SIZE * BLOCK_SIZE * 8
    with (
        engines(decode={"kv_buffer_size": one_prompt + 1}) as (producer, consumer),
        Line(producer.transfers_endpoint) as line,
    ):
        line.mode = "hold"
        for name in ("a", "b", "c"):
            offer = at(prefill(producer, f"p-{name}", name), line.endpoint)
            consumer.add_request(make_transfer_request(request_id=name, offer=offer, salt=name))
        until(lambda: line.num_answers == 1, consumer)
        assert consumer.abort("b") is not None
        line.mode = "pass"
        outputs: dict[str, list[RequestOutput]] = {"a": [], "c": []}

        def are_finished() -> bool:
            for output in consumer.checked_step():
                outputs[output.request_id].append(output)
            return not consumer.has_unfinished

        until(are_finished)
        for of_one in outputs.values():
            assert tokens_of(of_one) == fake_generate(PROMPT, NUM_OUTPUT)
            assert of_one[0].num_transferred_tokens == NUM_TRANSFERRED
        assert (consumer.transfers.num_completed, consumer.transfers.num_cancelled) == (2, 1)
        expect_nothing_held(producer, consumer)
        assert producer.transfers.num_leases_ended == {"fetched": 2, "released": 1}


def test_long_prompt_comes_in_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "GROUP_BYTES", 3 * BLOCK_SIZE * 8)
    monkeypatch.setattr(receiver_module, "MAX_GROUPS_UNDER_WAY", 2)
    with engines() as (producer, consumer):
        outputs = answer(consumer, make_transfer_request(offer=prefill(producer)))
        assert tokens_of(outputs) == fake_generate(PROMPT, NUM_OUTPUT)
        assert producer.memory.num_reads == 4
        expect_nothing_held(producer, consumer)


def test_block_that_turned_out_wrong_ends_the_lease_that_holds_it() -> None:
    with engine(config("prefill")) as producer:
        prefill(producer)
        lease = producer.standing_leases()[0]
        producer.scheduler.kv_cache_manager.drop_blocks([next(iter(lease.block_ids.values()))])
        producer.checked_step()
        assert producer.transfers.num_leases_ended == {"poisoned": 1}
        assert producer.num_free_blocks == producer.info.num_blocks


def test_messages_that_are_none_are_ignored() -> None:
    with engines() as (producer, consumer), Line(producer.transfers_endpoint) as line:
        line.inject([b"\xc1 no msgpack"])
        outputs = answer(consumer, make_transfer_request(offer=at(prefill(producer), line.endpoint)))
        assert outputs[0].num_transferred_tokens == NUM_TRANSFERRED


def test_roles_refuse_what_they_do_not_do() -> None:
    with engines() as (producer, consumer):
        offer = prefill(producer)
        with pytest.raises(ValueError, match=r"needs an engine with kv_transfer\.role 'decode'"):
            producer.add_request(make_transfer_request(offer=offer))
        with pytest.raises(ValueError, match=r"needs an engine with kv_transfer\.role 'prefill'"):
            consumer.add_request(make_transfer_request(do_remote_decode=True))
        with pytest.raises(ValueError, match="role 'both'"):
            make_engine().add_request(make_transfer_request(do_remote_decode=True))
        assert not consumer.has_unfinished


def test_engine_without_a_role_counts_no_transfers() -> None:
    one = make_engine()
    one.add_request(make_request())
    assert one.stats().kv_transfer is None


def test_endpoint_that_is_taken_is_an_error_that_names_it() -> None:
    with engine(config("prefill")) as producer, pytest.raises(EngineError, match=producer.transfers_endpoint):
        TransferEngine(config("prefill", endpoint=producer.transfers_endpoint))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_transfer_timeout_ms", 0),
        ("lease_ms", -1),
        ("max_leased_share", 0),
        ("max_leased_share", 1.5),
        ("min_transfer_tokens", -1),
        ("kv_buffer_size", 0),
    ],
)
def test_settings_outside_their_range_name_the_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must .* got {value}"):
        KVTransferConfig(**{field: value})  # type: ignore[arg-type]


def test_roles_need_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match=r"needs cache\.enable_prefix_caching"):
        EngineConfig(cache=CacheConfig(enable_prefix_caching=False), kv_transfer=KVTransferConfig(role="decode"))
