"""Builds engine parts with defaults, and a fake model whose tokens depend on everything in its paged KV cache."""

import hashlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from engine.block_hash import CacheKey
from engine.config import AdmissionConfig, CacheConfig, EngineConfig, SchedulerConfig
from engine.cost_model import PrefillCostModel
from engine.kv_cache_manager import KVCacheManager
from engine.llm_engine import LLMEngine
from engine.outputs import GenerateRequest, ModelInfo, RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine.sequence import Sequence
from engine.tokenizer import Tokenizer
from engine.tokenizer_source import TokenizerSource, bytes_to_unicode

EOS_TOKEN_ID = 256
FAKE_VOCAB_SIZE = 257
"""A byte each, and the end of sequence."""


def make_cache_key(**overrides: str) -> CacheKey:
    fields = {
        "weights_digest": "weights",
        "tokenizer_digest": "tokenizer",
        "template_version": "template",
        "dtype": "fp32",
        "quantization": "none",
        "rope": "default:10000",
    }
    return CacheKey(**(fields | overrides))


def make_sequence(
    prompt: SequenceOf[int] | int = 4,
    *,
    request_id: str = "r0",
    max_tokens: int = 8,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    cache_salt: str = "tenant",
    arrival_s: float = 0.0,
    priority: int = 0,
    deadline_s: float | None = None,
) -> Sequence:
    """A waiting sequence; a prompt given as a number is that many tokens 0, 1, 2, ..."""
    return Sequence(
        request_id=request_id,
        prompt_token_ids=list(range(prompt)) if isinstance(prompt, int) else list(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
        ),
        cache_salt=cache_salt,
        arrival_s=arrival_s,
        priority=priority,
        deadline_s=deadline_s,
    )


def make_request(
    prompt: SequenceOf[int] | int = 4,
    *,
    request_id: str = "r0",
    max_tokens: int = 8,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    cache_salt: str = "tenant",
    deadline_ms: float | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=list(range(prompt)) if isinstance(prompt, int) else list(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens, temperature=0.0, stop=stop, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
        ),
        cache_salt=cache_salt,
        deadline_ms=deadline_ms,
    )


def make_kv_cache_manager(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    public_prefixes: Iterable[SequenceOf[int]] = (),
    num_second_tier_blocks: int = 0,
) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        cache_key=make_cache_key(),
        enable_prefix_caching=enable_prefix_caching,
        public_prefixes=public_prefixes,
        num_second_tier_blocks=num_second_tier_blocks,
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    long_prefill_token_threshold: int = 0,
    max_num_waiting: int = 64,
    max_model_len: int = 256,
    eos_token_ids: Iterable[int] = (),
    enable_prefix_caching: bool = True,
    public_prefixes: Iterable[SequenceOf[int]] = (),
    num_second_tier_blocks: int = 0,
    cost_model: PrefillCostModel | None = None,
    admission: AdmissionConfig | None = None,
    ageing_ms_per_token: float = 0.0,
    **config: object,
) -> Scheduler:
    """A scheduler that without ``ageing_ms_per_token`` serves in order of arrival."""
    return Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            long_prefill_token_threshold=long_prefill_token_threshold,
            max_num_waiting=max_num_waiting,
            ageing_ms_per_token=ageing_ms_per_token,
            **config,  # type: ignore[arg-type]
        ),
        make_kv_cache_manager(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            public_prefixes=public_prefixes,
            num_second_tier_blocks=num_second_tier_blocks,
        ),
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        cost_model=cost_model,
        admission=admission,
    )


def make_model_info(**overrides: object) -> ModelInfo:
    """SmolLM2-135M's shape."""
    fields: dict[str, object] = {
        "model": "fake",
        "architecture": "llama",
        "dtype": "fp32",
        "num_parameters": 134_515_008,
        "max_model_len": 8192,
        "vocab_size": 49152,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "block_size": 16,
        "num_blocks": 512,
        "weights_digest": "weights",
        "attention_backend": "fake",
    }
    return ModelInfo(**(fields | overrides))  # type: ignore[arg-type]


def make_byte_tokenizer() -> Tokenizer:
    """A tokenizer whose id is the byte, and 256 the end of sequence."""
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(
        TokenizerSource(
            backend=backend,
            vocab_size=FAKE_VOCAB_SIZE,
            named_tokens={"eos_token": "<|end|>"},
            bos_token_id=None,
            add_bos_token=False,
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
            chat_template=None,
        )
    )


DIGEST_BYTES = 8
"""What a slot of the fake model holds."""


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def _sample(past: Iterable[bytes]) -> int:
    return int.from_bytes(_digest(*past), "little") % FAKE_VOCAB_SIZE


def fake_next_token(prefix_token_ids: Iterable[int]) -> int:
    """What ``FakeModelRunner`` samples after these tokens, computed without any cache."""
    state = b""
    states = []
    for token_id in prefix_token_ids:
        state = _digest(state, token_id.to_bytes(4, "little"))
        states.append(state)
    return _sample(states)


def fake_generate(prompt_token_ids: SequenceOf[int], num_tokens: int) -> list[int]:
    """The next ``num_tokens`` tokens of the fake model, computed without any cache."""
    token_ids = list(prompt_token_ids)
    for _ in range(num_tokens):
        token_ids.append(fake_next_token(token_ids))
    return token_ids[len(prompt_token_ids) :]


