"""The kernels compile for GPUs, which needs none: the interpreter lets more pass, and memory must suffice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

# In a process of its own: here the interpreter has taken the place of the compiler.
_PROGRAM = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.triton_kernels import attention_decode, attention_prefill, quantized_linear, rms_norm, rotary_store, silu_mul
from kernels.triton_kernels.tuning import _FILE, find_in, read_configs

INT32 = {"tiles", "block_tables", "cu_seqlens_q", "seq_lens"}
FP32 = {"partial_out", "partial_lse", "half_cos", "half_sin", "x_scales", "weight_scales", "scales"}
BF16 = {"q", "k", "v", "key_cache", "value_cache", "out", "x", "delta", "weight", "y", "gate_up", "bias", "addend"}
FLOATS = {"eps", "score_factor", "cap_factor"}
capability, device = int(sys.argv[1]), sys.argv[2]
shared = {}

def compile_kernel(kernel, constants, types={}, config=None):
    names = kernel.arg_names
    signature = {}
    for name in names:
        if name in constants: kind = "constexpr"
        elif name in types: kind = types[name]
        elif name in INT32: kind = "*i32"
        elif name in FP32: kind = "*fp32"
        elif name in BF16: kind = "*bf16"
        elif name in FLOATS: kind = "fp32"
        else: kind = "*i64" if name == "slot_mapping" else "i32"
        signature[name] = kind
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in names
                  if name not in constants and (signature[name].startswith("*") or "stride" in name)}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages} if config else {}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    shared[kernel.__name__] = compiled.metadata.shared

tables = [read_configs(_FILE)]
sizes = {"GROUP": 4, "HEAD_DIM": 128, "HEAD_PADDED": 128, "BLOCK_SIZE": 16, "HAS_WINDOW": True, "HAS_SOFTCAP": True, "EMULATE": False}
config = find_in(tables, "prefill", "d128_16", device)
compile_kernel(attention_prefill.paged_prefill_kernel, {**sizes, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}, config=config)
config = find_in(tables, "decode", "d128_16", device)
compile_kernel(attention_decode.paged_decode_kernel, {**sizes, "GROUP_PADDED": 16, "BLOCK_N": config.block_n, "NUM_SPLITS": 8}, config=config)
compile_kernel(attention_decode.join_splits_kernel, {"HEAD_DIM": 128, "HEAD_PADDED": 128, "BLOCK_N": config.block_n, "NUM_SPLITS": 8, "HAS_WINDOW": True, "EMULATE": False})
compile_kernel(rms_norm.rms_norm_kernel, {"ROWS": 1, "HIDDEN_PADDED": 4096, "HAS_DELTA": True, "EMULATE": False})
compile_kernel(rotary_store.rotary_store_kernel, {"HALF": 64, "HALF_PADDED": 64, "HEADS": 32, "KV_HEADS": 8, "EMULATE": False})
compile_kernel(silu_mul.silu_mul_kernel, {"BLOCK": 1024, "EMULATE": False})
is_fp8 = capability >= 89
quantized = "*fp8e4nv" if is_fp8 else "*i8"
compile_kernel(quantized_linear.quantize_rows_kernel, {"LARGEST": 127.0, "PADDED": 4096, "IS_FP8": is_fp8, "EMULATE": False}, {"quantized": quantized})
config = find_in(tables, "quantized_matmul", "m16", device)
blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": 8}
compile_kernel(quantized_linear.quantized_matmul_kernel, {**blocks, "IS_FP8": is_fp8, "HAS_BIAS": True, "HAS_ADDEND": True, "EMULATE": False}, {"x": quantized, "weight": quantized}, config=config)
print(json.dumps(shared))
"""  # noqa: E501

# Bytes of shared memory that a program may have.
_LIMITS = {80: 163 * 1024, 90: 227 * 1024}


@pytest.mark.parametrize(("capability", "device"), [(80, "NVIDIA A100"), (90, "NVIDIA H100")])
def test_kernels_compile_and_fit_the_memory_of_the_gpu(
    capability: int, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(capability), device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads(done.stdout.splitlines()[-1])
    assert len(shared) == 8
    assert max(shared.values()) <= _LIMITS[capability]
