"""A prefill and a decode engine over fake models in one process, and a line between them that can be disturbed."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec
import zmq
from factories_engine import (
    DIGEST_BYTES,
    FAKE_VOCAB_SIZE,
    FakeClock,
    FakeModelRunner,
    make_byte_tokenizer,
    make_cache_key,
    make_model_info,
)

from engine.chat_template import ChatTokenizer
from engine.config import EngineConfig, KVTransferConfig, SchedulerConfig
from engine.disaggregation.leases import Lease
from engine.disaggregation.producer import KVProducer
from engine.errors import EngineDeadError
from engine.llm_engine import LLMEngine
from engine.outputs import EngineStats, GenerateRequest, KVOffer, KVTransferStats, ModelInfo, RequestOutput
from engine.sampling_params import SamplingParams

LineMode = Literal["pass", "drop", "hold", "corrupt", "truncate"]
BLOCK_SIZE = 4
PROMPT = [(7 * i) % 251 for i in range(42)]
"""Ten full blocks and two tokens."""
NUM_TRANSFERRED = 40
NUM_OUTPUT = 6
PATIENCE_S = 20.0
"""A test that waits longer for another thread has failed."""


class FakeBlockMemory:
    """Blocks of a ``FakeModelRunner`` as bytes."""

    def __init__(self, runner: FakeModelRunner, layout: str = "digests") -> None:
        self.layout = layout
        self._runner = runner
        self.num_reads = 0

    @property
    def block_bytes(self) -> int:
        return self._runner.block_size * DIGEST_BYTES

    def read_blocks(self, block_ids: SequenceOf[int]) -> bytes:
        self.num_reads += 1
        size = self._runner.block_size
        slots = [slot for block_id in block_ids for slot in self._runner.slots[block_id * size : (block_id + 1) * size]]
        assert all(len(slot) == DIGEST_BYTES for slot in slots), "a block is read that was never computed"
        return b"".join(slots)


class TransferEngine(LLMEngine):
    """An engine over a fake model whose parts a test can reach."""

    def __init__(
        self,
        kv_transfer: KVTransferConfig,
        *,
        num_blocks: int = 64,
        layout: str = "digests",
        weights_digest: str = "weights",
        max_num_seqs: int = 8,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.fake = FakeModelRunner(num_blocks, BLOCK_SIZE)
        self.memory = FakeBlockMemory(self.fake, layout)
        self.clock = FakeClock()
        super().__init__(
            EngineConfig(
                scheduler=SchedulerConfig(
                    max_num_batched_tokens=64,
                    max_num_seqs=max_num_seqs,
                    long_prefill_token_threshold=long_prefill_token_threshold,
                ),
                kv_transfer=kv_transfer,
            ),
            info=make_model_info(
                block_size=BLOCK_SIZE, num_blocks=num_blocks, max_model_len=256, vocab_size=FAKE_VOCAB_SIZE
            ),
            runner=self.fake,
            tokenizer=make_byte_tokenizer(),
            cache_key=make_cache_key(weights_digest=weights_digest),
            block_memory=self.memory,
            clock=self.clock,
        )

    @property
    def transfers(self) -> KVTransferStats:
        stats = self.stats().kv_transfer
        assert stats is not None
        return stats

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.num_free_blocks

    @property
    def transfers_endpoint(self) -> str:
        return self._producer.endpoint

    def standing_leases(self) -> list[Lease]:
        return self._producer.leases.standing()

    @property
    def _producer(self) -> KVProducer:
        assert isinstance(self._connector, KVProducer)
        return self._connector

    def checked_step(self) -> list[RequestOutput]:
        outputs = self.step()
        self.scheduler.check_integrity()
        stats = self.transfers
        ended = stats.num_completed + sum(stats.num_failed.values()) + stats.num_cancelled + stats.num_under_way
        assert stats.num_started == ended, f"{stats.num_started} transfers were started, {ended} are accounted for"
        return outputs


def config(role: Literal["prefill", "decode"], **overrides: object) -> KVTransferConfig:
    fields: dict[str, object] = {"role": role, "min_transfer_tokens": 1, "on_transfer_failure": "recompute"}
    return KVTransferConfig(**(fields | overrides))  # type: ignore[arg-type]


@contextmanager
def engines(
    *, prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None, **decode_engine: object
) -> Iterator[tuple[TransferEngine, TransferEngine]]:
    """A prefill and a decode engine; ``prefill`` and ``decode`` override their transfer settings."""
    with (
        engine(config("prefill", **(prefill or {}))) as producer,
        engine(config("decode", **(decode or {})), **decode_engine) as consumer,
    ):
        yield producer, consumer


@contextmanager
def engine(kv_transfer: KVTransferConfig, **overrides: object) -> Iterator[TransferEngine]:
    made = TransferEngine(kv_transfer, **overrides)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], bool], *stepping: TransferEngine) -> None:
    """Step some engines until ``condition``, which depends on another thread."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"nothing happened within {PATIENCE_S:g} s"
        for one in stepping:
            one.checked_step()
        time.sleep(0.002)


def answer(one: TransferEngine, request: GenerateRequest) -> list[RequestOutput]:
    """All outputs of a request; the engine steps until it has ended."""
    one.add_request(request)
    return outputs_of(one, request.request_id)