class FakeModelRunner:
    """A model that reads its past only from paged memory, as a real one does.

    Each slot holds a digest of its token and of the slot before it, the next token is a digest of all slots in the
    block table. A block that is shared wrongly, overwritten while in use, or found before it is computed changes the
    tokens. A step that is told to fail first writes garbage into all slots it was given.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [b"never written"] * (num_blocks * block_size)
        self.tier: dict[int, list[bytes]] = {}
        """Second tier: what each of its slots holds."""
        self.steps: list[SchedulerOutput] = []
        self.fail_next_step = False
        self.failing_request_ids: set[str] = set()
        """Sequences that fail alone."""
        self.poisoned_block_ids: list[int] = []
        """Told with the next step, and cleared then."""
        self.dirty_after_step: list[int] = []
        """Blocks that hold garbage after the next step."""
        self.raising_request_ids: set[str] = set()
        """A step that holds one of these raises."""

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(scheduler_output)
        size = self.block_size
        for store in scheduler_output.kv_stores:
            self.tier[store.slot] = self.slots[store.block_id * size : (store.block_id + 1) * size]
        for load in scheduler_output.kv_loads:
            self.slots[load.block_id * size : (load.block_id + 1) * size] = self.tier[load.slot]
        for receive in scheduler_output.kv_receives:
            digests = bytes(receive.data)
            self.slots[receive.block_id * size : (receive.block_id + 1) * size] = [
                digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)
            ]
        if self.raising_request_ids.intersection(part.request_id for part in scheduler_output.scheduled):
            raise MemoryError("the fake device is full")
        if self.fail_next_step:
            self.fail_next_step = False
            for scheduled in scheduler_output.scheduled:
                for position in range(scheduled.start, scheduled.context_len):
                    self.slots[self._slot(scheduled.block_ids, position)] = b"garbage"
            raise RuntimeError("the fake device is lost")
        for scheduled in scheduler_output.scheduled:
            previous = self.slots[self._slot(scheduled.block_ids, scheduled.start - 1)] if scheduled.start else b""
            for offset, token_id in enumerate(scheduled.token_ids):
                previous = _digest(previous, token_id.to_bytes(4, "little"))
                self.slots[self._slot(scheduled.block_ids, scheduled.start + offset)] = previous
        sampled = {}
        failed = {}
        # After all writes, as in a layer of a real model: a block owned by two sequences would show here.
        for scheduled in scheduler_output.scheduled:
            if scheduled.request_id in self.failing_request_ids:
                failed[scheduled.request_id] = "the fake sequence is out of memory"
            elif scheduled.needs_sample:
                past = [self.slots[self._slot(scheduled.block_ids, i)] for i in range(scheduled.context_len)]
                sampled[scheduled.request_id] = _sample(past)
        poisoned, self.poisoned_block_ids = self.poisoned_block_ids, []
        for block_id in self.dirty_after_step:
            self.slots[block_id * size : (block_id + 1) * size] = [b"cleared"] * size
        self.dirty_after_step = []
        return ModelRunnerOutput(sampled=sampled, failed=failed, poisoned_block_ids=poisoned)

    def _slot(self, block_ids: list[int], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size


def run_step(scheduler: Scheduler, runner: FakeModelRunner, now: float = 0.0) -> dict[str, int]:
    """One step of scheduler and runner with all invariants checked; returns the tokens computed per sequence."""
    scheduler_output = scheduler.schedule(now)
    if scheduler_output.scheduled:
        scheduler.update_from_output(scheduler_output, runner.execute(scheduler_output), now)
    scheduler.check_integrity()
    return {scheduled.request_id: scheduled.num_new_tokens for scheduled in scheduler_output.scheduled}


class ScriptedRunner:
    """Returns given tokens, one per sequence and sample; then the end of sequence."""

    def __init__(self, token_ids: SequenceOf[int] = ()) -> None:
        self.token_ids = list(token_ids)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            sampled={
                scheduled.request_id: (
                    self.token_ids[scheduled.num_output_tokens]
                    if scheduled.num_output_tokens < len(self.token_ids)
                    else EOS_TOKEN_ID
                )
                for scheduled in scheduler_output.scheduled
                if scheduled.needs_sample
            }
        )


class FakeClock:
    """Advances by ``tick`` with every look at it."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def make_engine(
    runner: FakeModelRunner | ScriptedRunner | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    long_prefill_token_threshold: int = 0,
    max_num_waiting: int = 64,
    max_model_len: int = 256,
    enable_prefix_caching: bool = True,
    clock: Callable[[], float] | None = None,
) -> LLMEngine:
    """An engine over a fake runner and a byte tokenizer."""
    return LLMEngine(
        EngineConfig(
            cache=CacheConfig(enable_prefix_caching=enable_prefix_caching),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                long_prefill_token_threshold=long_prefill_token_threshold,
                max_num_waiting=max_num_waiting,
            ),
        ),
        info=make_model_info(
            block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len, vocab_size=FAKE_VOCAB_SIZE
        ),
        runner=runner if runner is not None else FakeModelRunner(num_blocks, block_size),
        tokenizer=make_byte_tokenizer(),
        cache_key=make_cache_key(),
        clock=clock if clock is not None else FakeClock(),
    )


def run_to_end(engine: LLMEngine, max_num_steps: int = 1000) -> dict[str, list[RequestOutput]]:
    """Step until nothing is unfinished, with all invariants checked; the outputs of each request in order."""
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(max_num_steps):
        if not engine.has_unfinished:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_integrity()
    raise AssertionError(f"still unfinished after {max_num_steps} steps")
