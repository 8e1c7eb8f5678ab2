"""From a scheduler output to the rows of one forward pass."""

from factories_model import make_scheduled

from engine.input_batch import InputBatch
from engine.scheduler_output import SchedulerOutput


def _make_batch(*sequences: object) -> InputBatch:
    return InputBatch.from_scheduler_output(SchedulerOutput(scheduled=list(sequences)), block_size=4)  # type: ignore[arg-type]


def test_decodes_come_first_and_keep_their_order() -> None:
    batch = _make_batch(
        make_scheduled("chunk", token_ids=[5, 6, 7], start=4, block_ids=[0, 1], needs_sample=False),
        make_scheduled("b", token_ids=[8], start=5, block_ids=[2, 3]),
        make_scheduled("a", token_ids=[9], start=0, block_ids=[4]),
    )
    assert [sequence.request_id for sequence in batch.sequences] == ["b", "a", "chunk"]
    assert batch.token_ids.tolist() == [8, 9, 5, 6, 7]
    assert batch.positions.tolist() == [5, 0, 4, 5, 6]
    assert batch.metadata.num_decodes == 2
    assert batch.metadata.query_lens == (1, 1, 3)
    assert batch.metadata.context_lens == (5, 0, 4)
    assert batch.metadata.slot_mapping.tolist() == [3 * 4 + 1, 4 * 4, 4, 5, 6]


def test_output_rows_are_the_last_rows_of_sequences_that_need_a_token() -> None:
    batch = _make_batch(
        make_scheduled("whole", token_ids=[1, 2, 3], block_ids=[0]),
        make_scheduled("part", token_ids=[4, 5], block_ids=[1], needs_sample=False),
        make_scheduled("decode", token_ids=[6], start=3, block_ids=[2]),
        make_scheduled("rest", token_ids=[7, 8], start=2, block_ids=[3]),
    )
    assert [sequence.request_id for sequence in batch.sampled] == ["decode", "whole", "rest"]
    assert batch.output_rows.tolist() == [0, 3, 7]
    assert batch.token_ids[batch.output_rows].tolist() == [6, 3, 8]
