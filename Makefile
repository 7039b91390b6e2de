# `make demo` and `make test` work on a fresh clone with Python >= 3.11 and make; both fill .venv from constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := $(shell find mla -name '*.py') mla/py.typed pyproject.toml constraints.txt README.md

.PHONY: demo test bench clean
demo: $(VENV)/demo.stamp
	$(BIN)/python examples/generate.py

test: $(VENV)/test.stamp
	$(BIN)/pytest

bench: $(VENV)/test.stamp
	$(BIN)/python benchmarks/bench_build.py

$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, got " + sys.version)'
	$(PYTHON) -m venv $(VENV)

# The tests run against the built wheel: the source tree is never on the path.
$(VENV)/wheel.stamp: $(BIN)/pip $(SOURCES)
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	touch $@

$(VENV)/demo.stamp: $(VENV)/wheel.stamp
	$(BIN)/pip install --quiet --constraint constraints.txt "$$(ls dist/mla-*.whl)[hf]" tqdm
	$(BIN)/pip install --quiet --no-deps --force-reinstall dist/mla-*.whl
	touch $@

$(VENV)/test.stamp: $(VENV)/wheel.stamp
	$(BIN)/pip install --quiet --constraint constraints.txt "$$(ls dist/mla-*.whl)[test]"
	$(BIN)/pip install --quiet --no-deps --force-reinstall dist/mla-*.whl
	touch $@

clean:
	rm -rf $(VENV) dist build
