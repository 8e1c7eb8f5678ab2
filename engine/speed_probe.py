"""Measures, on this machine and with the real model, what the planner has to know: prefill, decode, and transfer times.

Prefills of a few lengths teach the engine's own cost model; decode steps of growing batches are fitted by a line; and
blocks are sent through a real sender and receiver over the loopback, which shows what reading, digests and checks cost
whatever the network may do. Random token ids: times do not depend on them, and nothing is found in a cache.
"""

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.block_hash import BlockHash
from engine.config import EngineConfig
from engine.disaggregation.block_memory import TensorBlockMemory
from engine.disaggregation.leases import Lease, LeaseTable
from engine.disaggregation.receiver import FetchJob, FetchResult, KVReceiver
from engine.disaggregation.sender import KVSender
from engine.errors import EngineError
from engine.kv_cache import KVCache
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from engine.outputs import GenerateRequest, KVOffer, ModelInfo
from engine.planner import EngineSpeed
from engine.sampling_params import SamplingParams

BATCHES = (1, 4, 8)
NUM_DECODE_STEPS = 12
DECODE_PROMPT_TOKENS = 128
TRANSFER_BYTES = 64 << 20
_TIMEOUT_S = 60.0


class ProbeResult(NamedTuple):
    """What one engine on this machine can do."""

    info: ModelInfo
    speed: EngineSpeed
    transfer_bytes_per_s: float
    """KV blocks from one engine to another over the loopback, checks included."""


def probe(config: EngineConfig, prompt_lengths: Sequence[int]) -> ProbeResult:
    """Load the model and measure for some seconds; the lengths are those whose times matter.

    Raises:
        ModelError: the model cannot be found or read.
        EngineError: the loopback cannot be used.
    """
    cache = msgspec.structs.replace(config.cache, verify_isolation=False, second_tier="none")
    engine = LLMEngine.from_config(msgspec.structs.replace(config, cache=cache))
    rng = random.Random(0)
    longest = engine.info.max_model_len - 2
    # Twice each: the first prompt of a length may still pay for memory that is used for the first time.
    for length in [min(length, longest) for length in prompt_lengths] * 2:
        _run(engine, [_random_prompt(rng, engine.info, length)], num_tokens=1)
    coefficients = engine.cost_model.coefficients
    assert coefficients is not None, "a prefill was observed"
    decode_step_s, decode_sequence_s = fit_line(
        [(batch, _decode_step_s(engine, rng, batch)) for batch in BATCHES if batch <= config.scheduler.max_num_seqs]
    )
    runner = engine.runner
    assert isinstance(runner, ModelRunner), "from_config builds a model runner"
    rate = transfer_bytes_per_s(runner.kv_cache)
    engine.close()
    speed = EngineSpeed(
        prefill=coefficients,
        chunk_tokens=config.scheduler.max_chunk_tokens,
        decode_step_s=decode_step_s,
        decode_sequence_s=decode_sequence_s,
    )
    return ProbeResult(engine.info, speed, rate)


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Least squares of ``y = a + b * x`` with neither below 0; a single point is all slope."""
    if len(points) == 1:
        return 0.0, points[0][1] / points[0][0]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    if slope < 0:
        return mean_y, 0.0
    offset = mean_y - slope * mean_x
    if offset < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return offset, slope


def transfer_bytes_per_s(kv_cache: KVCache) -> float:
    """Bytes of KV blocks per second through a sender and a receiver over the loopback.

    Raises:
        EngineError: nothing came within a minute.
    """
    memory = TensorBlockMemory(kv_cache)
    num_blocks = max(1, min(kv_cache.num_blocks, TRANSFER_BYTES // memory.block_bytes))
    hashes = [BlockHash(index.to_bytes(32, "little")) for index in range(num_blocks)]
    leases = LeaseTable()
    block_ids = {block_hash: index for index, block_hash in enumerate(hashes)}
    for name in ("connect", "measure"):
        leases.grant(Lease(transfer_id=name, request_id=name, block_ids=block_ids, expires_s=float("inf")))
    sender = KVSender("tcp://127.0.0.1:0", leases, memory.read_blocks, memory.block_bytes)
    receiver = KVReceiver(memory.block_bytes)

    def job(name: str, hashes: Sequence[BlockHash]) -> FetchJob:
        offer = KVOffer(
            transfer_id=name,
            endpoint=sender.endpoint,
            num_tokens=num_blocks * kv_cache.block_size,
            layout=memory.layout,
            lease_ms=_TIMEOUT_S * 1e3,
        )
        return FetchJob(name, offer, hashes)

    try:
        # The first block pays for the connection, which later transfers find open.
        _fetch(receiver, job("connect", hashes[:1]))
        started_s = time.perf_counter()
        _fetch(receiver, job("measure", hashes))
        return num_blocks * memory.block_bytes / (time.perf_counter() - started_s)
    finally:
        receiver.close()
        sender.close()


def _fetch(receiver: KVReceiver, job: FetchJob) -> None:
    receiver.fetch(job)
    deadline_s = time.perf_counter() + _TIMEOUT_S
    results: list[FetchResult] = []
    while not results:
        if time.perf_counter() > deadline_s:
            raise EngineError(f"{len(job.hashes)} KV blocks did not come over the loopback within {_TIMEOUT_S:g} s")
        time.sleep(0.0002)
        results = receiver.take_results()
    if results[0].failure is not None:
        raise EngineError(f"KV blocks did not come over the loopback: {results[0].failure}")


def _decode_step_s(engine: LLMEngine, rng: random.Random, batch: int) -> float:
    """Median time of a step in which so many sequences decode."""
    length = min(DECODE_PROMPT_TOKENS, engine.info.max_model_len // 2)
    num_tokens = min(NUM_DECODE_STEPS, engine.info.max_model_len - length - 1)
    prompts = [_random_prompt(rng, engine.info, length) for _ in range(batch)]
    times = _run(engine, prompts, num_tokens=num_tokens)
    return sorted(times)[len(times) // 2]


def _run(engine: LLMEngine, prompts: Sequence[list[int]], *, num_tokens: int) -> list[float]:
    """Serve some prompts together; times of the steps in which all of them decoded."""
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        engine.add_request(
            GenerateRequest(request_id=f"probe-{index}", prompt_token_ids=prompt, sampling=sampling, cache_salt="probe")
        )
    times = []
    while engine.has_unfinished:
        running = engine.scheduler.running
        is_decode = len(running) == len(prompts) and all(sequence.is_decoding for sequence in running)
        started_s = time.perf_counter()
        engine.step()
        if is_decode:
            times.append(time.perf_counter() - started_s)
    return times


def _random_prompt(rng: random.Random, info: ModelInfo, length: int) -> list[int]:
    return [rng.randrange(info.vocab_size) for _ in range(length)]
