"""The engine in one process: requests in, and with every step the new text of some of them out.

``step()`` is the whole engine: schedule, execute, update, detokenise. It is synchronous and belongs to one thread;
``engine.process`` puts it into a process of its own and gives it an asynchronous client.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import msgspec

from engine.block_hash import CacheKey
from engine.config import EngineConfig
from engine.cost_model import PrefillCostModel, num_attention_pairs
from engine.detokenizer import IncrementalDetokenizer
from engine.disaggregation.connector import KVBlockMemory, make_connector
from engine.errors import GrammarError
from engine.grammar import GrammarCompiler
from engine.kv_cache_manager import KVCacheManager
from engine.logprobs import LogprobsQueue
from engine.outputs import EngineStats, GenerateRequest, ModelInfo, RequestOutput
from engine.quantization_gate import check_gate
from engine.scheduler import Scheduler, SequenceUpdate
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine.sequence import Sequence
from engine.stats import EngineCounters, request_timings
from engine.step_executor import Runner, execute_checked, execute_in_parts
from engine.tokenizer import Tokenizer
from engine.tool_parsers import choose_tool_parser

logger = logging.getLogger(__name__)


class LLMEngine:
    """Serves one model. Every request that was added ends with exactly one output that has a ``finish_reason``."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        info: ModelInfo,
        runner: Runner,
        tokenizer: Tokenizer,
        cache_key: CacheKey,
        grammars: GrammarCompiler | None = None,
        public_prefixes: Iterable[SequenceOf[int]] = (),
        block_memory: KVBlockMemory | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Compose an engine from its parts; ``from_config`` builds them.

        Args:
            config: limits of scheduler and cache; sizes that the model decides come from ``info``.
            info: the served model; ``block_size`` and ``num_blocks`` are those of the runner's KV cache.
            runner: executes steps.
            tokenizer: for output text and end-of-sequence ids.
            cache_key: what all KV blocks of this engine depend on.
            grammars: those of the runner; without them no output can be asked to follow a JSON schema.
            public_prefixes: token ids that prompts of all tenants may begin with and share.
            block_memory: the bytes behind the runner's blocks; needed by a role other than ``both``.
            clock: seconds from a fixed point that never go back.
        """
        self.config = config
        self.runner = runner
        self.tokenizer = tokenizer
        self.cost_model = PrefillCostModel.from_model_info(info, config.scheduler.max_chunk_tokens)
        self.scheduler = Scheduler(
            config.scheduler,
            KVCacheManager(
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                cache_key=cache_key,
                enable_prefix_caching=config.cache.enable_prefix_caching,
                public_prefixes=public_prefixes,
                num_second_tier_blocks=info.num_second_tier_blocks,
            ),
            max_model_len=info.max_model_len,
            eos_token_ids=tokenizer.eos_token_ids,
            cost_model=self.cost_model,
            admission=config.admission,
        )
        self.info = msgspec.structs.replace(info, max_model_len=self.scheduler.max_model_len)
        """The served model, with the window that the KV cache really admits."""
        self.on_started: Callable[[list[str]], None] | None = None
        """Hears, before a step is executed, of the requests of which it computes the first token ever."""
        self._connector = None
        if block_memory is not None:
            self._connector = make_connector(config.kv_transfer, self.scheduler, block_memory)
        self._clock = clock
        self._counters = EngineCounters()
        self._detokenizers: dict[str, IncrementalDetokenizer] = {}
        self._started: set[str] = set()
        self._logprobs: dict[str, LogprobsQueue] = {}
        self._grammars = grammars

    @classmethod
    def from_config(cls, config: EngineConfig) -> "LLMEngine":
        """Load a model and build the engine around it; this is where torch comes in.

        Raises:
            ModelError: the model cannot be found or read, does not fit the configuration, or is to be quantized in a
                format that has not passed its regression gate.
            EngineError: the prefix cache does not keep tenants apart.
        """
        from engine.chat_template import ChatTokenizer
        from engine.isolation import encode_public_prefixes, verify_isolation
        from engine.model_runner import ModelRunner, gate_key
        from engine.model_store import resolve_model

        model_path = resolve_model(config.model.model)
        key = gate_key(config, model_path)
        gate = check_gate(config, key)
        chat = ChatTokenizer.from_path(model_path)
        grammars = GrammarCompiler(chat.tokenizer)
        # Beside the start, not before it: the first request for JSON should not wait, nor any other for it.
        threading.Thread(target=grammars.warm_up, name="grammar-warm-up", daemon=True).start()
        runner = ModelRunner(config, model_path, eos_token_ids=chat.tokenizer.eos_token_ids, grammars=grammars)
        configured = config.model.tool_call_parser
        parser = choose_tool_parser(chat.template) if configured == "auto" else configured
        info = msgspec.structs.replace(runner.info, quantization_gate=gate, tool_call_parser=parser)
        cache_key = CacheKey(
            weights_digest=runner.info.weights_digest,
            tokenizer_digest=chat.tokenizer.digest,
            template_version=chat.version,
            dtype=runner.info.dtype,
            quantization=key.quantization,
            rope=runner.spec.rope.key,
        )

        def make(public_prefixes: Iterable[SequenceOf[int]], block_memory: KVBlockMemory | None = None) -> "LLMEngine":
            return cls(
                config,
                info=info,
                runner=runner,
                tokenizer=chat.tokenizer,
                cache_key=cache_key,
                grammars=grammars,
                public_prefixes=public_prefixes,
                block_memory=block_memory,
            )

        if config.cache.verify_isolation:
            # An engine of its own over the same runner: the blocks it uses are in no other engine's cache.
            verify_isolation(make(()), expects_hits=config.cache.enable_prefix_caching)
        return make(encode_public_prefixes(chat, config.cache.public_prefixes), runner.block_memory)

    @property
    def has_unfinished(self) -> bool:
        """``step()`` has something to do, be it to take back blocks that were kept for another engine."""
        return self.scheduler.has_unfinished or (self._connector is not None and self._connector.has_pending)

    def add_request(self, request: GenerateRequest) -> None:
        """Queue a request; its outputs come from ``step()``.

        Raises:
            ValueError: the prompt is empty or holds an id outside the vocabulary, the request id is in use, the
                cache salt is empty, the JSON schema cannot be followed (GrammarError), or a transfer is asked for
                that the engine's role does not make.
            PromptTooLongError: the prompt leaves no room for an output token, or passes the limit for prompts.
            OutputTooLongError: ``max_tokens`` passes the room left, and is set to be refused then.
            AdmissionError: it cannot be served now; it says why and when to come again.
        """
        for token_id in (min(request.prompt_token_ids, default=0), max(request.prompt_token_ids, default=0)):
            if not 0 <= token_id < self.info.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.info.vocab_size} ids")
        sampling = request.sampling
        if sampling.json_schema is not None:
            if self._grammars is None:
                raise GrammarError("this engine has no grammars for JSON output")
            self._grammars.compile(sampling.json_schema)  # kept for the runner
        sequence = Sequence.from_request(request, self._clock())
        if self._connector is not None:
            self._connector.check(sequence)
        elif request.do_remote_decode or request.remote_prefill is not None:
            raise ValueError("this engine has kv_transfer.role 'both': it makes no transfers")
        self.scheduler.add(sequence)
        self._detokenizers[request.request_id] = IncrementalDetokenizer(
            self.tokenizer,
            sampling.stop,
            min_tokens=sampling.min_tokens,
            visible_tokens=sampling.visible_tokens,
        )
        if sampling.top_logprobs is not None:
            self._logprobs[request.request_id] = LogprobsQueue(self.tokenizer)
        if self._connector is not None:
            self._connector.start(sequence, sequence.arrival_s)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Forget a request in whatever state it is and give back what it holds, or has left for another engine.

        Returns:
            Its last output, or ``None`` if there is no such request; it may have ended just before.
        """
        sequence = self.scheduler.abort(request_id, self._clock())
        if sequence is None and self._connector is not None:
            self._connector.release(request_id)
        return self._make_output(sequence, []) if sequence is not None else None

    def step(self) -> list[RequestOutput]:
        """Compute one step: at most the token budget, at most one new token per sequence.

        An exception while executing ends those sequences with ``finish_reason`` ``error`` that cannot be computed
        alone either; all others, and the engine, go on.
        """
        updates = self._poll_transfers()
        scheduler_output = self.scheduler.schedule(self._clock())
        updates += self.scheduler.take_expired()
        if scheduler_output.scheduled:
            self._tell_started(scheduler_output)
            try:
                runner_output = self._execute(scheduler_output)
            except Exception as error:
                logger.exception("a step of %d tokens failed", scheduler_output.num_tokens)
                self._counters.num_retried_steps += 1
                broken, scheduler_output = (
                    scheduler_output,
                    self.scheduler.recompute_after_failed_transfers(scheduler_output),
                )
                if self._connector is not None:
                    failed = self._connector.copies_failed(broken, self._clock())
                    updates += [SequenceUpdate(sequence, []) for sequence in failed]
                runner_output = execute_in_parts(self.runner, scheduler_output, error)
            updates += self.scheduler.update_from_output(scheduler_output, runner_output, self._clock())
            self._take_logprobs(updates, runner_output)
            self._counters.add_step(scheduler_output.num_tokens)
        return [self._detokenise(update) for update in updates]

    def stats(self) -> EngineStats:
        """State and totals after the last step."""
        kv_transfer = self._connector.stats() if self._connector is not None else None
        return self._counters.snapshot(self.scheduler, self.cost_model.coefficients, kv_transfer)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and no effect, while any sequence is running."""
        return self.scheduler.kv_cache_manager.reset_prefix_cache()

    def close(self) -> None:
        """End the threads and connections of transfers; the engine is not to be used any more."""
        if self._connector is not None:
            self._connector.close()

    def _poll_transfers(self) -> list[SequenceUpdate]:
        if self._connector is None:
            return []
        return [SequenceUpdate(sequence, []) for sequence in self._connector.poll(self._clock())]

    def _tell_started(self, scheduler_output: SchedulerOutput) -> None:
        if self.on_started is None:
            return
        parts = (part.request_id for part in scheduler_output.scheduled if part.num_output_tokens == 0)
        started = [request_id for request_id in parts if request_id not in self._started]
        if started:
            self._started.update(started)
            self.on_started(started)

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        start_s = self._clock()
        runner_output = execute_checked(self.runner, scheduler_output)
        self._observe(scheduler_output, self._clock() - start_s)
        return runner_output

    def _observe(self, scheduler_output: SchedulerOutput, seconds: float) -> None:
        """Let the cost model learn from steps with prefill in them; pure decode is bound by memory, not arithmetic."""
        scheduled = scheduler_output.scheduled
        if seconds > 0 and any(sequence.num_new_tokens > 1 for sequence in scheduled):
            num_pairs = sum(num_attention_pairs(sequence.num_new_tokens, sequence.start) for sequence in scheduled)
            self.cost_model.observe_step(scheduler_output.num_tokens, num_pairs, seconds)

    def _detokenise(self, update: SequenceUpdate) -> RequestOutput:
        """Turn new tokens into text, and end the sequence where the text reaches a stop string."""
        sequence, new_token_ids = update
        if new_token_ids:
            self._counters.add_token(sequence)
        text = ""
        if sequence.finish_reason != "error":
            now = sequence.last_token_s if sequence.last_token_s is not None else self._clock()
            detokenizer = self._detokenizers[sequence.request_id]
            # A token that ends the output is counted, but it is no text.
            is_ended_by_token = sequence.finish_reason == "stop"
            text = detokenizer.append([] if is_ended_by_token else new_token_ids)
            if sequence.is_finished:
                text += detokenizer.flush()
            if detokenizer.stop_reason is not None:
                self.scheduler.stop(sequence, detokenizer.stop_reason, now)
        return self._make_output(sequence, new_token_ids, text)

    def _take_logprobs(self, updates: list[SequenceUpdate], runner_output: ModelRunnerOutput) -> None:
        for sequence, new_token_ids in updates:
            sampled = runner_output.logprobs.get(sequence.request_id)
            queue = self._logprobs.get(sequence.request_id)
            if sampled is not None and queue is not None and new_token_ids:
                queue.append(new_token_ids[-1], sampled)

    def _make_output(self, sequence: Sequence, new_token_ids: list[int], text: str = "") -> RequestOutput:
        logprobs = self._logprobs.get(sequence.request_id)
        told = None
        if logprobs is not None:
            told = logprobs.take(self._detokenizers[sequence.request_id].num_settled_tokens)
        offer = None
        if sequence.is_finished:
            if self._connector is not None:
                offer = self._connector.finish(sequence, self._clock())
            del self._detokenizers[sequence.request_id]
            self._started.discard(sequence.request_id)
            self._logprobs.pop(sequence.request_id, None)
        has_first_token = bool(new_token_ids) and sequence.num_output_tokens == len(new_token_ids)
        return RequestOutput(
            request_id=sequence.request_id,
            text=text,
            new_token_ids=new_token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_output_tokens=sequence.num_output_tokens,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
            is_expired=sequence.is_expired,
            timings=request_timings(sequence) if has_first_token or sequence.is_finished else None,
            logprobs=told,
            max_tokens=sequence.sampling.max_tokens if sequence.max_tokens_asked is not None else None,
            num_transferred_tokens=sequence.num_transferred_tokens,
            kv_offer=offer,
            transfer_failure=sequence.transfer_failure,
        )
