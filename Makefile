# `make demo` and `make test` work on a fresh machine with Python, pip and a C++ compiler.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
SOURCES := pyproject.toml CMakeLists.txt README.md $(wildcard csrc/*) $(shell find src -name '*.py*' -not -path '*/__pycache__*')

.PHONY: setup demo test lint bench clean

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
	$(PYTHON) -m pytest --doctest-glob=README.md README.md

lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

bench: setup
	$(PYTHON) bench/run.py

clean:
	rm -rf $(VENV) build dist
