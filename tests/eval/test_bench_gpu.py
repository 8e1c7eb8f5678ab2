"""The logic of the GPU bench, with sizes that a CPU computes at once."""

import click
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from eval.benches.bench_gpu import Deadline, Shape, attention_flops, check, main, run
from eval.benches.gpu_records import GpuReport
from kernels.attention import AttentionBackend, get_attention_backend
from kernels.attention.reference import ReferenceAttention

CPU = torch.device("cpu")
TINY = Shape(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    vocab_size=50,
    ceiling_size=64,
)


def _backends() -> list[AttentionBackend]:
    return [get_attention_backend(name, dtype=torch.bfloat16) for name in ("sdpa", "reference")]


def _run(limit_s: float) -> GpuReport:
    return run(
        Console(quiet=True),
        TINY,
        _backends(),
        device=CPU,
        lengths=(32, 48),
        decodes=((2, 40),),
        limit_s=limit_s,
        num_rounds=2,
    )


def test_report_has_a_figure_for_every_backend_and_length() -> None:
    report = _run(60)
    assert [(rate.backend, rate.num_tokens) for rate in report.prefill] == [
        ("sdpa", 32), ("reference", 32), ("sdpa", 48), ("reference", 48),
    ]  # fmt: skip
    assert [(rate.backend, rate.batch_size) for rate in report.decode] == [("sdpa", 2), ("reference", 2)]
    assert [rate.num_tokens for rate in report.model] == [32, 48]
    assert report.skipped == []
    for rate in report.prefill:
        assert rate.share_of_product == pytest.approx(rate.tflops / report.product_tflops)
    for rate in report.model:
        assert rate.tokens_per_s == pytest.approx(rate.num_tokens / rate.ttft_ms * 1e3)


def test_what_the_time_has_no_room_for_is_named() -> None:
    report = _run(1e-9)
    assert (report.prefill, report.decode, report.model) == ([], [], [])
    assert report.skipped == [
        "prefill, 32 tokens, sdpa",
        "prefill, 32 tokens, reference",
        "prefill, 48 tokens, sdpa",
        "prefill, 48 tokens, reference",
        "decode, 2 x 40, sdpa",
        "decode, 2 x 40, reference",
        "model",
    ]


def test_backend_that_computes_something_else_ends_the_bench() -> None:
    class Wrong(ReferenceAttention):
        name = "wrong"

        def attend(self, *arguments: object, **options: object) -> torch.Tensor:
            return super().attend(*arguments, **options) * 1.1  # type: ignore[arg-type]

    with pytest.raises(click.ClickException, match=r"wrong errs .* times as much as plain torch, the limit is 2"):
        check(TINY, [Wrong()], CPU, num_tokens=40)


def test_attention_counts_the_causal_half() -> None:
    assert attention_flops(TINY, 3) == 4 * 4 * 16 * 6


def test_deadline_notes_what_it_refuses() -> None:
    deadline = Deadline(-1)
    assert not deadline.allows("this")
    assert deadline.skipped == ["this"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_says_that_it_needs_a_gpu() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 1
    assert "needs a CUDA device" in result.output
