# `make demo` and `make test` work on a fresh clone with Python >= 3.11 and make; both fill .venv from constraints.txt.
# `make test-ipex` fills .venv-ipex from constraints-ipex.txt (about 6 GB) and needs Python <= 3.13.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
IPEX_VENV := .venv-ipex
# Tests run in so many processes of one thread each, a file in one of them.
WORKERS ?= 2
PYTEST_OPTIONS := -n $(WORKERS) --dist loadfile
IPEX_BIN  := $(IPEX_VENV)/bin
SOURCES := $(shell find mla -name '*.py' -o -path 'mla/golden/*' -type f -not -name '*.pyc') pytest_mla.py mla/py.typed pyproject.toml constraints.txt README.md

.PHONY: docs demo test test-ipex bench clean
demo: $(VENV)/demo.stamp
	$(BIN)/python examples/generate.py

test: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_OPTIONS)

# The whole suite with the oldest torch, then the kernels of intel-extension-for-pytorch: in a process of their own, because
# importing it changes torch. Formatting, types and layers are checked by `make test`, with the tools' own pins.
test-ipex: $(IPEX_VENV)/test.stamp
	OMP_NUM_THREADS=1 $(IPEX_BIN)/pytest $(PYTEST_OPTIONS) -m "not ipex" --deselect tests/test_static.py::test_source_tree_is_clean
	$(IPEX_BIN)/pytest -m ipex tests/test_ipex.py

# The API reference in build/docs; fails on a dead link.
docs: $(VENV)/test.stamp
	$(BIN)/python docs/build.py build/docs

bench: $(VENV)/test.stamp
	$(BIN)/python benchmarks/bench_build.py
	$(BIN)/python benchmarks/bench_cpu.py

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
	$(BIN)/pip install --quiet --constraint constraints.txt "$$(ls dist/mla-*.whl)[test,triton]"
	$(BIN)/pip install --quiet --no-deps --force-reinstall dist/mla-*.whl
	touch $@

$(IPEX_BIN)/pip:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 11) <= v < (3, 14) and "Python 3.11 to 3.13 is needed, got " + sys.version)'
	$(PYTHON) -m venv $(IPEX_VENV)

$(IPEX_VENV)/test.stamp: $(VENV)/wheel.stamp $(IPEX_BIN)/pip constraints-ipex.txt
	$(IPEX_BIN)/pip install --quiet --constraint constraints-ipex.txt "$$(ls dist/mla-*.whl)[test,ipex]"
	$(IPEX_BIN)/pip install --quiet --no-deps --force-reinstall dist/mla-*.whl
	touch $@

clean:
	rm -rf $(VENV) $(IPEX_VENV) dist build
