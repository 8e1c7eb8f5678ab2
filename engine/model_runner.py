"""Computes the steps that the scheduler plans: tensors in, forward pass, sampled tokens out."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import DType, EngineConfig
from engine.cpu_runtime import configure_cpu_runtime
from engine.decode_graphs import CudaRecorder, DecodeGraphs, Recorder
from engine.disaggregation.block_memory import TensorBlockMemory
from engine.errors import ModelError
from engine.grammar import GrammarCompiler
from engine.input_batch import InputBatch
from engine.kv_cache import KVCache, num_kv_blocks
from engine.logits_processors import LogitsProcessors
from engine.models.registry import load_model
from engine.outputs import ModelInfo
from engine.quantization_gate import GateKey, kernel_code_version, quantization_format
from engine.sampler import LogprobRows, Sampler
from engine.sampling_params import SamplingParams
from engine.scheduler_output import ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from engine.second_tier_memory import SecondTierMemory
from engine.weights import open_checkpoint, weights_digest
from kernels.attention import AttentionBackend, AttentionMetadata, get_attention_backend
from kernels.attention.quantized import QuantizedKVAttention
from kernels.capabilities import default_dtype

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WARM_UP_TOKENS = 160


class ModelRunner:
    """One model, its weights and its KV cache. Belongs to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        attention_backend: str | None = None,
        device: torch.device | str = "cpu",
        eos_token_ids: Iterable[int] = (),
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Load the weights, reserve the KV cache, and compute a few tokens so that the first request need not wait.

        Args:
            config: dtype, window, cache size and threads are read from it.
            model_path: folder or file, as ``resolve_model`` returns it.
            attention_backend: a name of ``kernels.attention`` in place of the configured one.
            device: where weights and cache live.
            eos_token_ids: of the tokenizer; not chosen before ``min_tokens``.
            grammars: for outputs that follow a JSON schema.

        Raises:
            ModelError: the model cannot be read, is not supported, or does not fit the configuration.
        """
        configure_cpu_runtime(config.num_threads)
        self.device = torch.device(device)
        self.dtype = resolve_dtype(config.model.dtype, self.device)
        checkpoint = open_checkpoint(model_path)
        self.spec = checkpoint.spec
        self.max_model_len = _resolve_max_model_len(config.model.max_model_len, self.spec.max_position, model_path)
        self._attention = self._find_attention(attention_backend or config.model.attention_backend)
        self._kv_cache_dtype = config.cache.kv_cache_dtype
        if self._kv_cache_dtype != "auto":
            self._attention = QuantizedKVAttention(self._attention, self._kv_cache_dtype)
        self._model = load_model(
            checkpoint,
            self._attention,
            dtype=self.dtype,
            device=self.device,
            quantization=config.model.quantization,
        )
        self._sampler = Sampler(self.device)
        self._processors = LogitsProcessors(eos_token_ids=eos_token_ids, grammars=grammars, device=self.device)
        self.kv_cache = KVCache(
            self.spec,
            num_blocks=num_kv_blocks(
                self.spec,
                config.cache,
                self.dtype,
                max_num_tokens=config.scheduler.max_num_seqs * self.max_model_len,
                device=self.device,
            ),
            block_size=config.cache.block_size,
            dtype=self.dtype,
            device=self.device,
            kv_cache_dtype=self._kv_cache_dtype,
        )
        self.block_memory = TensorBlockMemory(self.kv_cache)
        """Blocks as bytes, for other engines."""
        self._second_tier = (
            SecondTierMemory(config.cache, self.kv_cache) if config.cache.second_tier != "none" else None
        )
        self.info = ModelInfo(
            model=str(model_path),
            architecture=self.spec.architecture,
            dtype=dtype_name(self.dtype),
            num_parameters=self._model.num_parameters,
            max_model_len=self.max_model_len,
            vocab_size=self.spec.vocab_size,
            num_layers=self.spec.num_layers,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            hidden_size=self.spec.hidden_size,
            intermediate_size=self.spec.intermediate_size,
            block_size=self.kv_cache.block_size,
            num_blocks=self.kv_cache.num_blocks,
            weights_digest=weights_digest(model_path),
            attention_backend=self._attention.name,
            num_second_tier_blocks=self._second_tier.num_slots if self._second_tier is not None else 0,
            quantization=config.model.quantization,
            kv_cache_dtype=self._kv_cache_dtype,
        )
        self._graphs: DecodeGraphs | None = None
        """Recorded decode steps, on GPUs and with kernels that can be replayed."""
        if self.device.type == "cuda" and getattr(self._attention, "is_replayable", False):
            self._graphs = self.make_decode_graphs(CudaRecorder(), max_num_seqs=config.scheduler.max_num_seqs)
        self._warm_up()

    def _find_attention(self, name: str) -> AttentionBackend:
        try:
            return get_attention_backend(None if name == "auto" else name, device=self.device, dtype=self.dtype)
        except ValueError as error:
            raise ModelError(f"attention_backend {name!r}: {error}") from error

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step.

        Returns:
            A token for every sequence that needs one, or under ``failed`` the reason why it has none.
        """
        self._processors.forget(scheduler_output.finished_request_ids)
        if not scheduler_output.scheduled:
            return ModelRunnerOutput(sampled={})
        if self._second_tier is not None:
            self._second_tier.execute(scheduler_output.kv_stores, scheduler_output.kv_loads)
        if scheduler_output.kv_receives:
            self.block_memory.write_blocks(scheduler_output.kv_receives)
        batch = InputBatch.from_scheduler_output(
            scheduler_output, block_size=self.kv_cache.block_size, device=self.device
        )
        if self._graphs is not None and self._graphs.can_run(batch):
            logits = self._graphs.run(batch)
        else:
            logits = self._model.compute_logits(self._forward(batch, self.kv_cache, batch.output_rows))
        if not batch.sampled:
            return ModelRunnerOutput(sampled={})
        # A sum is finite only if all its terms are, and costs a hundredth of asking each of them.
        if not logits.sum(dim=-1).isfinite().all():
            is_finite = torch.isfinite(logits).all(dim=-1).tolist()
            if not all(is_finite):
                return self._sample_finite(batch, logits, is_finite)
        return self._sample(batch.sampled, logits)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after every token of a prompt, computed in one step beside the served sequences.

        Returns:
            (num_tokens, vocab_size), fp32. For a window of 8,192 and a vocabulary of 49,152 that is 1.6 GB.
        """
        return self._model.compute_logits(self._hidden_of_prompt(token_ids, range(len(token_ids))))

    @torch.inference_mode()
    def logits_in_parts(
        self, token_ids: Sequence[int], rows: Sequence[int], rows_per_part: int
    ) -> Iterator[torch.Tensor]:
        """Logits after some tokens of a prompt, which is computed once; so many rows at a time are in memory.

        Args:
            token_ids: the prompt.
            rows: places of tokens in it, in the order in which their logits are wanted.
            rows_per_part: most rows of one part.

        Yields:
            (at most rows_per_part, vocab_size), fp32.
        """
        hidden = self._hidden_of_prompt(token_ids, rows)
        for start in range(0, len(rows), rows_per_part):
            yield self._model.compute_logits(hidden[start : start + rows_per_part])

    def _hidden_of_prompt(self, token_ids: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """(len(rows), hidden_size), computed in one step in a cache of its own."""
        block_size = self.kv_cache.block_size
        num_blocks = -(-len(token_ids) // block_size)
        sequence = ScheduledSequence(
            request_id="logits",
            token_ids=list(token_ids),
            start=0,
            block_ids=list(range(num_blocks)),
            sampling=SamplingParams(),
            needs_sample=True,
            num_output_tokens=0,
        )
        batch = InputBatch.from_scheduler_output(
            SchedulerOutput(scheduled=[sequence]), block_size=block_size, device=self.device
        )
        scratch = KVCache(
            self.spec,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
            kv_cache_dtype=self._kv_cache_dtype,
        )
        return self._forward(batch, scratch, torch.tensor(rows, dtype=torch.int64, device=self.device))

    def make_decode_graphs(self, recorder: Recorder, *, max_num_seqs: int) -> DecodeGraphs:
        """Replays of steps of up to ``max_num_seqs`` decodes over this runner's cache; see ``DecodeGraphs``."""

        def forward(
            token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, rows: torch.Tensor
        ) -> torch.Tensor:
            return self._model.compute_logits(self._model.forward(token_ids, positions, self.kv_cache, metadata, rows))

        return DecodeGraphs(
            forward,
            self._attention,
            recorder,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.kv_cache.block_size,
            dtype=self.dtype,
            device=self.device,
        )

    def _forward(self, batch: InputBatch, kv_cache: KVCache, output_rows: torch.Tensor) -> torch.Tensor:
        """Hidden states of ``output_rows``: (num_output_rows, hidden_size)."""
        metadata = self._attention.prepare(batch.metadata, dtype=self.dtype)
        return self._model.forward(batch.token_ids, batch.positions, kv_cache, metadata, output_rows)

    def _sample(self, sequences: list[ScheduledSequence], logits: torch.Tensor) -> ModelRunnerOutput:
        """Choose a token for each sequence from its row of finite logits, which are changed in place."""
        sampling = [sequence.sampling for sequence in sequences]
        logprobs = LogprobRows(logits, sampling)
        failed = self._processors.apply(logits, sequences)
        tokens = self._sampler.sample(logits, sampling, [sequence.num_output_tokens for sequence in sequences])
        rows = [row for row, sequence in enumerate(sequences) if sequence.request_id not in failed]
        told = logprobs.of(tokens)
        return ModelRunnerOutput(
            sampled={sequences[row].request_id: tokens[row] for row in rows},
            failed=failed,
            logprobs={sequences[row].request_id: told[row] for row in rows if row in told},
        )

    def _sample_finite(self, batch: InputBatch, logits: torch.Tensor, is_finite: list[bool]) -> ModelRunnerOutput:
        """Fail the sequences whose logits overflowed and leave no trace of them in blocks that others will use."""
        failed = {}
        poisoned: list[int] = []
        for sequence, finite in zip(batch.sampled, is_finite, strict=True):
            if not finite:
                logger.error("%s has logits that are not finite", sequence.request_id)
                failed[sequence.request_id] = f"the model's logits are not finite in {self.info.dtype}"
                poisoned += self.kv_cache.clear_non_finite(sequence.block_ids)
        healthy = [sequence for sequence in batch.sampled if sequence.request_id not in failed]
        if not healthy:
            return ModelRunnerOutput(sampled={}, failed=failed, poisoned_block_ids=poisoned)
        output = self._sample(healthy, logits[torch.tensor(is_finite)])
        return replace(output, failed={**failed, **output.failed}, poisoned_block_ids=poisoned)

    def _warm_up(self) -> None:
        """The first call of each matrix product generates code for it."""
        self.logits([0] * min(_WARM_UP_TOKENS, self.max_model_len))
        self.logits([0])


def resolve_dtype(name: DType, device: torch.device) -> torch.dtype:
    """The torch dtype of a configured one; ``auto`` is bf16 where ``device`` computes it natively, else fp32."""
    return default_dtype(device) if name == "auto" else _DTYPES[name]


def gate_key(config: EngineConfig, model_path: Path, device: torch.device | str = "cpu") -> GateKey:
    """What a record of the quantization gate has to be of for an engine with this configuration.

    Raises:
        ModelError: a file of the model is missing.
    """
    return GateKey(
        weights_digest=weights_digest(model_path),
        quantization=quantization_format(config),
        dtype=dtype_name(resolve_dtype(config.model.dtype, torch.device(device))),
        code_version=kernel_code_version(),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype: ``fp32``, ``bf16`` or ``fp16``."""
    return next(name for name, known in _DTYPES.items() if known == dtype)


def _resolve_max_model_len(configured: int | None, max_position: int, model_path: Path) -> int:
    if configured is None:
        return max_position
    if configured > max_position:
        raise ModelError(f"max_model_len {configured} exceeds the {max_position} positions of {model_path}")
    return configured
