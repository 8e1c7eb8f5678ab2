"""Turns a ``SchedulerOutput`` into the tensors of one forward pass."""

from dataclasses import dataclass

import torch

from engine.scheduler_output import ScheduledSequence, SchedulerOutput
from kernels.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step, flattened: decodes first (as the attention metadata wants them), then everything longer."""

    sequences: list[ScheduledSequence]
    """In the order of the rows."""
    token_ids: torch.Tensor
    """(num_tokens,), int64."""
    positions: torch.Tensor
    """(num_tokens,), int64."""
    metadata: AttentionMetadata
    output_rows: torch.Tensor
    """(num_sampled,), int64: the last row of every sequence that needs a token."""
    sampled: list[ScheduledSequence]
    """Those sequences, in the order of ``output_rows``."""

    @classmethod
    def from_scheduler_output(
        cls, scheduler_output: SchedulerOutput, *, block_size: int, device: torch.device | str = "cpu"
    ) -> "InputBatch":
        """Lay out the step; ``scheduler_output`` schedules at least one sequence."""
        assert scheduler_output.scheduled, "a step without sequences cannot be computed"
        sequences = sorted(scheduler_output.scheduled, key=lambda sequence: sequence.num_new_tokens != 1)
        token_ids: list[int] = []
        positions: list[int] = []
        output_rows: list[int] = []
        for sequence in sequences:
            token_ids += sequence.token_ids
            positions += range(sequence.start, sequence.context_len)
            if sequence.needs_sample:
                output_rows.append(len(token_ids) - 1)
        return cls(
            sequences=sequences,
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            metadata=AttentionMetadata.build(
                query_lens=[sequence.num_new_tokens for sequence in sequences],
                context_lens=[sequence.start for sequence in sequences],
                block_tables=[sequence.block_ids for sequence in sequences],
                block_size=block_size,
                device=device,
            ),
            output_rows=torch.tensor(output_rows, dtype=torch.int64, device=device),
            sampled=[sequence for sequence in sequences if sequence.needs_sample],
        )
