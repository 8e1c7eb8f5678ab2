"""The arrow of imports: app -> reducer, engine; engine -> kernels; eval reaches app over HTTP."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "reducer", "engine", "kernels", "eval")

# What a package may import of ours. The command line is the one place that mounts the evaluation's commands.
ALLOWED = {
    "app": {"app", "reducer", "engine"},
    "reducer": {"reducer"},
    "engine": {"engine", "kernels"},
    "kernels": {"kernels"},
    "eval": {"eval"},
}
EXCEPTIONS = {("app/cli.py", "eval")}

CONTROL_PLANE = (
    "admission",
    "block_hash",
    "block_pool",
    "config",
    "cost_model",
    "disaggregation.connector",
    "disaggregation.consumer",
    "disaggregation.leases",
    "disaggregation.producer",
    "errors",
    "fairness",
    "isolation",
    "kv_cache_manager",
    "lengths",
    "outputs",
    "planner",
    "policies",
    "quantization_gate",
    "received_blocks",
    "sampling_params",
    "scheduler",
    "scheduler_output",
    "second_tier",
    "sequence",
    "start_journal",
    "stats",
    "step_executor",
)
WITHOUT_TORCH = (
    *(f"engine.{name}" for name in CONTROL_PLANE),
    "engine.tokenizer",
    "engine.detokenizer",
    "engine.chat_template",
    "engine.disaggregated_client",
    "engine.process",
    "reducer.pipeline",
    "app.cli",
)


def _sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _imported_packages(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source} uses a relative import"
            names.add((node.module or "").split(".")[0])
    return names & set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrow(package: str) -> None:
    for source in _sources(package):
        path = source.relative_to(ROOT).as_posix()
        allowed = set(ALLOWED[package])
        if path.startswith("eval/benches/"):
            allowed = set(PACKAGES) - {"app"}  # a bench imports what it measures
        for name in _imported_packages(source) - allowed:
            assert (path, name) in EXCEPTIONS, f"{path} imports {name}"


def test_control_plane_and_gateway_start_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(f"import {name}" for name in WITHOUT_TORCH)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_transformers_imports_beside_our_kernels_package() -> None:
    code = "import kernels, transformers; transformers.AutoModelForCausalLM; transformers.AutoTokenizer"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_top_level_holds_the_packages_and_nothing_unexpected() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    files = {"pyproject.toml", "README.md", "RESULTS.md", "Makefile", "constraints.txt", ".gitignore", ".ci", "tests"}
    assert top == files | set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_opens_with_a_sentence_saying_what_it_is_for(package: str) -> None:
    for source in _sources(package):
        text = source.read_text(encoding="utf-8")
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{source.relative_to(ROOT)} has no docstring"
