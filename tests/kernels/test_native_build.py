"""Building the native kernels: once, whole, with reasons where it cannot be done."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.attention import get_attention_backend
from kernels.native import build, library
from kernels.native.build import NativeBuildError, build_library, find_compiler
from kernels.native.library import _configured_kernels, load_kernels, native_kernels


@pytest.fixture
def fresh_process() -> Iterator[None]:
    """As if nothing had been loaded yet, before and after."""
    load_kernels.cache_clear()
    _configured_kernels.cache_clear()
    yield
    load_kernels.cache_clear()
    _configured_kernels.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that logs its calls and does not optimise: a build takes seconds. Returns the log."""
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("there is no C++ compiler")
    log = tmp_path / "calls"
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {real} "$@" -O0\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def _is_link(call: str) -> bool:
    return "-shared" in call.split()


def test_two_processes_build_one_library(tmp_path: Path, compiler: Path) -> None:
    code = "from kernels.native.build import build_library; print(build_library())"
    environment = {**os.environ, "FIRSTTOKEN_CACHE": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = [process.communicate()[0].strip() for process in processes]
    assert paths[0] == paths[1] != ""
    assert sum(map(_is_link, compiler.read_text().splitlines())) == 1
    left = {path.suffix for path in Path(paths[0]).parent.iterdir()}
    assert left == {Path(paths[0]).suffix, ".lock"}
    # and a third finds it, asking the compiler for no more than its version
    num_calls = len(compiler.read_text().splitlines())
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    assert "--version" in compiler.read_text().splitlines()[num_calls]
    assert not any("-c" in call.split() for call in compiler.read_text().splitlines()[num_calls:])


def test_changed_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = find_compiler()
    if command is None:
        pytest.skip("there is no C++ compiler")
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, sources)
    before = build._digest(command)
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build._digest(command) == before
    (sources / "simd.h").write_text((sources / "simd.h").read_text() + "\n")
    assert build._digest(command) != before


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler \(no-such-compiler\); install g\+\+ or clang\+\+"):
        build_library(tmp_path)


def test_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\ntest "$1" = --version && exit 0\necho "x.cpp:1: error: too old" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(NativeBuildError, match=r"cannot compile the kernels: .* failed: x\.cpp:1: error: too old"):
        build_library(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.usefixtures("fresh_process")
def test_instruction_set_that_the_compiler_does_not_know_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Path
) -> None:
    script = tmp_path / "c++"
    refusing = script.read_text().replace(
        "exec", 'case "$*" in *FT_ISA=avx*) echo "error: unknown flag" >&2; exit 1;; esac\nexec'
    )
    script.write_text(refusing)
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path / "cache"))
    assert load_kernels().isa == "portable"
    with pytest.raises(NativeBuildError, match="no kernels for 'avx2'"):
        load_kernels("avx2")


@pytest.mark.usefixtures("fresh_process")
def test_without_a_compiler_torch_takes_over_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path))
    monkeypatch.delenv("FIRSTTOKEN_NATIVE", raising=False)
    with caplog.at_level(logging.WARNING):
        assert get_attention_backend(dtype=torch.float32).name == "sdpa"
    assert "no native CPU kernels, torch's are used: no C++ compiler" in caplog.text
    with pytest.raises(ValueError, match=r"no native attention: no C\+\+ compiler"):
        get_attention_backend("native", dtype=torch.float32)


@pytest.mark.usefixtures("fresh_process")
@pytest.mark.parametrize("value", ["off", "OFF", "0"])
def test_variable_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FIRSTTOKEN_NATIVE", value)
    assert native_kernels() is None
    assert library.kernels_for(torch.ones(1)) is None


@pytest.mark.usefixtures("fresh_process")
def test_variable_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("FIRSTTOKEN_NATIVE", "portable")
    kernels = native_kernels()
    assert kernels is not None
    assert kernels.isa == "portable"
    assert get_attention_backend(dtype=torch.float32).name == "native (portable)"


@pytest.mark.usefixtures("fresh_process")
def test_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTTOKEN_NATIVE", "mmx")
    with pytest.raises(ValueError, match=r"FIRSTTOKEN_NATIVE is 'mmx'; there are off, portable, avx2"):
        native_kernels()
