"""The parts of the scheduling bench that need no model: the cost of the control plane, and a thousand cancels."""

import gc
import random
import time
import tracemalloc
from collections import Counter
from statistics import median

import msgspec

from engine.config import AdmissionConfig, CacheConfig, EngineConfig, SchedulerConfig
from engine.kv_cache_manager import KVCacheManager
from engine.llm_engine import LLMEngine
from engine.outputs import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine.sequence import Sequence
from eval.benches.scheduling_model import Machine
from eval.benches.scheduling_records import ControlPlane, RandomCancels
from eval.benches.trace_simulation import BLOCK_SIZE, SimulatedRunner, make_cache_key
from eval.errors import EvalError

SEQUENCE_COUNTS = (1, 16, 64, 100, 250, 500, 1000)
NUM_CANCEL_ROUNDS = 4
STAGES = ("waiting", "prefilling", "decoding", "preempted")


def measure_control_plane(model_step_s: float, *, num_steps: int = 60) -> ControlPlane:
    """Median time of schedule and update per decode step, for growing numbers of streams.

    Processor time of the thread: a step of a thousand is long enough to be interrupted on a busy machine.
    """
    gc.collect()
    gc.freeze()  # as the engine process does once it has loaded the model
    try:
        times = [_control_plane_step_s(count, num_steps) for count in SEQUENCE_COUNTS]
    finally:
        gc.unfreeze()
    per_sequence = [seconds / count for seconds, count in zip(times, SEQUENCE_COUNTS, strict=True)]
    at_64 = times[SEQUENCE_COUNTS.index(64)]
    return ControlPlane(
        num_sequences=list(SEQUENCE_COUNTS),
        ms_per_step=[seconds * 1e3 for seconds in times],
        us_per_sequence=[seconds * 1e6 for seconds in per_sequence],
        linearity=per_sequence[-1] / per_sequence[SEQUENCE_COUNTS.index(100)],
        model_step_ms_64=model_step_s * 1e3,
        share_64=at_64 / (at_64 + model_step_s),
    )


def _control_plane_step_s(num_sequences: int, num_steps: int) -> float:
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=64 * num_sequences, max_num_seqs=num_sequences, max_num_waiting=num_sequences
        ),
        KVCacheManager(num_blocks=16 * num_sequences, block_size=BLOCK_SIZE, cache_key=make_cache_key()),
        max_model_len=16 * BLOCK_SIZE,
        admission=AdmissionConfig(max_num_waiting_tokens=None),
    )
    for place in range(num_sequences):
        scheduler.add(
            Sequence(
                request_id=str(place),
                prompt_token_ids=[place] * 64,
                sampling=SamplingParams(max_tokens=10 * BLOCK_SIZE, ignore_eos=True),
                cache_salt="tenant",
                arrival_s=0.0,
            )
        )
    runner = SimulatedRunner()
    times = []
    for step in range(num_steps + 2):
        start = time.thread_time()
        output = scheduler.schedule(0.0)
        scheduled_s = time.thread_time()
        sampled = runner.execute(output)
        sampled_s = time.thread_time()
        scheduler.update_from_output(output, sampled, 0.0)
        if step >= 2:  # the first one is the prefill
            times.append(time.thread_time() - sampled_s + scheduled_s - start)
    return median(times)


class SmallIdRunner:
    """Returns tokens that a tokenizer knows."""

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """The same printable tokens over and over."""
        return ModelRunnerOutput(
            sampled={
                part.request_id: 300 + part.num_output_tokens % 50
                for part in scheduler_output.scheduled
                if part.needs_sample
            }
        )


