#!/bin/sh
# Makes the virtual environment of the peer LongLLMLingua, and unpacks a GGUF file into the folder that it reads:
# make_longllmlingua.sh FOLDER model.gguf. Beside ours, because it needs an older transformers.
set -eu
folder=${1:?usage: make_longllmlingua.sh FOLDER model.gguf}
model=${2:?usage: make_longllmlingua.sh FOLDER model.gguf}
test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet 'torch==2.13.0'
"$folder/bin/python" -m pip install --quiet 'llmlingua==0.2.2' 'transformers==4.46.3' 'numpy<2' 'gguf>=0.10'
test -f "$folder/model/config.json" || "$folder/bin/python" - "$model" "$folder/model" <<'PYTHON'
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer

source, target = Path(sys.argv[1]), sys.argv[2]
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
# This reader leaves a missing output layer at random values; where the file holds none, it is the input embedding.
model.config.tie_word_embeddings = True
model.tie_weights()
model.save_pretrained(target)
PYTHON
echo "$folder/bin/python"
