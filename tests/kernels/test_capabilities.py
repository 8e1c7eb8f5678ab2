"""The capability probe, and that our package lives beside a library that looks for another of its name."""

import subprocess
import sys

import torch

from kernels.capabilities import default_dtype, probe_capabilities


def test_probe_looks_once() -> None:
    assert probe_capabilities() is probe_capabilities()


def test_default_dtype_is_one_the_processor_computes_natively() -> None:
    expected = torch.bfloat16 if probe_capabilities().has_cpu_bf16 else torch.float32
    assert default_dtype(torch.device("cpu")) == expected


def test_package_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import kernels"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_transformers_does_not_take_us_for_its_kernel_hub() -> None:
    code = (
        "import kernels.rms_norm, torch, transformers\n"
        "assert not transformers.utils.is_kernels_available()\n"
        "config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,\n"
        "                                  num_attention_heads=2)\n"
        "model = transformers.LlamaForCausalLM(config)\n"
        "assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 8)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
