"""How long `firsttoken serve` takes from the start of its process until it is ready, and how much memory it needs.

The kernels are built and the files in the system's cache beforehand. Memory is the peak of the engine's process after
one long prompt; the bound is its weights and KV cache and a gigabyte. All processes together, the gateway with the
encoder among them, are told beside it.
"""

import contextlib
import os
import statistics
import time
from pathlib import Path

import httpx
import torch

from engine.config import CacheConfig
from engine.kv_cache import kv_block_bytes
from engine.model_spec import ModelSpec
from eval.benches.kernel_records import StartResult
from eval.errors import EvalError
from eval.gateway import DEMO_KEYS
from eval.launcher import started_gateway
from eval.process_tree import children, descendants

_BLOCK_SIZE = CacheConfig().block_size
_ALLOWANCE_BYTES = 10**9
_BYTES_PER_WEIGHT = 2  # bf16


def measure_start(spec: ModelSpec, num_parameters: int, num_tokens: int, *, num_starts: int) -> StartResult:
    """Start the gateway with the default model some times; the last one is given a prompt of ``num_tokens``.

    Args:
        spec: of the model that it serves.
        num_parameters: of that model.
        num_tokens: about so many, and room in the KV cache for no more.
        num_starts: of which the median counts; one more goes before them and is not counted.
    """
    num_blocks = -(-num_tokens // _BLOCK_SIZE) + 1
    settings = {"FIRSTTOKEN__ENGINE__CACHE__NUM_BLOCKS": str(num_blocks)}
    seconds = []
    peak = total = 0
    for index in range(num_starts + 1):
        before = set(children(os.getpid()))
        started = time.perf_counter()
        with started_gateway(example=True, settings=settings) as url:
            taken = time.perf_counter() - started
            if index:
                seconds.append(taken)
            if index == num_starts:
                _ask(url, num_tokens)
                gateways = [pid for pid in children(os.getpid()) if pid not in before]
                # the engine is the one beside the gateway that has grown large
                peaks = [_peak_bytes(pid) for gateway in gateways for pid in descendants(gateway)]
                peak = max(peaks, default=0)
                total = sum(peaks) + sum(_peak_bytes(gateway) for gateway in gateways)
    weights = num_parameters * _BYTES_PER_WEIGHT
    kv = num_blocks * kv_block_bytes(spec, _BLOCK_SIZE, torch.bfloat16)
    return StartResult(
        seconds_to_ready=statistics.median(seconds),
        num_starts=num_starts,
        num_prompt_tokens=num_tokens,
        engine_peak_bytes=peak,
        total_peak_bytes=total,
        weight_bytes=weights,
        kv_bytes=kv,
        is_within_memory=peak <= weights + kv + _ALLOWANCE_BYTES,
    )


def _ask(url: str, num_tokens: int) -> None:
    """One prompt of about ``num_tokens``: a common word is a token."""
    body = {"model": "default", "prompt": " word" * (num_tokens - 200), "max_tokens": 1}
    headers = {"Authorization": f"Bearer {DEMO_KEYS[0]}"}
    with httpx.Client(base_url=url, timeout=300.0, trust_env=False) as http:
        response = http.post("/v1/completions", json=body, headers=headers)
    if not response.is_success:
        raise EvalError(f"the gateway answered {response.status_code}: {response.text[:200]}")


def _peak_bytes(pid: int) -> int:
    """The most memory that a process has had; pages that it shares with others count in each."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
