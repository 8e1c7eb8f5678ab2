"""Settings of every test run."""

import os

# As `firsttoken serve` does: test processes share the cores with the servers they start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
