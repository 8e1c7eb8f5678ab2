"""The parts of the scheduling bench that compute with the real model, in this process."""

import random
import time
from statistics import median
from typing import NamedTuple

from engine.block_hash import CacheKey
from engine.chat_template import ChatTokenizer
from engine.config import AdmissionConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.cost_model import CostCoefficients
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from engine.model_store import resolve_model
from engine.outputs import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from eval.benches.scheduling_records import LongPrefill
from eval.benches.trace_simulation import make_cache_key
from eval.errors import EvalError

_WARM_STEPS = 8
_TIMED_STEPS = 24


class TimedRunner:
    """A runner that notes how long each step took."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.seconds: list[float] = []

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Pass the step on."""
        start = time.perf_counter()
        output = self._runner.execute(scheduler_output)
        self.seconds.append(time.perf_counter() - start)
        return output


class Machine:
    """The model, loaded once; engines with other settings share it and its KV cache, one after the other."""

    def __init__(self, model: str, *, num_threads: int | None, seed: int) -> None:
        path = resolve_model(model)
        self.config = EngineConfig(
            model=ModelConfig(model=str(path)), cache=CacheConfig(memory_gib=1.5), num_threads=num_threads
        )
        self.chat = ChatTokenizer.from_path(path)
        self.runner = ModelRunner(self.config, path)
        self._cache_key: CacheKey = make_cache_key()
        self._random = random.Random(seed)
        self._num_requests = 0

    def engine(self, scheduler: SchedulerConfig, runner: TimedRunner | None = None) -> LLMEngine:
        """An engine with an empty cache."""
        return LLMEngine(
            EngineConfig(
                model=self.config.model,
                cache=self.config.cache,
                scheduler=scheduler,
                admission=AdmissionConfig(max_num_waiting_tokens=None),
            ),
            info=self.runner.info,
            runner=runner or self.runner,
            tokenizer=self.chat.tokenizer,
            cache_key=self._cache_key,
        )

    def request(self, num_tokens: int, max_tokens: int) -> GenerateRequest:
        """A prompt of random ids that no other request shares."""
        self._num_requests += 1
        return GenerateRequest(
            request_id=f"bench-{self._num_requests}",
            prompt_token_ids=[self._random.randrange(self.runner.info.vocab_size) for _ in range(num_tokens)],
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            cache_salt="bench",
        )


def measure_long_prefill(
    machine: Machine, *, prompt_tokens: int, num_streams: int, chunk_tokens: int, rounds: int
) -> tuple[LongPrefill, CostCoefficients]:
    """Streams beside one long prompt: rounds with chunks and without alternate. Also the costs that were fitted."""
    whole = SchedulerConfig(max_num_batched_tokens=machine.runner.max_model_len + num_streams)
    chunked = SchedulerConfig(max_num_batched_tokens=chunk_tokens)
    figures: dict[str, list[_Figures]] = {"chunked": [], "whole": []}
    fits: list[CostCoefficients] = []
    for place in range(rounds):
        order = ("chunked", "whole") if place % 2 == 0 else ("whole", "chunked")
        for name in order:
            engine = machine.engine(chunked if name == "chunked" else whole)
            figures[name].append(_beside_long_prompt(machine, engine, prompt_tokens, num_streams))
            if name == "chunked" and engine.cost_model.coefficients is not None:
                fits.append(engine.cost_model.coefficients)

    def ratio(index: int) -> float:
        pairs = zip(figures["chunked"], figures["whole"], strict=True)
        return median(chunks[index] / at_once[index] for chunks, at_once in pairs)

    result = LongPrefill(
        prompt_tokens=prompt_tokens,
        num_streams=num_streams,
        chunk_tokens=chunk_tokens,
        rounds=rounds,
        largest_gap_ms_chunked=[one.gap_s * 1e3 for one in figures["chunked"]],
        largest_gap_ms_whole=[one.gap_s * 1e3 for one in figures["whole"]],
        ttft_ms_chunked=[one.ttft_s * 1e3 for one in figures["chunked"]],
        ttft_ms_whole=[one.ttft_s * 1e3 for one in figures["whole"]],
        gap_ratio=ratio(_Figures._fields.index("gap_s")),
        ttft_ratio=ratio(_Figures._fields.index("ttft_s")),
        cpu_gap_ratio=ratio(_Figures._fields.index("cpu_gap_s")),
        cpu_ttft_ratio=ratio(_Figures._fields.index("cpu_ttft_s")),
    )
    return result, CostCoefficients(*(median(values) for values in zip(*fits, strict=True)))


class _Figures(NamedTuple):
    gap_s: float
    """Largest time between two tokens of a stream, from the arrival of the long prompt to its first token."""
    ttft_s: float
    cpu_gap_s: float
    cpu_ttft_s: float


def _beside_long_prompt(machine: Machine, engine: LLMEngine, prompt_tokens: int, num_streams: int) -> _Figures:
    for _ in range(num_streams):
        engine.add_request(machine.request(32, 10_000))
    for _ in range(_WARM_STEPS):
        engine.step()
    long = machine.request(prompt_tokens, 1)
    engine.add_request(long)
    start, cpu_start = time.perf_counter(), time.process_time()
    last, cpu_last = start, cpu_start
    gap = cpu_gap = 0.0
    while True:
        outputs = engine.step()
        now, cpu_now = time.perf_counter(), time.process_time()
        if sum(output.request_id != long.request_id for output in outputs) != num_streams:
            raise EvalError("a stream paused for a step")
        gap, cpu_gap = max(gap, now - last), max(cpu_gap, cpu_now - cpu_last)
        last, cpu_last = now, cpu_now
        if any(output.request_id == long.request_id for output in outputs):
            return _Figures(gap, now - start, cpu_gap, cpu_now - cpu_start)


def measure_decode_step_s(machine: Machine, num_streams: int) -> float:
    """Median time of the model for one step of so many streams."""
    runner = TimedRunner(machine.runner)
    engine = machine.engine(SchedulerConfig(max_num_seqs=num_streams), runner)
    for _ in range(num_streams):
        engine.add_request(machine.request(64, 10_000))
    while len(engine.scheduler.running) < num_streams or not all(s.is_decoding for s in engine.scheduler.running):
        engine.step()
    runner.seconds.clear()
    for _ in range(_TIMED_STEPS):
        engine.step()
    return median(runner.seconds)
