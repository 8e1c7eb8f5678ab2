"""``firsttoken plan`` over a tiny model that is really measured."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from factories_disaggregation_model import save_tiny_llama

from app.cli import main


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


def run_plan(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", "--model", str(model), *arguments])


def test_plan_says_whether_separate_engines_pay(tiny_llama: Path) -> None:
    result = run_plan(tiny_llama, "--prompt-tokens", "64,256", "--rate", "0.01", "--engines", "3")
    assert result.exit_code == 0, result.output
    assert "3 for both" in result.output
    assert "prefill + " in result.output
    assert result.output.rstrip().endswith(("separate engines pay", "separate engines do not pay"))


def test_plan_over_a_network_that_is_too_slow_does_not_pay(tiny_llama: Path, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("64\n128\n256\n", encoding="utf-8")
    arguments = ("--lengths", str(lengths), "--gbit", "0.000001", "--rate", "0.1", "--json")
    found = json.loads(run_plan(tiny_llama, *arguments).output)
    assert found["link_bytes_per_s"] == 125.0
    assert found["plan"]["pays"] is False
    assert found["plan"]["disaggregated"]["ttft_s"] is None
    assert found["plan"]["break_even_bytes_per_s"] > 125.0
    assert found["parallel_prefill"]["tokens"] == 256


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--prompt-tokens", "0"), "prompt_tokens must hold positive lengths"),
        (("--gbit", "-1"), "--gbit must be positive, got -1.0"),
        (("--rate", "0"), "request_rate must be positive, got 0.0"),
    ],
)
def test_plan_names_a_value_that_cannot_be(tiny_llama: Path, arguments: tuple[str, ...], text: str) -> None:
    result = run_plan(tiny_llama, *arguments)
    assert result.exit_code == 1
    assert text in result.output
