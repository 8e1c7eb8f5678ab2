"""Random lives of a prefill and a decode engine: whatever is lost, cancelled, late: tokens are right, all is freed."""

import random
import time
from contextlib import ExitStack

import pytest
from factories_disaggregation import (
    BLOCK_SIZE,
    Line,
    LineMode,
    TransferEngine,
    at,
    engines,
    make_transfer_request,
    tokens_of,
    until,
)
from factories_engine import fake_generate

from engine.outputs import GenerateRequest, RequestOutput

NUM_OPERATIONS = 120
POOL = 40
MODES: tuple[LineMode, ...] = ("pass", "pass", "pass", "pass", "pass", "drop", "hold", "corrupt", "truncate")


class Life:
    """Requests of three tenants over two engines, and what has become of them."""

    def __init__(self, seed: int, policy: str, stack: ExitStack) -> None:
        self.rng = random.Random(seed)
        self.producer, self.consumer = stack.enter_context(
            engines(
                prefill={"lease_ms": 4000.0, "max_leased_share": 0.6},
                decode={"on_transfer_failure": policy, "kv_transfer_timeout_ms": 2000.0, "kv_buffer_size": 600},
                num_blocks=POOL,
                max_num_seqs=3,
            )
        )
        self.line = stack.enter_context(Line(self.producer.transfers_endpoint))
        self.requests: dict[str, GenerateRequest] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.decoded: set[str] = set()

    def run(self) -> None:
        operations = (
            (self.prefill, 3),
            (self.decode, 3),
            (self.step, 8),
            (self.abort, 2),
            (self.disturb, 1),
            (self.wait, 1),
        )
        weighted = [operation for operation, weight in operations for _ in range(weight)]
        for _ in range(NUM_OPERATIONS):
            self.rng.choice(weighted)()
        self.line.mode = "pass"
        self.decode()
        until(self.is_at_rest)

    def prefill(self) -> None:
        length = self.rng.choice([3, 9, 18, 30, 41])
        prompt = [(self.rng.choice([3, 5]) * i) % 250 for i in range(length)]
        request = make_transfer_request(
            prompt,
            request_id=f"p{len(self.requests)}",
            do_remote_decode=True,
            salt=self.rng.choice("abc"),
        )
        self.add(self.producer, request)

    def decode(self) -> None:
        """Send on what was prefilled, and sometimes something that nobody prefilled, or the wrong tenant's."""
        for request_id, outputs in list(self.outputs.items()):
            offer = outputs[-1].kv_offer if outputs else None
            if offer is None or request_id in self.decoded:
                continue
            self.decoded.add(request_id)
            first = self.requests[request_id]
            salt = first.cache_salt if self.rng.random() < 0.9 else "stranger"
            self.add(
                self.consumer,
                make_transfer_request(
                    first.prompt_token_ids,
                    request_id=f"d{len(self.requests)}",
                    offer=at(offer, self.line.endpoint),
                    salt=salt,
                    max_tokens=self.rng.randint(1, 9),
                ),
            )

    def add(self, one: TransferEngine, request: GenerateRequest) -> None:
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        one.add_request(request)

    def step(self) -> None:
        """One step of each, and time for the threads between them."""
        time.sleep(0.004)
        for one in (self.producer, self.consumer):
            for output in one.checked_step():
                self.outputs[output.request_id].append(output)

    def abort(self) -> None:
        if self.requests:
            request_id = self.rng.choice(list(self.requests))
            for one in (self.producer, self.consumer):
                output = one.abort(request_id)
                if output is not None:
                    self.outputs[request_id].append(output)

    def disturb(self) -> None:
        self.line.mode = self.rng.choice(MODES)

    def wait(self) -> None:
        seconds = self.rng.choice([0.05] * 6 + [0.5, 2.5])
        for one in (self.producer, self.consumer):
            one.clock.now += seconds

    def is_at_rest(self) -> bool:
        self.step()
        self.wait()
        return not self.producer.has_unfinished and not self.consumer.has_unfinished


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_tokens_are_right_and_nothing_is_held(seed: int, policy: str) -> None:
    with ExitStack() as stack:
        life = Life(seed, policy, stack)
        life.run()
        assert life.decoded
        for request_id, outputs in life.outputs.items():
            request = life.requests[request_id]
            assert [output.finish_reason is not None for output in outputs].count(True) == 1
            assert outputs[-1].finish_reason is not None
            expected = fake_generate(request.prompt_token_ids, request.sampling.max_tokens)
            tokens = tokens_of(outputs)
            assert tokens == expected[: len(tokens)]
            if outputs[-1].finish_reason == "length":
                assert tokens == expected
            elif outputs[-1].finish_reason == "error":
                assert policy == "fail"
                assert outputs[-1].transfer_failure is not None
            if request.cache_salt == "stranger":
                assert all(output.num_transferred_tokens == 0 for output in outputs)
        for one in (life.producer, life.consumer):
            assert one.num_free_blocks == one.info.num_blocks
            assert len(one.scheduler.kv_cache_manager.received_blocks) == 0
        stats = life.consumer.transfers
        assert stats.num_under_way == 0
        used = sum(outputs[0].num_transferred_tokens for outputs in life.outputs.values())
        assert stats.transferred_tokens % BLOCK_SIZE == 0
        assert stats.transferred_tokens >= used - stats.recomputed_tokens
        ended = life.producer.transfers.num_leases_ended
        assert sum(ended.values()) == life.producer.transfers.num_offers
