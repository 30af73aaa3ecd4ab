# Two commands do everything: `make demo` and `make test`. The rest is for working on aitrain itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all lint bench gpu docs tiny-model vllm adapters machines ray deepspeed newest release install

demo: $(VENV)/.installed
	$(BIN)/aitrain demo

# One worker more than there are cores, at most four: many tests wait for the processes that they started. A file is
# tested by one worker from its beginning to its end, as it may have made something for all of its tests.
WORKERS := $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 4 ? cores + 1 : 4)))

# Compiled before, because containers often keep Python from doing so, and each process would compile it again.
PYTEST := $(BIN)/python -m compileall -q aitrain benchmarks tests && \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The fast suite. `make test-all` runs the tests marked slow as well.
test: install
	$(PYTEST) -m "not slow"

test-all: install
	$(PYTEST)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# All that is claimed, in an hour or more; `python -m benchmarks overhead --pairs 3` measures some of it.
bench: install
	$(BIN)/python -m benchmarks

# On a machine with a CUDA GPU: trains in every way that needs one, and writes docs/gpu-results.md.
gpu: install
	$(BIN)/python -m benchmarks.gpu_results

docs: install
	$(BIN)/python docs/write_scaling_tables.py
	$(BIN)/python docs/write_reference.py
	if command -v dot > /dev/null; then $(BIN)/python docs/draw_data_flow.py; fi
	.ci/docs

tiny-model: install
	$(BIN)/python -m tests.tiny_model aitrain/tiny_model

vllm:
	.ci/vllm

adapters: install
	.ci/adapters

machines: install
	.ci/machines

ray: install
	.ci/ray

deepspeed: install
	.ci/deepspeed

newest: install
	.ci/newest

# Checks, builds and tries a release; TAG=yes also writes its tag. Nothing is uploaded.
release: install
	.ci/release "$(VERSION)" $(if $(TAG),--tag)

install: $(VENV)/.installed-tests

# torch alone and first: what comes after finds it there, and pip fetches no second build of several gigabytes.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e .
	$(BIN)/python -m compileall -q aitrain benchmarks
	touch $@

# What the demo does not need: the tools of tests and linters.
$(VENV)/.installed-tests: $(VENV)/.installed
	$(PIP_INSTALL) -e ".[test]"
	touch $@
