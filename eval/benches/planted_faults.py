"""Plants a fault into this process and then runs ``firsttoken`` in it.

    python -m eval.benches.planted_faults fact-guard serve
    python -m eval.benches.planted_faults scales-multiplied eval quantization --kv-cache-dtype int8

The product has no switch for any of them: they exist here, to show that the gates notice.
"""

import runpy
import sys
from collections.abc import Callable

import torch


def plant_fact_guard() -> None:
    """Deduplication no longer looks at figures, names and negations: texts that look alike are merged."""
    import reducer.dedup

    vars(reducer.dedup)["contains"] = lambda outer, inner: True


def plant_multiplied_scales() -> None:
    """Keys and values come back from an 8-bit cache half as large again."""
    from kernels.attention import quantized
    from kernels.kv_quantization import dequantize_kv as right

    vars(quantized)["dequantize_kv"] = lambda rows, dtype: right(rows, dtype) * 1.5


def plant_permuted_scales() -> None:
    """Every head is read with the scale of its neighbour."""
    from kernels.attention import quantized
    from kernels.kv_quantization import SCALE_BYTES
    from kernels.kv_quantization import dequantize_kv as right

    def permuted(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scales = rows[..., -SCALE_BYTES:].roll(1, dims=-2)
        return right(torch.cat((rows[..., :-SCALE_BYTES], scales), dim=-1), dtype)

    vars(quantized)["dequantize_kv"] = permuted


FAULTS: dict[str, Callable[[], None]] = {
    "fact-guard": plant_fact_guard,
    "scales-multiplied": plant_multiplied_scales,
    "scales-permuted": plant_permuted_scales,
}


def main() -> None:
    """The first argument names the fault, the others are those of ``firsttoken``."""
    name = sys.argv.pop(1)
    FAULTS[name]()
    runpy.run_module("app.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
