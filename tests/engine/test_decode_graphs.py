"""Recorded decode steps, with a recorder that computes again in place of a GPU's graph."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories_model import GREEDY, make_runner, make_scheduled, save_llama
from factories_triton import DEVICE

from engine.decode_graphs import CudaRecorder, DecodeGraphs, graph_size
from engine.input_batch import InputBatch
from engine.model_runner import ModelRunner
from engine.scheduler_output import SchedulerOutput
from kernels.triton_kernels.runtime import using_triton


class ComputingRecorder:
    """Replays by computing into the tensor of the first result."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        self.num_recorded += 1
        result = compute()

        def replay() -> None:
            result.copy_(compute())

        return result, replay


def _batch(runner: ModelRunner, lens: list[int]) -> InputBatch:
    scheduled = [
        make_scheduled(str(index), token_ids=[3 + index], start=length, block_ids=[2 * index, 2 * index + 1])
        for index, length in enumerate(lens)
    ]
    return InputBatch.from_scheduler_output(
        SchedulerOutput(scheduled=scheduled), block_size=runner.kv_cache.block_size, device=runner.device
    )


def _make_graphs(runner: ModelRunner, recorder: ComputingRecorder) -> DecodeGraphs:
    return runner.make_decode_graphs(recorder, max_num_seqs=8)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    if DEVICE.type != "cpu":
        pytest.skip("the runner of the factories computes on a CPU")
    with using_triton(True):
        return make_runner(save_llama(tmp_path), attention_backend="triton", max_model_len=64)


def test_replayed_steps_have_the_logits_of_computed_ones(runner: ModelRunner) -> None:
    recorder = ComputingRecorder()
    graphs = _make_graphs(runner, recorder)
    generator = torch.Generator().manual_seed(0)
    for layer in runner.kv_cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    for lens in ([5, 20, 0], [3, 1], [17, 30, 2, 9]):
        batch = _batch(runner, lens)
        before = [layer.clone() for layer in runner.kv_cache.layers]
        with using_triton(True), torch.inference_mode():
            expected = runner._model.compute_logits(runner._forward(batch, runner.kv_cache, batch.output_rows))
            after = [layer.clone() for layer in runner.kv_cache.layers]
            for layer, values in zip(runner.kv_cache.layers, before, strict=True):
                layer.copy_(values)
            actual = graphs.run(batch).clone()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
        for layer, values in zip(runner.kv_cache.layers, after, strict=True):
            torch.testing.assert_close(layer, values)
    assert recorder.num_recorded == 2  # of 4, of 2, of 4 again


def test_steps_that_are_no_plain_decodes_are_not_replayed(runner: ModelRunner) -> None:
    graphs = _make_graphs(runner, ComputingRecorder())
    assert graphs.can_run(_batch(runner, [4]))
    assert not graphs.can_run(_batch(runner, [1] * 9))
    prompt = make_scheduled("p", token_ids=[1, 2], block_ids=[0], sampling=GREEDY)
    unsampled = make_scheduled("u", token_ids=[1], block_ids=[0], needs_sample=False)
    for sequence in (prompt, unsampled):
        batch = InputBatch.from_scheduler_output(SchedulerOutput(scheduled=[sequence]), block_size=16)
        assert not graphs.can_run(batch)


def test_runner_on_a_cpu_records_nothing(runner: ModelRunner) -> None:
    assert runner._graphs is None


def test_sizes_leave_little_empty() -> None:
    assert [graph_size(size) for size in (1, 2, 3, 5, 8, 9, 64)] == [1, 2, 4, 8, 8, 16, 64]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_cuda_graph_computes_again_from_the_same_tensors() -> None:
    x = torch.ones(4, device="cuda")
    result, replay = CudaRecorder()(lambda: x * 2)
    x.fill_(5)
    replay()
    assert result.tolist() == [10.0] * 4
