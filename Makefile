# Every target sets up what it needs in .venv; a second run needs no network.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
WORKERS ?= 2
# The floors of pyproject.toml, which are what stock Colab ships.
OLDEST ?= .venv-oldest
FLOORS := jax==0.7.2 jaxlib==0.7.2 flax==0.11.2 optax==0.2.8 orbax-checkpoint==0.12.4 safetensors==0.6.2

# What the recorded numbers of PyTorch's were computed with; users are not bound to it.
TORCH := torch==2.13.0

# Where the built wheel is installed by itself.
CLEAN ?= .venv-wheel
# The site's tools; nothing of JAX, since docstrings are read and not imported.
DOCS ?= .venv-docs
# The benches' own PyTorch, which torchvision chooses, and the libraries that they compare with.
BENCH ?= .venv-bench
PYTEST_OPTIONS ?=

.PHONY: audit bench test test-all test-fast test-slow test-users test-oldest fuzz lint docs docs-serve wheel clean
audit: $(VENV)/.audit
	$(BIN)/python -m wdjax audit --out audit

# An hour of measurements for docs/results.md, on a machine that does nothing else.
bench: $(BENCH)/.peers
	$(BENCH)/bin/python bench/results.py

# One worker a file: its tests share programs, which two workers would both trace.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_OPTIONS)

# All but the slowest tenth of the tests, which tests/slow.txt lists by measured time.
test: $(VENV)/.test
	@echo "Half an hour on two cores, less from the second time on: programs are kept."
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.test
	@echo "An hour: what takes longest of everything; CI leaves it to you."
	$(PYTEST) --no-loadscope-reorder -m slow

test-all: test test-slow

# The tests of certificates by programs that are compiled as users compile them.
test-users: $(VENV)/.test
	@echo "Half an hour: the compiler optimises."
	WDJAX_AS_USERS=1 $(PYTEST) -m "not slow" tests/test_certify*.py tests/test_proofs.py \
		$(addprefix tests/test_, $(addsuffix .py, \
		bounds_of_parts metamorphic_certificates properties sandwich slack smoothing_bounds))

# Every example of a docstring, and the tests of the house's rules and of pure mathematics.
test-fast: $(VENV)/.test
	@echo "Two minutes, for a change of a line."
	$(PYTEST) wdjax $(addprefix tests/test_, $(addsuffix .py, \
		rooms release docstrings norms losses metrics transport hyperplane trees))

test-oldest: $(OLDEST)/.test
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.jax_cache_oldest $(OLDEST)/bin/python -m pytest \
		-n $(WORKERS) --dist loadfile -m "fast and not slow" tests

# Two minutes of ONNX and VNN-LIB files made by chance; the suite tries each kind for seconds.
fuzz: $(VENV)/.test
	WDJAX_FUZZ=500 $(BIN)/python -m pytest -q tests/test_fuzz.py -k "onnx or vnnlib"

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every warning is an error; the pages are in .site.
docs: $(DOCS)/.tools
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

docs-serve: $(DOCS)/.tools
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

# What a release uploads: sdist and wheel. The wheel is installed without the network: its
# dependencies are there, wdjax itself is only the wheel's.
wheel: $(CLEAN)/.dependencies
	rm -rf dist
	$(CLEAN)/bin/python -m hatchling build
	$(CLEAN)/bin/python -m twine check --strict dist/*
	$(CLEAN)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
		--force-reinstall dist/wdjax-*.whl
	cd $(CLEAN) && env -u PYTHONPATH bin/python -c "import wdjax; print(wdjax.__file__)"
	cd $(CLEAN) && env -u PYTHONPATH bin/wdjax --version
	cd $(CLEAN) && env -u PYTHONPATH bin/wdjax audit --samples 20 --quiet --out audit

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.audit: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable .
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable ".[test,torch]" $(TORCH)
	touch $@

$(OLDEST)/.test: pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install $(FLOORS) \
		--editable ".[test]"
	touch $@

$(CLEAN)/.dependencies: pyproject.toml
	test -x $(CLEAN)/bin/python || $(PYTHON) -m venv $(CLEAN)
	$(CLEAN)/bin/python -m pip --disable-pip-version-check --quiet install hatchling twine .
	$(CLEAN)/bin/python -m pip --disable-pip-version-check --quiet uninstall --yes wdjax
	touch $@

$(DOCS)/.tools: docs/site/requirements.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	touch $@

# visdom, which adv-lib imports, is built by a setuptools of 2025.
PEERS = $(BENCH)/bin/python -m pip --disable-pip-version-check --quiet install
$(BENCH)/.peers: pyproject.toml
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(PEERS) "setuptools<81" wheel
	$(PEERS) --no-build-isolation visdom
	$(PEERS) --editable ".[test,torch]" adv-lib torchattacks foolbox numba \
		pyautoattack torchvision
	touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(CLEAN) $(DOCS) $(BENCH) dist .site .jax_cache .jax_cache_oldest audit
