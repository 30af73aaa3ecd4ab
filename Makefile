# Two commands do everything: `make demo` and `make test`. The rest is for working on aitrain itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all lint bench bench-gpu bench-vllm gpu docs tiny-model vllm adapters machines ray deepspeed release install

demo: $(VENV)/.installed
	$(BIN)/aitrain demo

# One worker more than there are cores, at most four: many tests wait for the processes that they started. A file is
# tested by one worker from its beginning to its end, as it may have made something for all of its tests.
WORKERS := $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 4 ? cores + 1 : 4)))

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

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

bench: install
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.overhead
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.slow_environment
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.in_episode_generation
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.multi_turn_learning
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scaling
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fleet
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scale
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ahead
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ahead --learning
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.episodes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.evaluation
	$(BIN)/python -m benchmarks.memory --pairs 1
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m benchmarks.intervals
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.comparison
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.diagnostics
	$(BIN)/python -m benchmarks.properties
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.torture --kills 10
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.sweep
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.sampling
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.padding
	$(BIN)/python -m benchmarks.repair
	$(BIN)/python -m benchmarks.busy

# On a machine with a CUDA GPU: trains in every way that needs one, and writes docs/gpu-results.md.
gpu: install
	$(BIN)/python -m benchmarks.gpu_results

# On a machine with a CUDA GPU.
bench-gpu: install
	$(BIN)/python -m benchmarks.gpu

# In the environment of `make vllm`, which is made if it is not there.
bench-vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.weight_sync
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.importance
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.generation
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.free_running
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.evaluation --vllm

.venv-vllm/.installed:
	.ci/vllm

docs: install
	$(BIN)/python -c "from aitrain.options import documentation, train; open('docs/options.md', 'w').write(documentation.options_page(train.TrainConfig))"
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

# Checks, builds and tries a release; TAG=yes also writes its tag. Nothing is uploaded.
release: install
	.ci/release "$(VERSION)" $(if $(TAG),--tag)

install: $(VENV)/.installed-tests

# torch alone and first: what comes after finds it there, and pip fetches no second build of several gigabytes. A checkout is
# compiled here, because containers often keep Python from doing so, and each process would compile it again.
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
