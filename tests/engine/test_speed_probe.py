"""The probe's fits and a real measurement of a tiny model: figures that a plan can be made from."""

from pathlib import Path

import pytest
import torch
from factories_disaggregation_model import save_tiny_llama

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.kv_cache import KVCache
from engine.planner import Link, Objectives, Workload, plan
from engine.speed_probe import fit_line, probe, transfer_bytes_per_s
from engine.weights import open_checkpoint


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1, 3.0), (4, 9.0), (8, 17.0)], (1.0, 2.0)),
        ([(1, 5.0), (8, 4.0)], (4.5, 0.0)),
        ([(1, 1.0), (2, 4.0)], (0.0, 9 / 5)),
        ([(4, 8.0)], (0.0, 2.0)),
    ],
)
def test_line_of_decode_times_never_falls_nor_begins_below_zero(
    points: list[tuple[int, float]], line: tuple[float, float]
) -> None:
    assert fit_line(points) == pytest.approx(line)


def test_measured_engine_can_be_planned_with(tiny_llama: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_llama), dtype="fp32"), cache=CacheConfig(num_blocks=128), num_threads=1
    )
    measured = probe(config, [32, 100_000])
    assert measured.info.max_model_len == 512
    assert measured.speed.prefill_s(400) > measured.speed.prefill_s(32) > 0
    assert measured.speed.decode_step_s + measured.speed.decode_sequence_s > 0
    workload = Workload(prompt_tokens=[400], output_tokens=10, request_rate=0.01)
    link = Link(bytes_per_s=measured.transfer_bytes_per_s)
    found = plan(workload, measured.speed, link, measured.info, Objectives(1000.0, 1000.0), 2)
    assert found.disaggregated is not None
    assert found.disaggregated.ttft_s > found.disaggregated.transfer_s > 0


def test_blocks_cross_the_loopback_at_a_positive_rate(tiny_llama: Path) -> None:
    spec = open_checkpoint(tiny_llama).spec
    assert transfer_bytes_per_s(KVCache(spec, num_blocks=8, block_size=16, dtype=torch.float32)) > 0
