"""Engines that the kernel bench compares, those of this process: ours in several settings, transformers.

Each computes random ids of the same model file with the same number of threads. Times are by the clock on the wall, or
of the processor where one thread works. For the others see ``peer_engines``.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from engine.config import CacheConfig, EngineConfig, ModelConfig, QuantizationName
from engine.model_runner import ModelRunner
from engine.models.decoder import DecoderModel
from engine.sampling_params import SamplingParams
from engine.scheduler_output import ScheduledSequence, SchedulerOutput
from eval.errors import EvalError
from kernels.native.library import DecoderTimes, NativeKernels, using_kernels

Clock = Literal["wall", "processor"]
CLOCKS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}

_BLOCK_SIZE = 16


class PrefillEngine(Protocol):
    """One engine with its model loaded."""

    name: str

    def prefill(self, token_ids: Sequence[int]) -> float | None:
        """Seconds from the ids of one prompt to its first token; ``None`` if its clock cannot be read."""
        ...

    def decode(self, batch_size: int, context_len: int, num_tokens: int) -> float | None:
        """Seconds for so many further tokens of each of several sequences; ``None`` if it cannot be asked for that."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class OwnEngine:
    """Our model runner: one step per prompt, or steps of ``chunk_size`` tokens as the scheduler makes them."""

    def __init__(
        self,
        name: str,
        model_path: Path,
        *,
        kernels: NativeKernels | None,
        num_threads: int,
        max_model_len: int,
        clock: Clock = "wall",
        quantization: QuantizationName = "none",
        chunk_size: int | None = None,
    ) -> None:
        self.name = name
        self._now = CLOCKS[clock]
        self._kernels = kernels
        self._chunk_size = chunk_size
        config = EngineConfig(
            model=ModelConfig(dtype="bf16", quantization=quantization),
            cache=CacheConfig(num_blocks=-(-max_model_len // _BLOCK_SIZE) * 2, block_size=_BLOCK_SIZE),
            num_threads=num_threads,
        )
        with using_kernels(kernels):
            self._runner = ModelRunner(config, model_path)

    def prefill(self, token_ids: Sequence[int]) -> float:
        """See ``PrefillEngine``."""
        started = self._now()
        chunk_size = self._chunk_size or len(token_ids)
        for start in range(0, len(token_ids), chunk_size):
            self._step([_sequence(0, token_ids[start : start + chunk_size], start, len(token_ids))])
        return self._now() - started

    def decode(self, batch_size: int, context_len: int, num_tokens: int) -> float | None:
        """See ``PrefillEngine``."""
        total = context_len + num_tokens + 1
        for index in range(batch_size):
            self._step([_sequence(index, range(100, 100 + context_len), 0, total)])
        started = self._now()
        for step in range(num_tokens):
            self._step([_sequence(index, [100 + step], context_len + step, total) for index in range(batch_size)])
        return self._now() - started

    def close(self) -> None:
        """Nothing runs."""

    def layer_times(self, token_ids: Sequence[int]) -> tuple[float, DecoderTimes] | None:
        """Seconds of one prefill, and where they went, both by the wall clock.

        ``None`` where the layers are not computed in one call.
        """
        model = self._runner._model
        native = model._native if isinstance(model, DecoderModel) else None
        if native is None:
            return None
        native.times = times = DecoderTimes()
        started = time.perf_counter()
        try:
            self.prefill(token_ids)
            return time.perf_counter() - started, times
        finally:
            native.times = None

    def _step(self, scheduled: list[ScheduledSequence]) -> None:
        with using_kernels(self._kernels):
            result = self._runner.execute(SchedulerOutput(scheduled=scheduled))
        if result.failed:
            raise EvalError(f"{self.name} failed: {result.failed}")


def _sequence(index: int, token_ids: Sequence[int], start: int, total: int) -> ScheduledSequence:
    num_blocks = -(-total // _BLOCK_SIZE)
    return ScheduledSequence(
        request_id=str(index),
        token_ids=list(token_ids),
        start=start,
        block_ids=list(range(index * num_blocks, (index + 1) * num_blocks)),
        sampling=SamplingParams(temperature=0.0),
        needs_sample=start + len(token_ids) >= total - 1 or len(token_ids) == 1,
        num_output_tokens=0,
    )


class TransformersEngine:
    """transformers in bf16 with SDPA: the model file de-quantized once, logits of the last position only."""

    name = "transformers bf16 sdpa"

    def __init__(self, model_path: Path, *, clock: Clock = "wall") -> None:
        self._now = CLOCKS[clock]
        from transformers import AutoModelForCausalLM, GgufConfig

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                model_path.parent,
                gguf_file=model_path.name,
                dtype=torch.bfloat16,
                attn_implementation="sdpa",
                quantization_config=GgufConfig(dequantize=True),
            ).eval()

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int]) -> float:
        """See ``PrefillEngine``."""
        ids = torch.tensor([list(token_ids)])
        started = self._now()
        int(self._model(ids, logits_to_keep=1, use_cache=True).logits[0, -1].argmax())
        return self._now() - started

    @torch.inference_mode()
    def decode(self, batch_size: int, context_len: int, num_tokens: int) -> float | None:
        """See ``PrefillEngine``."""
        ids = torch.arange(100, 100 + context_len).repeat(batch_size, 1)
        output = self._model(ids, logits_to_keep=1, use_cache=True)
        started = self._now()
        for _ in range(num_tokens):
            ids = output.logits[:, -1:].argmax(dim=-1)
            output = self._model(ids, past_key_values=output.past_key_values, logits_to_keep=1, use_cache=True)
        return self._now() - started

    def save(self, folder: Path) -> None:
        """Write the model as a folder that other engines read; its output layer is the embedding table."""
        # The weights are plain numbers by now; what is left of the file's quantization only forbids to write them.
        self._model.hf_quantizer = None
        if hasattr(self._model.config, "quantization_config"):
            del self._model.config.quantization_config
        self._model.config.tie_word_embeddings = True
        self._model.tie_weights()
        self._model.save_pretrained(folder)

    def close(self) -> None:
        """Nothing runs."""
