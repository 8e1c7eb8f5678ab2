"""Where the default encoder lies, for tests that run a real model."""

import os
from pathlib import Path

import pytest


def model_path() -> Path:
    cache = os.environ.get("FIRSTTOKEN_CACHE")
    base = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "firsttoken"
    return base / "models" / "all-minilm-l6-v2"


needs_model = pytest.mark.skipif(not model_path().is_dir(), reason="all-MiniLM-L6-v2 is not unpacked")
