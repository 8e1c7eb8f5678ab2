"""Settings of every test run."""

import logging
import os
import tempfile
from collections.abc import Iterator

import pytest

# As `firsttoken serve` does: test processes share the cores with the servers they start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Gateways that tests start as processes keep their database out of the user's data folder.
if "FIRSTTOKEN_DATA" not in os.environ:
    _DATA = tempfile.TemporaryDirectory(prefix="firsttoken-test-", ignore_cleanup_errors=True)
    os.environ["FIRSTTOKEN_DATA"] = _DATA.name


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(autouse=True)
def _no_stage_fails(request: pytest.FixtureRequest) -> Iterator[None]:
    """A stage that fails is left out by default, so no test would see a mistake in one; this does.

    Tests that make stages fail carry the marker ``stages_fail``.
    """
    kept, log = _Kept(), logging.getLogger("firsttoken.reducer")
    log.addHandler(kept)
    yield
    log.removeHandler(kept)
    if request.node.get_closest_marker("stages_fail") is None:
        assert kept.lines == []
