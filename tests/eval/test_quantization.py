"""The gate of quantized formats: buckets, limits, verdicts; and that it tells sound formats from broken ones."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from factories_kernels import get_kernels
from factories_quantization import TEXT, make_config, measure_tiny, save_tiny_llama

from app.cli import main
from engine.errors import ModelError
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner, gate_key
from engine.quantization_gate import read_gate_record, write_gate_record
from engine.tokenizer import Tokenizer
from eval.benches.bench_quantization import QuantizationOptions, RealText, manual_text, measure_quantization
from eval.benches.quantization_probes import ModelPair, ask_needle, compare_text, make_needles
from eval.errors import EvalError
from eval.quantization import (
    Limits,
    NeedleResult,
    PositionValues,
    QuantizationReport,
    RecallResult,
    judge,
    summarise_needles,
    summarise_positions,
)
from kernels.attention import quantized as quantized_attention


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder without records."""
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path / "cache"))


def make_values(
    num_positions: int, *, increase: float = 0.0, kl: float = 0.0, num_wrong: int = 0, num_bad: int = 0
) -> PositionValues:
    """A text of ``num_positions`` predictions; the first ``num_wrong`` have another top token."""
    reference = np.linspace(2.0, 3.0, num_positions)
    places = np.arange(num_positions)
    return PositionValues(
        nll_reference=reference,
        nll_quantized=reference + increase,
        kl=np.full(num_positions, kl),
        max_deviation=places.astype(np.float64),
        is_same_top1=places >= num_wrong,
        is_finite=places >= num_bad,
    )


def make_needle(*, length: int = 256, was: bool = True, still: bool = True, increase: float = 0.0) -> NeedleResult:
    return NeedleResult(
        length=length,
        depth=0.5,
        found_reference=was,
        found_quantized=still,
        nll_reference=0.1,
        nll_quantized=0.1 + increase,
    )


def make_case(place: int, *, was: bool = True, still: bool = True) -> RecallResult:
    return RecallResult(
        case=str(place),
        num_prompt_tokens=100,
        contained_reference=was,
        contained_quantized=still,
        is_same_text=was == still,
    )


def broken(**measured: Any) -> list[str]:
    """Names of the figures that fail the default limits."""
    empty: dict[str, Any] = {"num_non_finite": 0, "buckets": [], "needles": [], "recall": []}
    return [figure.name for figure in judge(limits=Limits(), seed=0, **(empty | measured)) if not figure.is_met]


def test_buckets_are_by_the_length_of_the_prompt() -> None:
    buckets = summarise_positions([make_values(600), make_values(100)], seed=0)
    # a text of n + 1 tokens has prompts of 1 to n tokens
    assert [(bucket.bucket, bucket.num_positions) for bucket in buckets] == [
        ("0-127", 127 + 100),
        ("128-511", 384),
        ("512-1023", 89),
    ]
    assert [bucket.num_runs for bucket in buckets] == [2 + 2, 6, 2]
    assert buckets[2].max_deviation == 599
    assert buckets[0].perplexity_quantized == buckets[0].perplexity_reference


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"increase": 0.02}, []),
        ({"increase": 0.04}, ["perplexity increase, prompts of 0-127 tokens"]),
        ({"increase": -0.5}, []),
        ({"kl": 0.04}, []),
        ({"kl": 0.06}, ["KL divergence, prompts of 0-127 tokens"]),
        ({"num_wrong": 60}, ["top-1 agreement, prompts of 0-127 tokens"]),
    ],
)
def test_each_limit_on_texts_breaks_alone(values: dict[str, Any], expected: list[str]) -> None:
    assert broken(buckets=summarise_positions([make_values(120, **values)], seed=0)) == expected


def test_one_bad_bucket_is_not_hidden_by_the_others() -> None:
    texts = [make_values(127) for _ in range(20)]
    late = make_values(300, increase=0.0)
    late.nll_quantized[127:] += 0.2
    assert broken(buckets=summarise_positions([*texts, late], seed=0)) == [
        "perplexity increase, prompts of 128-511 tokens"
    ]


