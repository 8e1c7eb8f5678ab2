"""Makes torch's threads share the processor's cores with other work. Imports nothing, because it must run first.

Between two parallel pieces of a layer, OpenMP threads wait in a busy loop by default. On cores of their own that saves
microseconds; next to a gateway, an encoder or another process it turns one lost time slice into many: with four busy
processes on two cores, 512 tokens of prefill took 0.6 to 0.9 s with sleeping threads and 2 to 8 s with spinning ones.
"""

import os
import sys

# Loops before a thread sleeps: about as long as the gap between two operations of a layer.
_SPIN_COUNT = 1000


def share_cores() -> bool:
    """Let idle OpenMP threads sleep soon. Call it before the first import of torch in a process.

    Settings that are in the environment already stay: ``OMP_WAIT_POLICY``, ``GOMP_SPINCOUNT``.

    Returns:
        Whether it can have an effect: the library reads its settings once, when torch loads it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))
    return "torch" not in sys.modules