def measure_random_cancels(machine: Machine, num_requests: int, seed: int) -> RandomCancels:
    """Requests with random cancels at every stage, in rounds; after each one nothing is unfinished."""
    rng = random.Random(seed)
    info = msgspec.structs.replace(machine.runner.info, num_blocks=180)
    engine = LLMEngine(
        EngineConfig(cache=CacheConfig(), scheduler=SchedulerConfig(max_num_seqs=32, max_num_waiting=num_requests)),
        info=info,
        runner=SmallIdRunner(),
        tokenizer=machine.chat.tokenizer,
        cache_key=make_cache_key(),
    )
    # All there is to note is made before memory is looked at: it is the bench's, not the engine's.
    names = [f"c{place}" for place in range(num_requests)]
    ends = dict.fromkeys(names, "")
    stages = Counter(dict.fromkeys(STAGES, 0))
    memory_kib = []
    tracemalloc.start()
    try:
        for cancel_round in range(NUM_CANCEL_ROUNDS):
            first = cancel_round * num_requests // NUM_CANCEL_ROUNDS
            last = (cancel_round + 1) * num_requests // NUM_CANCEL_ROUNDS
            _cancel_round(engine, rng, names[first:last], ends, stages)
            if not engine.reset_prefix_cache():  # what is cached differs from round to round
                raise EvalError("a sequence holds blocks though nothing is unfinished")
            gc.collect()
            memory_kib.append(tracemalloc.get_traced_memory()[0] / 1024)
    finally:
        tracemalloc.stop()
    engine.scheduler.check_integrity()
    manager = engine.scheduler.kv_cache_manager
    counts = Counter(ends.values())
    num_used = manager.block_pool.num_blocks - manager.block_pool.num_free_blocks
    num_unanswered = counts[""]
    return RandomCancels(
        num_requests=num_requests,
        num_completed=counts["length"] + counts["stop"],
        num_cancelled=counts["abort"],
        cancelled_by_stage=dict(sorted(stages.items())),
        num_errors=counts["error"],
        num_blocks_in_use_at_end=num_used,
        num_unanswered=num_unanswered,
        memory_kib_after_quarter=memory_kib[0],
        memory_kib_at_end=memory_kib[-1],
        all_in_order=not num_used and not num_unanswered and memory_kib[-1] <= 1.1 * memory_kib[0],
    )


def _cancel_round(
    engine: LLMEngine, rng: random.Random, names: list[str], ends: dict[str, str], stages: Counter[str]
) -> None:
    waiting_names = list(names)
    while waiting_names or engine.has_unfinished:
        for _ in range(min(len(waiting_names), rng.randrange(4))):
            engine.add_request(_random_request(rng, waiting_names.pop()))
        if rng.random() < 0.08:
            live: dict[str, list[Sequence]] = {}
            for sequence in (*engine.scheduler.running, *engine.scheduler.waiting):
                live.setdefault(_stage(sequence), []).append(sequence)
            if live:
                stage = rng.choice(sorted(live))
                sequence = rng.choice(live[stage])
                output = engine.abort(sequence.request_id)
                if output is None or output.finish_reason != "abort":
                    raise EvalError(f"{sequence.request_id} was not cancelled")
                stages[stage] += 1
                ends[sequence.request_id] = "abort"
        for output in engine.step():
            if output.finish_reason is not None:
                if ends[output.request_id]:
                    raise EvalError(f"{output.request_id} ended twice")
                ends[output.request_id] = output.finish_reason


def _random_request(rng: random.Random, request_id: str) -> GenerateRequest:
    family = rng.randrange(8)
    prompt = [family + 300] * rng.choice([0, 64, 256]) + [rng.randrange(300, 400) for _ in range(rng.randint(1, 1500))]
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=rng.randint(1, 200), temperature=0.0, ignore_eos=True),
        cache_salt=f"tenant-{rng.randrange(3)}",
    )


def _stage(sequence: Sequence) -> str:
    if sequence.first_scheduled_s is None:
        return "waiting"
    if sequence.num_preemptions and sequence.num_computed_tokens == 0:
        return "preempted"
    return "decoding" if sequence.is_decoding else "prefilling"