def test_what_is_not_finite_fails_and_spoils_no_other_figure() -> None:
    values = make_values(100, num_bad=3)
    values.nll_quantized[:3] = np.nan
    buckets = summarise_positions([values], seed=0)
    assert buckets[0].num_positions == 97
    assert broken(buckets=buckets, num_non_finite=3) == ["positions with logits that are not finite"]


def test_a_few_needles_that_turn_around_are_chance_and_many_are_not() -> None:
    one = [make_needle(still=place > 0) for place in range(12)]
    most = [make_needle(still=place > 8) for place in range(12)]
    assert broken(needles=one) == []
    assert broken(needles=most) == ["needles lost"]
    assert broken(needles=[make_needle(was=False, still=False)] * 12) == []


def test_needles_that_become_less_likely_fail_before_they_are_lost() -> None:
    needles = [make_needle(length=length, increase=increase) for length, increase in ((256, 0.1), (2048, 0.5))] * 6
    assert broken(needles=needles) == ["nats per token of needles in 2048 tokens"]
    assert [(cell.length, cell.num_needles, cell.found_quantized) for cell in summarise_needles(needles)] == [
        (256, 6, 6),
        (2048, 6, 6),
    ]


def test_answers_lost_beyond_chance_fail() -> None:
    assert broken(recall=[make_case(place, still=place > 0) for place in range(20)]) == []
    assert broken(recall=[make_case(place, still=place > 9) for place in range(20)]) == ["task recall lost"]


