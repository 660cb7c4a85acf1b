# Two commands: `make demo` trains the quickstart, `make test` runs the tests. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0
# More arguments of `pip install torch`, such as the index of another build: make demo TORCH_ARGS=--index-url=URL
TORCH_ARGS ?=
CPU_BUILD := --index-url=https://download.pytorch.org/whl/cpu

.PHONY: demo test page-test benchmarks-smoke gpu quick lint types docs proto schema clean

demo: $(READY)
	$(BIN)/hetero-pp launch configs/quickstart.yaml
	$(BIN)/python tests/demo.py

# Six workers on two cores, because tests of launches wait for other processes half of their time. Tests of the page are
# not collected, because each worker would import a browser's driver. Bytecode is written even where the
# environment says not to: otherwise every process that a test starts compiles all modules again.
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --ignore tests/page -m "not long and not browser"

# Opens the page of runs in Debian's chromium.
page-test: $(READY)
	$(BIN)/python -m pytest tests/page

# Runs every benchmark once, at its smallest sizes. `make test` has those that take at most a few seconds.
benchmarks-smoke: $(READY)
	$(BIN)/python -m pytest -n 3 --dist load tests/benchmarks/test_smoke.py

# Measures training on one GPU.
gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py

# Runs the tests that start no process, in about a minute. Use it during development.
quick: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not starts_processes"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Builds the site in build/site. A warning, such as a link that leads nowhere, is an error.
docs: $(READY)
	$(BIN)/python -m sphinx -q --fresh-env --fail-on-warning --keep-going --conf-dir docs . build/site
	@echo "The site is build/site/index.html."

# torch is installed first, pinned, so that TORCH_ARGS can select its index. Sizes are those on Linux x86-64 with Python
# 3.11. On Linux, PyPI's torch needs CUDA's libraries even on a machine without a GPU.
$(READY): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'hetero-pp needs Python 3.11 or newer, this is ' + sys.version.split()[0])"
	@echo "Setting up $(VENV). Downloads: $(TORCH) $(TORCH_ARGS), then 0.4 GB of other packages."
	@test -n "$(TORCH_ARGS)" || echo "On Linux PyPI's torch is 2.7 GB, nearly all of it for GPUs; without one 0.2 GB do:"
	@test -n "$(TORCH_ARGS)" || echo "    make clean; make demo TORCH_ARGS=$(CPU_BUILD)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install $(TORCH) $(TORCH_ARGS)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. hetero_pp/messages/messages.proto

schema: $(READY)
	$(BIN)/python benchmarks/launch_with_faults.py --schema > benchmarks/fault_injection/schema.json
	$(BIN)/python docs/generate_reference.py

clean:
	rm -rf $(VENV) build docs/results .pytest_cache .hypothesis .mypy_cache .ruff_cache
