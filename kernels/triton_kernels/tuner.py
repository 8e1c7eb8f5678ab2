"""Searches the tile sizes of the attention kernels on the GPU at hand, and writes them for ``tuning`` to read.

    python -m kernels.triton_kernels.tuner --output configs-of-this-gpu.json
    FIRSTTOKEN_TRITON_CONFIGS=configs-of-this-gpu.json firsttoken serve

Every candidate computes the same random batch; one that does not fit the device, or errs more than the entry in use, is
left out. The file has the form of ``configs.json`` and holds the fastest candidate of each shape class for this device.
"""

import argparse
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
import triton

from kernels.attention.base import AttentionMetadata
from kernels.triton_kernels.attention_decode import choose_num_splits, paged_decode
from kernels.triton_kernels.attention_prefill import list_tiles, paged_prefill, query_block
from kernels.triton_kernels.runtime import is_interpreted
from kernels.triton_kernels.tuning import ConfigTable, KernelConfig, attention_class, find_config

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_NUM_HEADS, _NUM_KV_HEADS = 32, 8
_PREFILL_TOKENS = 4096
_DECODES, _DECODE_CONTEXT = 16, 4096

Timer = Callable[[Callable[[], object]], float]
"""Seconds of one call."""


def candidates(kernel: str) -> Iterator[KernelConfig]:
    """What is tried for ``prefill`` or ``decode``."""
    rows = (32, 64, 128) if kernel == "prefill" else (0,)
    for block_m, block_n, num_warps, num_stages in itertools.product(rows, (32, 64, 128), (4, 8), (1, 2, 3, 4)):
        yield KernelConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


class AttentionCase:
    """One batch, and what it takes to compute it with a configuration."""

    def __init__(
        self, kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device, *, num_tokens: int, num_seqs: int
    ) -> None:
        self.kernel, self.device = kernel, device
        query_lens, contexts = (
            ([num_tokens], [0]) if kernel == "prefill" else ([1] * num_seqs, [num_tokens - 1] * num_seqs)
        )
        blocks_per_seq = -(-num_tokens // _BLOCK_SIZE)
        ids = torch.randperm(blocks_per_seq * len(query_lens)).tolist()
        tables = [ids[start : start + blocks_per_seq] for start in range(0, len(ids), blocks_per_seq)]
        self._metadata = AttentionMetadata.build(query_lens, contexts, tables, _BLOCK_SIZE, device=device)
        self._q = torch.randn(sum(query_lens), _NUM_HEADS, head_dim, device=device, dtype=dtype)
        self._cache = torch.randn(2, len(ids), _BLOCK_SIZE, _NUM_KV_HEADS, head_dim, device=device, dtype=dtype)
        self._num_tokens = num_tokens

    def compute(self, config: KernelConfig) -> Callable[[], torch.Tensor]:
        """A call that attends with ``config``."""
        out, scale = torch.empty_like(self._q), self._q.shape[2] ** -0.5
        if self.kernel == "prefill":
            tiles = list_tiles(self._metadata, query_block(config, _NUM_HEADS // _NUM_KV_HEADS))

            def prefill() -> torch.Tensor:
                paged_prefill(self._q, self._cache, self._metadata, tiles, scale, out, config)
                return out

            return prefill
        num_splits = choose_num_splits(self._q.shape[0], _NUM_KV_HEADS, self._num_tokens, config.block_n, self.device)

        def decode() -> torch.Tensor:
            paged_decode(self._q, self._cache, self._metadata, scale, out, config, num_splits=num_splits)
            return out

        return decode


def fastest(case: AttentionCase, in_use: KernelConfig, tried: Sequence[KernelConfig], timer: Timer) -> KernelConfig:
    """The fastest of ``in_use`` and those of ``tried`` that run and agree with it."""
    expected = case.compute(in_use)().float()
    tolerance = 4 * torch.finfo(case.compute(in_use)().dtype).eps * float(expected.abs().max())
    best, best_s = in_use, timer(case.compute(in_use))
    for config in tried:
        try:
            compute = case.compute(config)
            error = float((compute().float() - expected).abs().max())
            if not error <= tolerance:
                logger.warning("%s is left out: it differs by %.3g, the limit is %.3g", config, error, tolerance)
                continue
            seconds = timer(compute)
        except (RuntimeError, triton.CompilationError, triton.runtime.errors.OutOfResources) as problem:
            logger.info("%s does not run here: %s", config, problem)
            continue
        if seconds < best_s:
            best, best_s = config, seconds
    return best


def tune(
    device: torch.device,
    device_name: str,
    *,
    head_dims: Sequence[int],
    dtypes: Sequence[torch.dtype],
    timer: Timer,
    tried: Callable[[str], Sequence[KernelConfig]] = lambda kernel: list(candidates(kernel)),
    prefill_tokens: int = _PREFILL_TOKENS,
    decode_context: int = _DECODE_CONTEXT,
) -> ConfigTable:
    """The fastest configuration of each kernel and shape class, under the name of the device."""
    table: ConfigTable = {}
    for kernel, head_dim, dtype in itertools.product(("prefill", "decode"), head_dims, dtypes):
        shape_class = attention_class(head_dim, dtype)
        num_tokens = prefill_tokens if kernel == "prefill" else decode_context
        case = AttentionCase(kernel, head_dim, dtype, device, num_tokens=num_tokens, num_seqs=_DECODES)
        config = fastest(case, find_config(kernel, shape_class, device), tried(kernel), timer)
        table.setdefault(kernel, {}).setdefault(device_name, {})[shape_class] = config
        logger.info("%s %s: %s", kernel, shape_class, config)
    return table


def write_configs(table: ConfigTable, path: Path) -> None:
    """Write a file that ``tuning.read_configs`` reads. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


def _gpu_seconds(run: Callable[[], object]) -> float:
    milliseconds: float = triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median")
    return milliseconds / 1e3


def main() -> None:
    """Tune for the first GPU."""
    parser = argparse.ArgumentParser(description="Search the tile sizes of the attention kernels on this GPU.")
    parser.add_argument("--output", type=Path, required=True, help="a file for FIRSTTOKEN_TRITON_CONFIGS")
    arguments = parser.parse_args()
    if is_interpreted() or not torch.cuda.is_available():
        parser.exit(2, "the tuner needs a GPU that torch sees, without TRITON_INTERPRET\n")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda")
    torch.manual_seed(0)
    table = tune(
        device,
        torch.cuda.get_device_name(device),
        head_dims=(64, 128, 256),
        dtypes=(torch.bfloat16, torch.float32),
        timer=_gpu_seconds,
    )
    write_configs(table, arguments.output)


if __name__ == "__main__":
    main()
