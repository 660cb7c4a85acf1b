# Two commands: `make demo` trains the quickstart, `make test` runs the tests. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test quick lint types proto schema clean

demo: $(READY)
	$(BIN)/hetero-pp launch configs/quickstart.yaml

# Three at a time, as most tests wait for processes to start; alone what has to end, or to arrive, within seconds.
test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/faults --ignore tests/link
	$(BIN)/python -m pytest tests/faults tests/link

# What starts no process, in about a minute: for while one works.
quick: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not starts_processes"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# torch comes first and pinned: a plain `torch` may bring gigabytes of CUDA libraries that a CPU never uses.
$(READY): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'hetero-pp needs Python 3.11 or newer, this is ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
		--plugin=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=only_sync,quiet:. hetero_pp/messages/messages.proto

schema: $(READY)
	$(BIN)/hetero-pp schema > configs/schema.json

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache
