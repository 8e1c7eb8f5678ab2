"""Blocks that came from another engine: found in order and without a gap, copied once, kept through a preemption."""

from factories_engine import FakeModelRunner, make_scheduler, make_sequence, run_step

from engine.block_hash import BlockHash, HashedBlock, extend_hashed_blocks
from engine.received_blocks import KVReceive, ReceivedBlocks


def make_chain(num_blocks: int) -> list[HashedBlock]:
    chain: list[HashedBlock] = []
    extend_hashed_blocks(chain, list(range(4 * num_blocks)), 4, b"extra")
    return chain


def data_of(chain: list[HashedBlock]) -> dict[BlockHash, bytes]:
    return {hashed.hash: bytes([index]) * 10 for index, hashed in enumerate(chain)}


def test_match_ends_at_the_first_gap() -> None:
    chain, received = make_chain(4), ReceivedBlocks()
    data = data_of(chain)
    del data[chain[2].hash]
    received.add("a", data)
    assert received.match("a", chain) == chain[:2]
    assert received.match("a", chain[2:]) == []
    assert received.match("b", chain) == []


def test_blocks_are_copied_once_and_dropped_after_the_step() -> None:
    chain, received = make_chain(2), ReceivedBlocks()
    received.add("a", data_of(chain))
    received.receive("a", chain[0], 7)
    assert received.num_bytes == 20
    assert received.take_receives() == [KVReceive(7, bytes([0]) * 10)]
    assert received.take_receives() == []
    received.end_step()
    assert (len(received), received.num_bytes) == (0, 0)


def test_copy_that_was_cancelled_before_the_step_leaves_the_blocks_to_be_found_again() -> None:
    chain, received = make_chain(2), ReceivedBlocks()
    received.add("a", data_of(chain))
    received.receive("a", chain[0], 7)
    received.cancel_receives([7])
    assert received.take_receives() == []
    received.end_step()
    assert received.match("a", chain) == chain


def test_sequence_that_is_preempted_before_its_first_step_finds_what_has_come_again() -> None:
    scheduler = make_scheduler()
    manager = scheduler.kv_cache_manager
    sequence = make_sequence(9)
    scheduler.add(sequence)
    manager.get_computed_blocks(sequence)
    manager.received_blocks.add("r0", {hashed.hash: bytes(32) for hashed in sequence.hashed_blocks[:2]})
    scheduler.schedule(0.0)
    scheduler._preempt(sequence)
    assert manager.get_computed_blocks(sequence).num_tokens == 8


def test_blocks_that_came_for_a_prefix_which_is_cached_meanwhile_are_dropped() -> None:
    scheduler = make_scheduler()
    runner = FakeModelRunner(64, 4)
    scheduler.add(make_sequence(9, request_id="first", max_tokens=1))
    run_step(scheduler, runner)
    sequence = make_sequence(9)
    scheduler.add(sequence)
    manager = scheduler.kv_cache_manager
    manager.get_computed_blocks(sequence)
    manager.received_blocks.add("r0", {hashed.hash: bytes(32) for hashed in sequence.hashed_blocks[:2]})
    run_step(scheduler, runner)
    assert (sequence.num_cached_tokens, sequence.num_transferred_tokens) == (8, 0)
    assert len(manager.received_blocks) == 0
