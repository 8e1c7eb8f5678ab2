#!/bin/sh
# Makes the virtual environment of the peer OpenVINO GenAI: make_openvino.sh FOLDER. Beside ours, because it pins other
# versions of shared packages.
set -eu
folder=${1:?usage: make_openvino.sh FOLDER}
test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet 'openvino-genai==2026.4.*' 'numpy<3'
"$folder/bin/python" -c 'import openvino_genai; print("openvino-genai", openvino_genai.__version__)'
