"""The manifest names everything needed to repeat a run, and nothing of the machine's folders."""

import hashlib
import subprocess
from datetime import datetime
from pathlib import Path

import msgspec
from factories_eval import REPOSITORY, rag_case, write_cases

from eval.datasets import read_dataset
from eval.manifest import Manifest, make_manifest


def _manifest(tmp_path: Path, **fields: object) -> Manifest:
    dataset = read_dataset(write_cases(tmp_path / "made.jsonl.gz", [rag_case("q-1"), rag_case("q-2")]), limit=1)
    defaults: dict[str, object] = {
        "dataset": dataset,
        "settings": {"budgets": [0.1]},
        "seed": 7,
        "model": "default",
        "max_model_len": 8192,
        "started_gateway": True,
    }
    return make_manifest(**(defaults | fields))  # type: ignore[arg-type]


def test_manifest_identifies_data_code_and_settings(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path)
    assert manifest.data.sha256 == hashlib.sha256((tmp_path / "made.jsonl.gz").read_bytes()).hexdigest()
    assert (manifest.data.name, manifest.data.num_cases, manifest.data.num_cases_in_file) == ("made.jsonl.gz", 1, 2)
    assert (manifest.seed, manifest.settings, manifest.max_model_len) == (7, {"budgets": [0.1]}, 8192)
    assert manifest.versions["msgspec"] == msgspec.__version__
    assert manifest.device.num_cores >= 1
    assert datetime.fromisoformat(manifest.date).utcoffset() is not None


def test_commit_is_the_one_checked_out(tmp_path: Path) -> None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=REPOSITORY)
    expected = done.stdout.strip() if done.returncode == 0 else None
    assert _manifest(tmp_path).commit == expected


def test_command_keeps_no_folders_and_no_key(tmp_path: Path) -> None:
    command = ["/usr/bin/firsttoken", "eval", "--data=/data/x.jsonl", "--output", "out/y.json", "--api-key", "sk-1"]
    command += ["--api-key=sk-2", "--url", "http://127.0.0.1:8080/v1", "--budget", "0.1,0.2"]
    assert _manifest(tmp_path, command=command).command == [
        "firsttoken",
        "eval",
        "--data=x.jsonl",
        "--output",
        "y.json",
        "--api-key",
        "…",
        "--api-key=…",
        "--url",
        "http://127.0.0.1:8080/v1",
        "--budget",
        "0.1,0.2",
    ]


def test_config_is_named_by_digest(tmp_path: Path) -> None:
    config = tmp_path / "firsttoken.toml"
    config.write_text("[server]\n", encoding="utf-8")
    manifest = _manifest(tmp_path, config=config)
    assert manifest.config_name == "firsttoken.toml"
    assert manifest.config_sha256 == hashlib.sha256(b"[server]\n").hexdigest()
