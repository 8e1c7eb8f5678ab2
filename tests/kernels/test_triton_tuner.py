"""The tuner of the Triton kernels, interpreted: what it leaves out, what it writes, and that the lookup reads it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories_triton import DEVICE

from kernels.triton_kernels.tuner import AttentionCase, candidates, fastest, tune, write_configs
from kernels.triton_kernels.tuning import KernelConfig, attention_class, find_in, read_configs

SMALL = KernelConfig(block_m=32, block_n=32)
OTHER = KernelConfig(block_m=64, block_n=16)


def _slower_each_time() -> Callable[[Callable[[], object]], float]:
    seconds = iter(range(1, 100))
    return lambda run: float(next(seconds))


def _faster_each_time() -> Callable[[Callable[[], object]], float]:
    seconds = iter(range(100, 0, -1))
    return lambda run: float(next(seconds))


def _case(kernel: str = "prefill") -> AttentionCase:
    return AttentionCase(kernel, 16, torch.float32, DEVICE, num_tokens=40, num_seqs=2)


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_the_fastest_that_agrees_is_chosen(kernel: str) -> None:
    assert fastest(_case(kernel), SMALL, [OTHER], _faster_each_time()) == OTHER
    assert fastest(_case(kernel), SMALL, [OTHER], _slower_each_time()) == SMALL


def test_a_candidate_that_computes_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = AttentionCase.compute

    def wrong(case: AttentionCase, config: KernelConfig) -> Callable[[], torch.Tensor]:
        return (lambda: compute(case, config)() + 1) if config == OTHER else compute(case, config)

    monkeypatch.setattr(AttentionCase, "compute", wrong)
    assert fastest(_case(), SMALL, [OTHER], _faster_each_time()) == SMALL


def test_a_candidate_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = AttentionCase.compute

    def too_large(case: AttentionCase, config: KernelConfig) -> Callable[[], torch.Tensor]:
        if config == OTHER:
            raise RuntimeError("out of shared memory")
        return compute(case, config)

    monkeypatch.setattr(AttentionCase, "compute", too_large)
    assert fastest(_case(), SMALL, [OTHER], _faster_each_time()) == SMALL


def test_the_lookup_finds_what_the_tuner_wrote(tmp_path: Path) -> None:
    table = tune(
        DEVICE,
        "NVIDIA Test 9",
        head_dims=(16,),
        dtypes=(torch.float32,),
        timer=_faster_each_time(),
        tried=lambda kernel: [OTHER],
        prefill_tokens=40,
        decode_context=40,
    )
    write_configs(table, tmp_path / "tuned.json")
    tables = [read_configs(tmp_path / "tuned.json")]
    shape_class = attention_class(16, torch.float32)
    for kernel in ("prefill", "decode"):
        assert find_in(tables, kernel, shape_class, "NVIDIA Test 9 PCIe") == OTHER
        with pytest.raises(ValueError, match="no Triton configuration"):
            find_in(tables, kernel, shape_class, "NVIDIA H100")


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_every_candidate_is_a_configuration_of_its_own(kernel: str) -> None:
    tried = list(candidates(kernel))
    assert len(set(tried)) == len(tried) >= 24
