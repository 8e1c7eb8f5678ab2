#!/bin/sh
# Makes the virtual environment of the baseline headroom: make_headroom.sh FOLDER. Beside ours, because it brings other
# versions of shared packages.
set -eu
folder=${1:?usage: make_headroom.sh FOLDER}
test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
# By hand, to leave out the client of model providers that it names as a dependency and does not need to compress.
"$folder/bin/python" -m pip install --quiet --no-deps 'headroom-ai==0.42.*'
"$folder/bin/python" -m pip install --quiet tiktoken pydantic click rich opentelemetry-api 'ast-grep-cli!=0.44.1' pyyaml \
  tomlkit truststore hf-xet filelock
"$folder/bin/python" -c 'import importlib.metadata as m; print("headroom-ai", m.version("headroom-ai"))'
echo "$folder/bin/python"
