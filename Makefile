# make demo and make test do all set-up by themselves; see `make help`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
SETUP := pyproject.toml constraints.txt scripts/setup_env.py
SUITES := norm activation rope softmax quant gemm_fp8 gemm_int8 grouped weight_only attention decode
WORKERS ?= 2
GPU_WORKERS ?= 8
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The processes of a run share compiled modules: each would compile all tests and sources anew, five seconds of it.
unexport PYTHONDONTWRITEBYTECODE

# On a GPU machine: the system's python, from the checkout, nothing installed.
SYSTEM_PYTHON := PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON)

.PHONY: help demo quick test lint check-python test-default test-versions versions test-interp test-compile test-exhaustive test-gpu test-gpu-exhaustive bench-gpu docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.ready-demo ## analyse, accelerate, verify and report the embedded language model
	@mkdir -p build
	$(BIN)/python examples/stdlib_lm/weights.py
	$(BIN)/tilewright optimize examples/stdlib_lm/model --prompts examples/stdlib_lm/model/prompts.jsonl \
	    --html build/stdlib_lm.html --json build/stdlib_lm.json

PHASES := lint test-default test-versions test-interp test-compile

quick: .venv/.ready-test ## tests of what changed since main, and of what stands on it: minutes
	$(BIN)/python scripts/quick_tests.py -n $(WORKERS)

# Every phase runs, whatever the one before it found; the last line and the exit code say which ones failed.
test: .venv/.ready-test ## everything a change must pass, without a GPU
	@failed=(); \
	for phase in $(PHASES); do \
	    echo "== $$phase"; \
	    $(MAKE) --no-print-directory $$phase || failed+=("$$phase"); \
	done; \
	if (( $${#failed[@]} )); then echo "make test: failed: $${failed[*]}"; exit 1; fi; \
	echo "make test: passed: $(PHASES)"

lint: .venv/.ready-test ## ruff, mypy, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Three processes: Triton's interpreter and its compiler cannot share one.
test-default: .venv/.ready-test ## references, dispatch, models, command line
	$(PYTEST)

test-interp: .venv/.ready-test ## every Triton kernel, forward and backward, in Triton's CPU interpreter
	TRITON_INTERPRET=1 $(PYTEST) -m interp

test-versions: .venv/.ready-test ## oldest and newest supported transformers, each in a folder of its own
	$(BIN)/python scripts/versions.py transformers

versions: .venv/.ready-test ## every supported transformers, torch and Triton, and the newest of each; for a schedule
	$(BIN)/python scripts/versions.py transformers torch triton --all --newest

test-compile: .venv/.ready-test ## every kernel compiled for every GPU it supports, its costs held to the ledger
	$(PYTEST) -m compile

test-exhaustive: .venv/.ready-test ## every dtype of every case and every form of every kernel, of which others sample; for a schedule
	$(PYTEST) --exhaustive tests/ops
	TRITON_INTERPRET=1 $(PYTEST) --exhaustive -m interp
	$(PYTEST) --exhaustive -m compile tests/compile

# In parallel where pytest-xdist is installed: most of the time goes into compiling kernels.
test-gpu: ## the tests that need a GPU, with the system's python
	TORCHINDUCTOR_COMPILE_THREADS=1 OMP_NUM_THREADS=1 $(SYSTEM_PYTHON) -m pytest -m gpu $(GPU_SAMPLE) \
	    $$($(PYTHON) -c 'import xdist' 2> /dev/null && echo "-n $(GPU_WORKERS) --dist worksteal -p no:benchmark")

test-gpu-exhaustive: GPU_SAMPLE := --exhaustive
test-gpu-exhaustive: test-gpu ## every dtype of every case on a GPU, of which test-gpu samples; for a schedule

bench-gpu: ## measure every suite on this GPU and write the performance pages
	for suite in $(SUITES); do \
	    $(SYSTEM_PYTHON) -m tilewright bench $$suite --json benchmarks/results/h200/$$suite.json; \
	done
	$(SYSTEM_PYTHON) -m tilewright bench gemm --json benchmarks/results/h200/gemm_bf16.json
	$(SYSTEM_PYTHON) -m tilewright bench --report

docs: .venv/.ready-test ## write the generated pages: performance, plots, ops, masks
	$(BIN)/python -m tilewright bench --report
	$(BIN)/python scripts/op_pages.py
	$(BIN)/python scripts/mask_pages.py

clean: ## remove the environment, caches and outputs
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/.ready-test: $(SETUP) | check-python
	$(PYTHON) scripts/setup_env.py test

# Whatever `make test` needs includes what the demo needs.
.venv/.ready-demo: $(SETUP) | check-python
	@if [[ .venv/.ready-test -nt pyproject.toml && .venv/.ready-test -nt constraints.txt ]]; then touch $@; \
	else $(PYTHON) scripts/setup_env.py demo; fi

check-python:
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) is missing. Install it: sudo apt-get install python3 python3-venv"; exit 1; }
