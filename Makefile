# `make demo` and `make test` work on a fresh machine with Python, pip and a C++ compiler.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
SOURCES := pyproject.toml CMakeLists.txt README.md $(wildcard csrc/*) $(shell find src -name '*.py*' -not -path '*/__pycache__*')

.PHONY: setup demo test test-oldest lint bench clean

setup: $(VENV)/.installed

$(VENV)/.requirements: requirements-dev.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

# The installed package is what is tested; the build is incremental.
$(VENV)/.installed: $(VENV)/.requirements $(SOURCES)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps .
	touch $@

demo: setup
	$(PYTHON) demo/bert.py

test: setup lint
	$(PYTHON) -m pytest -n auto
	$(PYTHON) -m pytest --doctest-modules --pyargs axisnorm
	$(PYTHON) -m pytest --doctest-glob='*.md' README.md docs/onnx-export.md docs/swap.md

# The oldest torch and NumPy that are supported, outside `test`: the wheel of torch is gigabytes.
# Nothing here needs another library's models, exporters or a browser.
OLDEST := .venv-oldest
OLDEST_TESTS := $(addprefix tests/test_,$(addsuffix .py,scheme reference native nests functional \
  properties numpy_memory torch torch_memory fused nn house audit swap transformer_layers))

$(OLDEST)/.requirements: requirements-oldest.txt
	python3 -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-oldest.txt
	touch $@

$(OLDEST)/.installed: $(OLDEST)/.requirements $(SOURCES)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps .
	touch $@

# That torch warns of itself when its compiler saves its settings.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n auto -W "ignore:Skipping serialization of skipfiles" $(OLDEST_TESTS)

lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

bench: setup
	$(PYTHON) bench/run.py

clean:
	rm -rf $(VENV) $(OLDEST) build dist