def outputs_of(one: TransferEngine, request_id: str) -> list[RequestOutput]:
    """Outputs of a request that was added already, until it has ended."""
    outputs: list[RequestOutput] = []

    def is_finished() -> bool:
        outputs.extend(output for output in one.checked_step() if output.request_id == request_id)
        return bool(outputs) and outputs[-1].finish_reason is not None

    until(is_finished)
    return outputs


def make_transfer_request(
    prompt: list[int] = PROMPT,
    *,
    request_id: str = "r",
    offer: KVOffer | None = None,
    do_remote_decode: bool = False,
    salt: str = "tenant",
    max_tokens: int = NUM_OUTPUT,
    deadline_ms: float | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1 if do_remote_decode else max_tokens, temperature=0.0, ignore_eos=True),
        cache_salt=salt,
        do_remote_decode=do_remote_decode,
        remote_prefill=offer,
        deadline_ms=deadline_ms,
    )


def prefill(one: TransferEngine, request_id: str = "p", salt: str = "tenant") -> KVOffer:
    return offer_of(answer(one, make_transfer_request(request_id=request_id, do_remote_decode=True, salt=salt)))


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def offer_of(outputs: list[RequestOutput]) -> KVOffer:
    offer = outputs[-1].kv_offer
    assert offer is not None, f"no offer came with {outputs[-1]}"
    return offer


def at(offer: KVOffer, endpoint: str) -> KVOffer:
    """The same offer at another endpoint."""
    return msgspec.structs.replace(offer, endpoint=endpoint)


class Line:
    """Passes messages between one decode engine and one prefill engine, or loses, holds, or changes the answers."""

    def __init__(self, target: str) -> None:
        self.mode: LineMode = "pass"
        self.num_answers = 0
        self._injected: list[list[bytes]] = []
        self._target = target
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.bind("tcp://127.0.0.1:0")
        self.endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        """Close both ends."""
        if not self._is_closing:
            self._is_closing = True
            self._thread.join()
            self._context.term()

    def inject(self, frames: list[bytes]) -> None:
        """Send a message of its own to both sides, when a decode engine has connected."""
        self._injected.append(frames)

    def _run(self) -> None:
        back = self._context.socket(zmq.DEALER)
        back.setsockopt(zmq.LINGER, 0)
        back.connect(self._target)
        peer = b""
        held: list[list[bytes]] = []
        with back, self._front:
            while not self._is_closing:
                if self._front.poll(2):
                    peer, *frames = self._front.recv_multipart()
                    back.send_multipart(frames)
                while peer and self._injected:
                    frames = self._injected.pop()
                    back.send_multipart(frames)
                    self._front.send_multipart([peer, *frames])
                if back.poll(2):
                    held.append(back.recv_multipart())
                    self.num_answers += len(held[-1]) > 1
                if self.mode == "drop":
                    held.clear()
                if self.mode != "hold":
                    for frames in held:
                        self._front.send_multipart([peer, *self._disturbed(frames)])
                    held.clear()

    def _disturbed(self, frames: list[bytes]) -> list[bytes]:
        if len(frames) < 2:
            return frames
        header, data = frames
        if self.mode == "corrupt":
            return [header, data[:-1] + bytes([data[-1] ^ 1])]
        if self.mode == "truncate":
            return [header, data[:-1]]
        return frames


class InProcessClient:
    """``EngineClient``'s interface over an engine in this process, which steps as long as it has work."""

    num_restarts = 0
    pid = None

    def __init__(self, one: TransferEngine) -> None:
        self.engine = one
        self.is_alive = True
        self.is_paused = False
        """The engine takes requests, but makes no step."""
        self.requests: list[GenerateRequest] = []
        self._outputs: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._task = asyncio.create_task(self._run())

    @property
    def info(self) -> ModelInfo:
        return self.engine.info

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def chat(self) -> ChatTokenizer:
        raise NotImplementedError("no test of a fake engine renders a chat")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        if not self.is_alive:
            raise EngineDeadError("it was killed")
        self.requests.append(request)
        self.engine.add_request(request)
        outputs = self._outputs[request.request_id] = asyncio.Queue()
        is_finished = False
        try:
            while not is_finished:
                item = await outputs.get()
                if isinstance(item, Exception):
                    is_finished = True
                    raise item
                is_finished = item.finish_reason is not None
                yield item
        finally:
            del self._outputs[request.request_id]
            if not is_finished:
                self.engine.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        if output is not None:
            self._outputs[request_id].put_nowait(output)

    async def release_offer(self, request_id: str) -> None:
        self.engine.abort(request_id)

    async def close(self, grace_s: float = 5.0) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def die(self) -> None:
        """Fail what is in flight, as ``EngineClient`` does when the process ends."""
        self.is_alive = False
        for outputs in self._outputs.values():
            outputs.put_nowait(EngineDeadError("it was killed"))

    async def _run(self) -> None:
        while True:
            if self.engine.has_unfinished and not self.is_paused:
                for output in self.engine.checked_step():
                    if output.request_id in self._outputs:
                        self._outputs[output.request_id].put_nowait(output)
            await asyncio.sleep(0.001)