def test_a_model_against_itself_differs_in_nothing(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    runner = ModelRunner(make_config(model), model)
    values = compare_text(ModelPair(runner, runner), Tokenizer.from_path(model).encode(TEXT)[:150])
    assert len(values.kl) == 149
    assert np.abs(values.kl).max() < 1e-5
    assert values.max_deviation.max() == 0
    assert values.is_same_top1.all()
    logits = runner.logits(Tokenizer.from_path(model).encode(TEXT)[:150]).log_softmax(dim=-1)
    target = Tokenizer.from_path(model).encode(TEXT)[140]
    assert values.nll_reference[139] == pytest.approx(-float(logits[139, target]), rel=1e-4)


def test_needles_stand_where_they_should_and_have_the_length_asked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(save_tiny_llama(tmp_path / "tiny"))
    filler = tokenizer.encode(TEXT)
    options: dict[str, Any] = {"lengths": (150, 300), "depths": (0.0, 1.0), "num_per_cell": 2, "seed": 3}
    needles = make_needles(tokenizer, filler, **options)
    assert [(needle.length, needle.depth) for needle in needles[::2]] == [(150, 0), (150, 1), (300, 0), (300, 1)]
    for needle in needles:
        assert len(needle.token_ids) == needle.length
        text = tokenizer.decode(needle.token_ids)
        code = tokenizer.decode(needle.token_ids[-needle.num_answer_tokens :]).strip()
        assert text.count(code) == 2
        assert (text.index(code) < 60) == (needle.depth == 0.0)
    assert make_needles(tokenizer, filler, **options) == needles
    with pytest.raises(EvalError, match="more than the length of 20"):
        make_needles(tokenizer, filler, **(options | {"lengths": (20,)}))


def test_a_model_that_knows_the_answer_finds_the_needle(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    runner = ModelRunner(make_config(model), model)
    tokenizer = Tokenizer.from_path(model)
    (needle,) = make_needles(tokenizer, tokenizer.encode(TEXT), lengths=(150,), depths=(0.5,), num_per_cell=1, seed=0)
    prompt = needle.token_ids[: -needle.num_answer_tokens]
    for _ in range(3):  # what the model itself would write is found
        prompt.append(int(runner.logits(prompt)[-1].argmax()))
    asked = type(needle)(length=150, depth=0.5, token_ids=prompt, num_answer_tokens=3)
    result = ask_needle(ModelPair(runner, runner), asked)
    assert (result.found_reference, result.found_quantized) == (True, True)
    assert not ask_needle(ModelPair(runner, runner), needle).found_reference


def test_a_sound_format_passes_and_its_record_lets_it_serve(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    report, record = measure_tiny(model, kv_cache_dtype="int8", num_cases=3)
    assert report.passed
    assert record.has_passed
    assert [bucket.bucket for bucket in report.buckets] == ["0-127", "128-511"]
    assert all(bucket.kl.mean > 0 for bucket in report.buckets)
    assert report.recall is not None
    assert report.recall_same_text is not None
    assert report.notes == [
        "prompts of 201 to 512 tokens were not measured",
        "the unquantized model finds no needle, so that none can be lost",
    ]
    write_gate_record(record)
    assert LLMEngine.from_config(make_config(model, kv_cache_dtype="int8")).info.quantization_gate == "passed"
    with pytest.raises(ModelError, match="kv_fp8 of tiny in fp32 has not been measured"):
        LLMEngine.from_config(make_config(model, kv_cache_dtype="fp8"))


def test_large_weights_break_int8_and_nothing_else(tmp_path: Path) -> None:
    get_kernels()
    sound, _ = measure_tiny(save_tiny_llama(tmp_path / "sound"), quantization="int8")
    planted, _ = measure_tiny(save_tiny_llama(tmp_path / "planted", weight_outlier=100.0), quantization="int8")
    assert not planted.passed
    for healthy, hurt in zip(sound.buckets, planted.buckets, strict=True):
        # the outliers themselves do nothing: they meet inputs that are 0
        assert hurt.perplexity_reference == pytest.approx(healthy.perplexity_reference, rel=0.01)
        assert hurt.kl.low > 10 * healthy.kl.high


def test_wrong_scales_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantized_attention.dequantize_kv
    monkeypatch.setattr(quantized_attention, "dequantize_kv", lambda rows, dtype: right(rows, dtype) * 1.5)
    report, _ = measure_tiny(save_tiny_llama(tmp_path / "tiny"), kv_cache_dtype="int8")
    assert not report.passed


def test_logits_that_are_not_finite_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantized_attention.dequantize_kv
    monkeypatch.setattr(quantized_attention, "dequantize_kv", lambda rows, dtype: right(rows, dtype) * float("inf"))
    report, _ = measure_tiny(save_tiny_llama(tmp_path / "tiny"), kv_cache_dtype="int8")
    assert report.num_non_finite > 100
    assert not report.passed


def test_nothing_to_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="nothing is quantized"):
        QuantizationOptions(model="any")
    model = save_tiny_llama(tmp_path / "tiny")
    options = QuantizationOptions(model=str(model), dtype="fp32", kv_cache_dtype="int8")
    with pytest.raises(EvalError, match="short has fewer than 16 tokens"):
        measure_quantization(options, RealText("short", "a"))


def test_every_python_brings_enough_text() -> None:
    assert len(manual_text().content) > 100_000


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["eval", "quantization", *arguments])


def test_the_command_keeps_a_record_and_fails_where_the_format_does(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    shared = ["--dtype", "fp32", "--kv-cache-dtype", "int8", "--max-length", "150", "--texts", "4", "--needles", "1"]
    shared += ["--text", str(text)]
    for name, outlier, status in (("sound", 0.0, 0), ("planted", 300.0, 1)):
        model = save_tiny_llama(tmp_path / name, key_outlier=outlier)
        output = tmp_path / f"{name}.json"
        result = run("--model", str(model), *shared, "--output", str(output))
        assert result.exit_code == status, result.output
        assert ("gate passed: all" in result.output) == (status == 0)
        report = msgspec.json.decode(output.read_bytes(), type=QuantizationReport)
        assert (report.model, report.quantization, report.passed) == (name, "none+kv_int8", status == 0)
        assert str(tmp_path) not in output.read_text()
        record = read_gate_record(gate_key(make_config(model, kv_cache_dtype="int8"), model))
        assert record is not None
        assert record.has_passed == report.passed


def test_the_command_names_what_is_wrong_with_its_usage(tmp_path: Path) -> None:
    assert "nothing is quantized" in run().output
    result = run("--quantization", "int8", "--gate", "max_kll=1")
    assert result.exit_code == 2
    assert "max_kl," in result.output
    result = run("--quantization", "int8", "--model", str(tmp_path / "none"))
    assert (result.exit_code, "there is no model" in result.output) == (1, True)
