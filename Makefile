# Every target sets up what it needs in .venv; a second run needs no network.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
WORKERS ?= 2
# The floors of pyproject.toml, which are what stock Colab ships.
OLDEST ?= .venv-oldest
FLOORS := jax==0.7.2 jaxlib==0.7.2 flax==0.11.2 optax==0.2.8 orbax-checkpoint==0.12.4 safetensors==0.6.2

.PHONY: audit test test-oldest lint clean
audit: $(VENV)/.audit
	$(BIN)/python -m wdjax audit --out audit

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

test-oldest: $(OLDEST)/.test
	JAX_COMPILATION_CACHE_DIR=.jax_cache_oldest $(OLDEST)/bin/python -m pytest -n $(WORKERS) -m fast tests

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.audit: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable .
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable ".[test,torch]"
	touch $@

$(OLDEST)/.test: pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install $(FLOORS) \
		--editable ".[test]"
	touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) .jax_cache .jax_cache_oldest audit
