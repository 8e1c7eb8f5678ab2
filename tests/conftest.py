"""Settings of every test run."""

import os
import tempfile

# As `firsttoken serve` does: test processes share the cores with the servers they start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Gateways that tests start as processes keep their database out of the user's data folder.
if "FIRSTTOKEN_DATA" not in os.environ:
    _DATA = tempfile.TemporaryDirectory(prefix="firsttoken-test-", ignore_cleanup_errors=True)
    os.environ["FIRSTTOKEN_DATA"] = _DATA.name
