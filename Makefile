# Every target sets up what it needs in .venv; a second run needs no network.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
WORKERS ?= 2

.PHONY: audit test lint clean
audit: $(VENV)/.audit
	$(BIN)/python -m wdjax audit --out audit

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS)

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

$(VENV)/.lint: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) audit
