"""The settings that let idle OpenMP threads sleep."""

import os
import subprocess
import sys

import pytest

_SHOW = (
    "import os, sys; from engine.openmp import share_cores\n"
    "print(share_cores(), os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
)


def _run(code: str, **settings: str) -> str:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**environment, **settings})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_spinning_is_limited_without_importing_torch() -> None:
    assert _run(_SHOW) == "True 1000 None False"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"OMP_WAIT_POLICY": "active"}, "True None active False"),
        ({"GOMP_SPINCOUNT": "7"}, "True 7 None False"),
    ],
)
def test_settings_of_the_user_stay(settings: dict[str, str], expected: str) -> None:
    assert _run(_SHOW, **settings) == expected


def test_call_after_torch_says_that_it_is_too_late() -> None:
    assert _run("import torch; from engine.openmp import share_cores; print(share_cores())") == "False"
