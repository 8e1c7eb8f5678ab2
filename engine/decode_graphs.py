"""Decode steps on a GPU as recorded CUDA graphs: one launch in place of hundreds.

A graph is recorded per batch size (1, 2, 4, 8, 16, ...) the first time it is wanted, over tensors of its own; a step
copies its ids, positions, lengths and block tables into them and replays. A step that fits no size exactly takes the
next larger one; the rows left over have length 0 and slot -1, and compute nothing that anybody reads::

    step of 3 decodes in the graph of 4     token_ids [9, 4, 7, 0]   seq_lens [70, 3, 12, 0]   slots [.., .., .., -1]

Only the Triton kernels read lengths on the device and skip empty rows, so only with them does it work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.input_batch import InputBatch
from kernels.attention import AttentionBackend, AttentionMetadata

_SMALL_SIZES = (1, 2, 4)
_STEP = 8

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor], torch.Tensor]
"""Token ids, positions, prepared metadata, output rows; returns logits, (num_output_rows, vocab_size)."""


class Recorder(Protocol):
    """Records a computation over fixed tensors."""

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Returns the tensor that the result is written to, and what computes it again."""
        ...


class CudaRecorder:
    """Records CUDA graphs, all of them in one pool of memory: they never run at once."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """See ``Recorder``. Computes once beforehand: kernels are compiled then, which must not be recorded."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        self._pool = self._pool or graph.pool()
        return result, graph.replay


@dataclass(frozen=True, slots=True)
class _Recording:
    """One batch size."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    logits: torch.Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """Runs steps of decodes by replaying them."""

    def __init__(
        self,
        forward: Forward,
        attention: AttentionBackend,
        recorder: Recorder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            forward: the model over its KV cache.
            attention: the backend that ``forward`` computes with.
            recorder: ``CudaRecorder()`` on a GPU.
            max_num_seqs: larger steps are not replayed.
            max_model_len: longest sequence, which the splits of the attention are laid out for.
            block_size: tokens of a KV block.
            dtype: of the model.
            device: of the model.
        """
        self._forward = forward
        self._attention = attention
        self._recorder = recorder
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._recordings: dict[int, _Recording] = {}

    def can_run(self, batch: InputBatch) -> bool:
        """Whether the step is decodes alone, all of which want a token, and not too many."""
        metadata = batch.metadata
        is_decode = metadata.num_decodes == metadata.num_seqs == len(batch.sampled)
        return is_decode and metadata.num_seqs <= self._max_num_seqs

    def run(self, batch: InputBatch) -> torch.Tensor:
        """Compute a step for which ``can_run`` says yes.

        Returns:
            (num_seqs, vocab_size), fp32, valid until the next step.
        """
        metadata = batch.metadata
        assert self.can_run(batch), f"{metadata.num_seqs} sequences cannot be replayed"
        num_seqs, num_blocks = metadata.block_tables.shape
        size = graph_size(num_seqs)
        recording = self._recordings.get(size)
        if recording is None:
            recording = self._recordings[size] = self._record(size)
        target = recording.metadata
        recording.token_ids[:num_seqs] = batch.token_ids
        recording.positions[:num_seqs] = batch.positions
        target.block_tables[:num_seqs, :num_blocks] = metadata.block_tables
        target.seq_lens[:num_seqs] = metadata.seq_lens
        target.seq_lens[num_seqs:] = 0
        target.slot_mapping[:num_seqs] = metadata.slot_mapping
        target.slot_mapping[num_seqs:] = -1
        recording.replay()
        return recording.logits[:num_seqs]

    def _record(self, size: int) -> _Recording:
        """With empty rows, so that recording leaves the KV cache as it is."""
        device = self._device
        num_blocks = -(-self._max_model_len // self._block_size)
        metadata = AttentionMetadata(
            query_lens=(1,) * size,
            # the host's lengths decide how many splits are launched, not what they read
            context_lens=(self._max_model_len - 1,) * size,
            num_decodes=size,
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(size, dtype=torch.int32, device=device),
            block_tables=torch.zeros((size, num_blocks), dtype=torch.int32, device=device),
            slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
            block_size=self._block_size,
        )
        prepared = self._attention.prepare(metadata, dtype=self._dtype)
        token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        positions = torch.zeros(size, dtype=torch.int64, device=device)
        rows = torch.arange(size, device=device)
        logits, replay = self._recorder(lambda: self._forward(token_ids, positions, prepared, rows))
        return _Recording(token_ids, positions, prepared, logits, replay)


def graph_size(num_seqs: int) -> int:
    """The batch size whose graph a step of ``num_seqs`` decodes takes: 1, 2, 4, then multiples of 8."""
    return next((size for size in _SMALL_SIZES if num_seqs <= size), -(-num_seqs // _STEP) * _STEP)
