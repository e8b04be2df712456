# Everything from one word, on a machine that has Python >= 3.11 with venv: see `make help`.
# The first run of a target needs a package index; later runs need no network.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help compare verify test lint types doctest examples pytest clean

help:
	@echo "make compare   train and time attention and RNNs, write report/ (ARGS='--budget 60' for less)"
	@echo "make verify    check the hand-computed example"
	@echo "make test      lint, types, doctests, examples and tests"
	@echo "make clean     remove the environment and caches"

compare: $(VENV)/.cli-installed
	$(BIN)/attention-jax compare $(ARGS)

verify: $(VENV)/.cli-installed
	$(BIN)/attention-jax verify

test: lint types doctest examples pytest

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-installed
	$(BIN)/pyright --pythonpath $(BIN)/python

doctest: $(VENV)/.dev-installed
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest --doctest-modules attention_jax

examples: $(VENV)/.dev-installed
	set -e; for example in examples/*.py; do echo "$$example"; JAX_PLATFORMS=cpu $(BIN)/python "$$example"; done

pytest: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# `dev` contains `cli`. A changed pyproject.toml or constraints.txt installs again.
$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	touch $(VENV)/.cli-installed $@

$(VENV)/.cli-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[cli]'
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .venv-newest .jax_cache .pytest_cache .ruff_cache .hypothesis
